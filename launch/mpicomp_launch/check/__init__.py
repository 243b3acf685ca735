"""`--check`: what works here, what does not, and what to do about it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from mpicomp_launch import allocation, command, network, planner
from mpicomp_launch.check import elsewhere, here, jobs, report
from mpicomp_launch.check.findings import FAILURE, OK, WARNING, Finding
from mpicomp_launch.errors import LaunchError
from mpicomp_launch.resolve import Resolved


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
            elsewhere.words_of_probe(python, paths, environ), elsewhere.ASK_SECONDS
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
        resolved = with_ranks(resolved, environ)
        plan, warnings = planner.make_plan(resolved, words, environ)
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
            lambda host: elsewhere.check_host(host, plan, python, paths, found), hosts
        )
        there = [finding for findings in results for finding in findings]
    yield from there
    broken = {each.where for each in there if each.state == FAILURE}
    yield from jobs.try_jobs(plan, resolved, python, environ, broken)


def existing(names: Sequence[str]) -> list[str]:
    """Absolute paths of those that are files here."""
    return [os.path.abspath(name) for name in names if os.path.exists(name)]


def with_ranks(resolved: Resolved, environ: Mapping[str, str]) -> Resolved:
    """With a number of ranks where nothing says it: a check needs none."""
    options = resolved.options
    named = options.hosts or options.hostfile or any(each.slots for each in options.host)
    granted = allocation.detect(environ)
    if options.np is None and not (granted.is_for_ranks if granted else named):
        options = replace(options, np=2)
    return Resolved(options, resolved.origins)
