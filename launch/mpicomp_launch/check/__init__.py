"""`--check`: what works here, what does not, and what to do about it."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpicomp_launch import command, dialects, network, planner, session
from mpicomp_launch.check import elsewhere, here, report
from mpicomp_launch.check.findings import FAILURE, OK, WARNING, Finding
from mpicomp_launch.errors import LaunchError
from mpicomp_launch.options import Options
from mpicomp_launch.output import Printer
from mpicomp_launch.plan import Plan
from mpicomp_launch.resolve import Resolved

RANKS = str(Path(__file__).with_name("ranks.py"))
START_SECONDS = 30.0
WHOLE_SECONDS = 120.0


def run(
    resolved: Resolved, words: Sequence[str], environ: Mapping[str, str], *, as_json: bool
) -> int:
    """Prints the findings; returns 1 if the job could not run, else 0."""
    findings = list(look(resolved, words or [sys.executable, "-c", "pass"], environ))
    report.show(findings, as_json=as_json)
    return int(any(each.state == FAILURE for each in findings))


def look(resolved: Resolved, words: Sequence[str], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Everything, this host first."""
    own = os.uname().nodename
    try:
        user = command.parse(words, environ)
    except LaunchError as error:
        yield Finding(own, "command", FAILURE, str(error))
        return
    python = [user.python, *user.options]
    paths = [*elsewhere.default_paths(), *existing(user.arguments[:1])]
    try:
        found = elsewhere.ask(
            elsewhere.words_of_probe(python, paths, deep=True), elsewhere.LONG_SECONDS
        )
    except elsewhere.Unanswered as error:
        yield Finding(own, "Python", FAILURE, str(error), f"{user.python} must be a Python")
        return
    yield from here.judge(found, network.has_rdma())
    yield from look_at_job(resolved, words, environ, python, paths, found)


def look_at_job(
    resolved: Resolved,
    words: Sequence[str],
    environ: Mapping[str, str],
    python: Sequence[str],
    paths: Sequence[str],
    found: Mapping[str, Any],
) -> Iterator[Finding]:
    """The launcher, the other hosts, and small jobs on each of them."""
    own = os.uname().nodename
    try:
        plan, warnings = planner.make_plan(with_ranks(resolved), words, environ)
    except LaunchError as error:
        yield Finding(own, "launcher", FAILURE, str(error))
        return
    yield Finding(
        own, "launcher", OK, f"{plan.mpi.family} {plan.mpi.version} ({plan.mpi.launcher})"
    )
    for warning in warnings:
        yield Finding(own, "options", WARNING, warning)
    hosts = [place.host for place in plan.placement if not network.is_here(place.host)]
    with ThreadPoolExecutor(max_workers=32) as pool:
        results = pool.map(
            lambda host: elsewhere.check_host(host, plan.agent, python, paths, found), hosts
        )
        there = [finding for findings in results for finding in findings]
    yield from there
    yield add_up("2 ranks here", resolved, [*python, RANKS], environ, None)
    broken = {each.where for each in there if each.state == FAILURE}
    for host in hosts:
        if host not in broken:
            yield add_up(f"2 ranks, here and {host}", resolved, [*python, RANKS], environ, host)


def existing(names: Sequence[str]) -> list[str]:
    """Absolute paths of those that are files here."""
    return [os.path.abspath(name) for name in names if os.path.exists(name)]


def with_ranks(resolved: Resolved) -> Resolved:
    """With a number of ranks where nothing says it: a check needs none."""
    options = resolved.options
    named = options.hosts or options.hostfile or any(each.slots for each in options.host)
    if options.np is None and not named:
        options = replace(options, np=2)
    return Resolved(options, resolved.origins)


def add_up(
    what: str,
    resolved: Resolved,
    words: Sequence[str],
    environ: Mapping[str, str],
    host: str | None,
) -> Finding:
    """A job of two ranks that adds numbers up, on this host or on two."""
    own = os.uname().nodename
    hosts = None if host is None else f"{own},{host}"
    options = replace(resolved.options, np=2, hosts=hosts, hostfile=None, host=(), output_dir=None)
    try:
        plan, _ = planner.make_plan(Resolved(options, {}), words, environ)
    except LaunchError as error:
        return Finding(own, what, FAILURE, str(error))
    status, text = run_quietly(plan)
    if status:
        return Finding(own, what, FAILURE, text or f"status {status}")
    said = json.loads(text.splitlines()[-1])
    rate = said["bytes_per_second"]
    value = f"all-reduce of 1 KB {said['microseconds']:.0f} us, large ones {rate / 1e6:,.0f} MB/s"
    return Finding(own, what, OK, value)


def run_quietly(plan: Plan) -> tuple[int, str]:
    """Runs a job; returns its status, and its output or the reason of its failure."""
    out = io.BytesIO()
    dialect = dialects.for_plan(plan)
    options = Options(start_timeout=START_SECONDS, timeout=WHOLE_SECONDS, grace=1.0)
    printer = Printer(out, io.BytesIO())
    outcome = session.play(plan, dialect, dialect.command(plan), options, printer)
    if not outcome.status:
        return 0, out.getvalue().decode()
    return outcome.status, "; ".join([*outcome.reason, *outcome.text.splitlines()[-1:]])
