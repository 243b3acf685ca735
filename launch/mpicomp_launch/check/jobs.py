"""Small jobs, through the same launcher as the user's: ranks add numbers up, here and across."""

from __future__ import annotations

import io
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mpicomp_launch import dialects, network, planner, session
from mpicomp_launch.check.elsewhere import last_json
from mpicomp_launch.check.findings import FAILURE, OK, Finding
from mpicomp_launch.errors import LaunchError
from mpicomp_launch.hosts import bracketed
from mpicomp_launch.options import Options
from mpicomp_launch.output import Printer
from mpicomp_launch.plan import Plan
from mpicomp_launch.resolve import Resolved

RANKS = str(Path(__file__).with_name("ranks.py"))
START_SECONDS = 30.0
WHOLE_SECONDS = 120.0


def try_jobs(
    plan: Plan,
    resolved: Resolved,
    python: Sequence[str],
    environ: Mapping[str, str],
    broken: Container[str],
) -> Iterator[Finding]:
    """Two ranks on the first host, then on it and each other one.

    A scheduler places ranks as it likes, so there it is one job, of as many ranks as the user's.
    """
    words = [*python, RANKS]
    if plan.allocation is not None:
        what = f"{plan.np} ranks, by {plan.allocation.origin}"
        yield add_up(what, resolved, words, environ, plan.np, None)
        return
    named = list(dict.fromkeys(place.host for place in plan.placement))
    hosts = [host for host in named if host not in broken]
    if named and not hosts:
        return
    first, *others = hosts or [os.uname().nodename]
    is_here = network.is_here(first)
    what = f"2 ranks {'here' if is_here else f'on {first}'}"
    yield add_up(what, resolved, words, environ, 2, f"{bracketed(first)}:2")
    for other in others:
        what = f"2 ranks, {'here' if is_here else first} and {other}"
        both = ",".join(f"{bracketed(host)}:1" for host in (first, other))
        yield add_up(what, resolved, words, environ, 2, both)


def add_up(
    what: str,
    resolved: Resolved,
    words: Sequence[str],
    environ: Mapping[str, str],
    np: int,
    hosts: str | None,
) -> Finding:
    """A job with the user's options, on these hosts, and how fast it was."""
    own = os.uname().nodename
    options = replace(resolved.options, np=np, hosts=hosts, hostfile=None, output_dir=None)
    try:
        plan, _ = planner.make_plan(Resolved(options, {}), words, environ)
    except LaunchError as error:
        return Finding(own, what, FAILURE, str(error))
    status, text = run_quietly(plan)
    if status:
        advice = "run a job with --verbose; docs/launching.md has a page for it"
        return Finding(own, what, FAILURE, text or f"status {status}", advice)
    said = last_json(text)
    if said is None:
        return Finding(own, what, FAILURE, "it ended well without having said anything")
    rate = said["bytes_per_second"]
    value = f"all-reduce of 1 KB {said['microseconds']:.0f} us, large ones {rate / 1e6:,.0f} MB/s"
    return Finding(own, what, OK, value)


def run_quietly(plan: Plan) -> tuple[int, str]:
    """Runs a job; returns its status, and its output or the reason of its failure."""
    out, err = io.BytesIO(), io.BytesIO()
    dialect = dialects.for_plan(plan)
    options = Options(start_timeout=START_SECONDS, timeout=WHOLE_SECONDS, grace=1.0)
    printer = Printer(out, err)
    outcome = session.play(plan, dialect, dialect.command(plan), options, printer)
    if not outcome.status:
        return 0, out.getvalue().decode(errors="replace")
    text = outcome.text or err.getvalue().decode(errors="replace")  # else what mpirun says
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return outcome.status, "; ".join([*outcome.reason, *lines[-1:]])
