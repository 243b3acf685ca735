"""Why ranks have not come up: what each host answers when it is asked directly."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from mpicomp_launch import mpis, network
from mpicomp_launch.plan import Plan

ASK_SECONDS = 15
LISTEN = "0A"  # states and addresses as /proc/net/tcp has them
LOOPBACK = "7F"
VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"
SAME_VERSION = (
    "import sys; own = '%d.%d' % sys.version_info[:2]; "
    "sys.exit(own != sys.argv[1] and f'it is {own}, here {sys.argv[1]} is running')"
)
WAY_BACK = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"


def hosts_of(plan: Plan, ranks: Sequence[int]) -> list[str]:
    """The hosts of ranks, each once, in order; none where a scheduler places them."""
    by_rank = [place.host for place in plan.placement for _ in range(place.ranks)]
    return list(dict.fromkeys(by_rank[rank] for rank in ranks if rank < len(by_rank)))


def missing_ranks(plan: Plan, missing: Sequence[int], ports: Sequence[int]) -> list[str]:
    """Lines that say which ranks never came, and what is wrong with their hosts.

    Args:
        missing: Ranks that have not reported.
        ports: Where mpirun waits for its own helpers, as far as that is known.
    """
    hosts = hosts_of(plan, missing)
    version = version_of(plan.command.python)
    lines = [f"{count(missing)} of {plan.np} did not come up: {spans(missing)}"]
    with ThreadPoolExecutor(max_workers=32) as pool:
        answers = list(pool.map(lambda host: ask(plan, host, version, ports), hosts))
    lines += [f"{host}: {said}" for host, said in zip(hosts, answers, strict=True) if said]
    if hosts and not any(answers):
        lines.append(
            f"{', '.join(hosts)}: reached directly, nothing is wrong; --verbose shows what MPI "
            "does, --check tries more"
        )
    return lines


def shorten(hosts: Sequence[str], most: int = 3) -> str:
    """The first few of many hosts."""
    more = len(hosts) - most
    return ", ".join(hosts[:most]) + (f" and {more} more" if more > 0 else "")


def count(ranks: Sequence[int]) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{len(ranks)} rank" + "s" * (len(ranks) != 1)


def spans(ranks: Sequence[int]) -> str:
    """`0, 4-7`."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][-1] + 1:
            found[-1] = [found[-1][0], rank]
        else:
            found.append([rank])
    return ", ".join("-".join(map(str, each)) for each in found)


def version_of(python: str) -> str:
    """The version of a Python of this host, as in 3.11."""
    return mpis.ask([python, "-c", VERSION], os.environ).stdout.strip()


def ask(plan: Plan, host: str, version: str, ports: Sequence[int]) -> str | None:
    """What is wrong with a host, None if nothing is found to be."""
    for words, wrong in questions(plan, host, version, ports):
        argv = words if network.is_here(host) else plan.agent.command(host, words)
        said = complaint(argv)
        if said is not None:
            return f"{wrong}: {said}; try by hand: {shlex.join(argv)}"
    return None


def questions(
    plan: Plan, host: str, version: str, ports: Sequence[int]
) -> Iterator[tuple[list[str], str]]:
    """What to run on a host, each of which needs those before it, and what its failure means."""
    python = plan.command.python
    yield ["true"], "it cannot be reached"
    yield [python, "-c", SAME_VERSION, version], "it has another Python"
    way = network.interface_towards(host)
    if way is None or network.is_here(host):
        return
    for port in ports:
        yield (
            [python, "-c", WAY_BACK, way.address, str(port)],
            f"it cannot connect back to {way.address}, port {port} (a firewall on the way back?)",
        )


def complaint(argv: Sequence[str]) -> str | None:
    """The last line a program says when it fails, None if it does not."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=ASK_SECONDS,
        )
    except OSError as error:
        return f"{argv[0]}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"no answer within {ASK_SECONDS} s"
    if not done.returncode:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"status {done.returncode}"


def listening_ports(pid: int) -> list[int]:
    """The ports at which a process waits for connections from other hosts.

    mpirun waits there for its helpers.
    """
    sockets = set()
    with contextlib.suppress(OSError):  # it has ended
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                sockets.add(os.readlink(entry.path))
    ports = []
    with open("/proc/net/tcp") as table:
        for line in list(table)[1:]:
            words = line.split()
            address, _, port = words[1].partition(":")
            is_open = words[3] == LISTEN and not address.endswith(LOOPBACK)
            if is_open and f"socket:[{words[9]}]" in sockets:
                ports.append(int(port, 16))
    return ports
