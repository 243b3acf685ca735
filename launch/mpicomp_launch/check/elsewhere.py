"""Other hosts: whether they are reached, have the same of everything, and find the way back."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpicomp_launch import network
from mpicomp_launch.agent import Agent
from mpicomp_launch.check.findings import FAILURE, OK, WARNING, Finding
from mpicomp_launch.diagnose import WAY_BACK, complaint

PROBE = Path(__file__).with_name("probe.py")
ASK_SECONDS = 30
LONG_SECONDS = 200  # with MPI and GPUs
LARGE_OFFSET_SECONDS = 1.0


class Unanswered(Exception):
    """A host gave no answer; the text is what it said instead."""


def ask(argv: Sequence[str], seconds: float) -> dict[str, Any]:
    """Runs `probe.py` by a command that reads it from standard input.

    Raises:
        Unanswered: It could not be run.
    """
    try:
        with PROBE.open("rb") as source:
            done = subprocess.run(
                argv,
                stdin=source,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
            )
    except OSError as error:
        raise Unanswered(f"{argv[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise Unanswered(f"no answer within {seconds:g} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise Unanswered(lines[-1] if lines else f"status {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def words_of_probe(python: Sequence[str], paths: Sequence[str], *, deep: bool) -> list[str]:
    """The command that reads the probe."""
    pythonpath = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    wanted = {"paths": list(paths), "pythonpath": pythonpath, "deep": deep}
    return [*python, "-", json.dumps(wanted)]


def check_host(
    host: str, agent: Agent, python: Sequence[str], paths: Sequence[str], here: Mapping[str, Any]
) -> list[Finding]:
    """Everything about one other host."""
    reach = agent.command(host, ["true"])
    said = complaint(reach)
    if said is not None:
        return [Finding(host, "reached", FAILURE, said, f"try by hand: {shlex.join(reach)}")]
    found = [Finding(host, "reached", OK, f"by {agent.program[0]}")]
    question = agent.command(host, words_of_probe(python, paths, deep=False))
    asked = time.time()
    try:
        there = ask(question, ASK_SECONDS)
    except Unanswered as error:
        version = shlex.join(agent.command(host, [*python, "-V"]))
        advice = f"the same Python must be at the same path; try by hand: {version}"
        return [*found, Finding(host, "Python", FAILURE, str(error), advice)]
    offset = there["time"] - (asked + time.time()) / 2
    found += compare(host, there, here)
    found.append(judge_clock(host, offset))
    return [*found, *check_way_back(host, agent, python)]


def compare(host: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Finding]:
    """Versions and paths, against those of this host."""
    pairs = {"Python": (there["python"], here["python"])}
    pairs |= {name: (there["versions"][name], own) for name, own in here["versions"].items()}
    for what, (other, own) in pairs.items():
        if other == own:
            yield Finding(host, what, OK, str(other))
        else:
            advice = "ranks must run the same on every host"
            yield Finding(host, what, FAILURE, f"{other or 'absent'}, here {own}", advice)
    if there["missing"]:
        advice = "these must be at the same path on every host"
        yield Finding(host, "paths", FAILURE, f"absent: {', '.join(there['missing'])}", advice)
    else:
        yield Finding(host, "paths", OK, "program and working directory are there")


def judge_clock(host: str, offset: float) -> Finding:
    """Traces of several hosts are laid side by side by their clocks."""
    value = f"{offset:+.2f} s against this host"
    if abs(offset) < LARGE_OFFSET_SECONDS:
        return Finding(host, "clock", OK, value)
    return Finding(host, "clock", WARNING, value, "start a time service (chrony, ntpd)")


def check_way_back(host: str, agent: Agent, python: Sequence[str]) -> Iterator[Finding]:
    """A connection from the host to a port of ours, which is open for this moment only."""
    import socket

    way = network.interface_towards(host)
    if way is None:
        advice = "check the name and the routes"
        yield Finding(host, "way", WARNING, "the route to it is not known", advice)
        return
    why = f"the route to {host} goes through it"
    yield Finding(host, "interface", OK, f"{way.name}, {way.address} in {way.network}: {why}")
    with socket.create_server((way.address, 0)) as listener:
        port = str(listener.getsockname()[1])
        words = agent.command(host, [*python, "-c", WAY_BACK, way.address, port])
        said = complaint(words)
    if said is None:
        yield Finding(host, "way back", OK, f"it can connect to {way.address}")
    else:
        advice = f"open {way.address} for it in the firewalls; MPI uses any port"
        yield Finding(host, "way back", FAILURE, said, advice)
    if agent.is_ssh:
        yield check_ssh_back(host, agent, way.address)


def check_ssh_back(host: str, agent: Agent, address: str) -> Finding:
    """Ssh from there to here, which jobs need that are started there."""
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
    port = [] if agent.port is None else ["-p", str(agent.port)]
    words = agent.command(host, ["ssh", *options, *port, address, "true"])
    said = complaint(words)
    if said is None:
        return Finding(host, "ssh back", OK, f"to {address}")
    advice = f"only jobs started there need it; try by hand: {shlex.join(words)}"
    return Finding(host, "ssh back", WARNING, said, advice)


def default_paths() -> list[str]:
    """What must be there on every host: the launcher's files and the working directory."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [os.path.join(package, "worker.py"), os.path.realpath(os.curdir)]
