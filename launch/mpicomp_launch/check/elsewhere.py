"""Other hosts: whether they are reached, have the same of everything, and find the way back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpicomp_launch import network
from mpicomp_launch.agent import Agent
from mpicomp_launch.check import here
from mpicomp_launch.check.findings import FAILURE, OK, WARNING, Finding
from mpicomp_launch.diagnose import WAY_BACK, complaint
from mpicomp_launch.network import Interface
from mpicomp_launch.plan import Plan

PROBE = Path(__file__).with_name("probe.py")
ASK_SECONDS = 200  # MPI, GPUs and CuPy have a minute each
LOADS = ("PYTHONPATH", "LD_LIBRARY_PATH", "MPI4PY_LIBMPI", "MPI4PY_MPIABI")
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
    answer = last_json(done.stdout)
    if answer is None:
        raise Unanswered("it runs, but does not answer as a Python would")
    return answer


def last_json(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object; others may print, too, even at the end."""
    for line in reversed(text.splitlines()):
        if line.startswith('{"'):
            with contextlib.suppress(ValueError):
                said: dict[str, Any] = json.loads(line)
                return said
    return None


def words_of_probe(
    python: Sequence[str], paths: Sequence[str], environ: Mapping[str, str]
) -> list[str]:
    """The command that reads the probe."""
    loads = {name: environ[name] for name in LOADS if name in environ}
    return [*python, "-", json.dumps({"paths": list(paths), "loads": loads})]


def check_host(
    host: str, plan: Plan, python: Sequence[str], paths: Sequence[str], own: Mapping[str, Any]
) -> list[Finding]:
    """Everything about one other host."""
    agent = plan.agent
    reach = agent.command(host, ["true"])
    said = complaint(reach)
    if said is not None:
        return [Finding(host, "reached", FAILURE, said, f"try by hand: {shlex.join(reach)}")]
    found = [Finding(host, "reached", OK, f"by {agent.program[0]}")]
    question = agent.command(host, words_of_probe(python, paths, plan.environ))
    asked = time.time()
    try:
        there = ask(question, ASK_SECONDS)
    except Unanswered as error:
        version = shlex.join(agent.command(host, [*python, "-V"]))
        advice = f"the same Python must be at the same path; try by hand: {version}"
        return [*found, Finding(host, "Python", FAILURE, str(error), advice)]
    # It tells the time first and then works: half of what is left is the way there.
    offset = there["time"] - (asked + time.time() - there["took"]) / 2

    def by_hand(words: Sequence[str]) -> str:
        return f"try by hand: {shlex.join(agent.command(host, words))}"

    found += compare(host, there, own, python, by_hand)
    found += here.judge_machine(host, there, network.has_rdma())
    found.append(judge_clock(host, offset))
    return [*found, *check_way_back(host, plan, python)]


def compare(
    host: str,
    there: Mapping[str, Any],
    own: Mapping[str, Any],
    python: Sequence[str],
    by_hand: Callable[[Sequence[str]], str],
) -> Iterator[Finding]:
    """Versions and paths, against those of this host."""
    show = [*python, "-m", "pip", "show"]
    triples = [("Python", there["python"], own["python"], [*python, "-V"])]
    for name, version in own["versions"].items():
        triples.append((name, there["versions"][name], version, [*show, name]))
    libraries = [each["mpi"].get("text") for each in (there, own)]
    if all(libraries) and libraries[0] != libraries[1]:
        triples.append(("same MPI", *libraries, [*python, "-m", "mpi4py", "--mpi-lib-version"]))
    for what, other, mine, words in triples:
        state = likeness(other, mine)
        value = (other or "absent") + ("" if state == OK else f", here {mine or 'absent'}")
        advice = "" if state == OK else f"ranks must run the same on every host; {by_hand(words)}"
        yield Finding(host, what, state, value, advice)
    if there["missing"]:
        shown = by_hand(["ls", "-d", *there["missing"]])
        advice = f"these must be at the same path on every host; {shown}"
        yield Finding(host, "paths", FAILURE, f"absent: {', '.join(there['missing'])}", advice)
    else:
        yield Finding(host, "paths", OK, "program and working directory are there")


def likeness(version: str | None, own: str | None) -> str:
    """The same, or the same in name and first two numbers, with which a job runs, or neither."""
    if version == own:
        return OK
    released = [re.match(r"\D*\d+\.\d+", each or "") for each in (version, own)]
    numbers = {each.group() if each else None for each in released}
    return WARNING if len(numbers) == 1 and None not in numbers else FAILURE


def judge_clock(host: str, offset: float) -> Finding:
    """Lines of output with the time before them are compared between hosts."""
    value = f"{offset:+.2f} s against this host"
    if abs(offset) < LARGE_OFFSET_SECONDS:
        return Finding(host, "clock", OK, value)
    return Finding(host, "clock", WARNING, value, "start a time service (chrony, ntpd)")


def check_way_back(host: str, plan: Plan, python: Sequence[str]) -> Iterator[Finding]:
    """A connection from the host to a port of ours, which is open for this moment only."""
    import socket

    way = network.interface_towards(host)
    if way is None:
        advice = "check the name and the routes"
        yield Finding(host, "way", WARNING, "the route to it is not known", advice)
        return
    yield Finding(host, "interface", OK, describe_way(host, way, plan))
    agent = plan.agent
    with socket.create_server((way.address, 0)) as listener:
        port = str(listener.getsockname()[1])
        words = agent.command(host, [*python, "-c", WAY_BACK, way.address, port])
        said = complaint(words)
    if said is None:
        yield Finding(host, "way back", OK, f"it can connect to {way.address}")
    else:
        listen = shlex.join([*python, "-m", "http.server", "--bind", way.address, port])
        advice = (
            f"open {way.address} for it in the firewalls, MPI uses any port; "
            f"try by hand: {listen} here, and then {shlex.join(words)}"
        )
        value = f"it cannot connect to {way.address}: {said}"
        yield Finding(host, "way back", FAILURE, value, advice)
    if agent.is_ssh:
        yield check_ssh_back(host, agent, way.address)


def describe_way(host: str, way: Interface, plan: Plan) -> str:
    """Which interface MPI will use towards a host, which transport, and why these."""
    how = "TCP and shared memory only" if plan.tcp else "what MPI finds best, TCP or RDMA"
    if plan.interface is not None:
        return f"{plan.interface}, as --interface says; {how}"
    why = f"the route to {host} goes through it"
    return f"{way.name}, {way.address} in {way.network}: {why}; {how}"


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
