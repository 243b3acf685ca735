"""What a scheduler has granted: hosts and slots, as its variables and files say."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpicomp_launch.errors import LaunchError
from mpicomp_launch.hosts import COUNT, Host, expand, merge, parse_hosts, split
from mpicomp_launch.rank_env import MPI_RANK, slurm_counts

FLUX_SECONDS = 20


@dataclass(frozen=True)
class Allocation:
    """Hosts of a scheduler.

    Attributes:
        scheduler: "slurm", "pbs", "lsf" or "flux".
        hosts: With the slots granted on each.
        origin: The variables that say so.
        is_for_ranks: Whether the job asked for so many ranks; else the slots are processors.
    """

    scheduler: str
    hosts: tuple[Host, ...]
    origin: str
    is_for_ranks: bool = True


def inside_step(environ: Mapping[str, str]) -> str | None:
    """The variable which says that this process is a rank of a running job already."""
    for name in MPI_RANK:
        if environ.get(name):
            return name
    # A step without any PMI. One of one task may be a shell: `srun --mpi=none --pty bash`.
    tasks = "SLURM_STEP_NUM_TASKS"
    is_one_of_many = environ.get("SLURM_STEP_ID") and environ.get(tasks, "1") != "1"
    return tasks if is_one_of_many else None


def detect(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation we are in, None outside of one.

    Flux comes first because it runs within jobs of the others, and not the other way round.

    Raises:
        LaunchError: Its variables contradict each other, or name a file that cannot be read.
    """
    for find in (flux, slurm, pbs, lsf):
        found = find(environ)
        if found is not None:
            return found
    return None


def slurm(environ: Mapping[str, str]) -> Allocation | None:
    """SLURM_JOB_NODELIST, and the slots of each node as SLURM_TASKS_PER_NODE has them.

    mpirun goes by both. In a job that does not say how many tasks it wants the latter counts
    processors, and srun would start one task on each node.
    """
    nodes, tasks = "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"
    if not environ.get(nodes):
        return None
    hosts = parse_hosts(environ[nodes], nodes)
    if not environ.get(tasks):
        return Allocation("slurm", hosts, nodes, is_for_ranks=False)
    counts = slurm_counts(environ[tasks])
    if counts is None:
        raise LaunchError(f"{tasks} must be as in 4(x2),1, got {environ[tasks]!r}")
    if len(counts) != len(hosts):
        if environ.get("SLURM_STEP_ID"):  # a shell in a step; the counts are the step's
            return Allocation("slurm", hosts, nodes, is_for_ranks=False)
        raise LaunchError(
            f"{tasks} must have a count for each of the {len(hosts)} hosts of {nodes}, "
            f"got {environ[tasks]!r}"
        )
    granted = tuple(Host(h.name, n) for h, n in zip(hosts, counts, strict=True) if n)
    if not granted:
        raise LaunchError(f"{tasks} must have a count above 0, got {environ[tasks]!r}")
    is_asked = any(environ.get(name) for name in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"))
    return Allocation("slurm", granted, f"{nodes} and {tasks}", is_for_ranks=is_asked)


def pbs(environ: Mapping[str, str]) -> Allocation | None:
    """PBS_NODEFILE: a line for each slot."""
    variable = "PBS_NODEFILE"
    if not environ.get(variable):
        return None
    return Allocation("pbs", hosts_of(lines_of(variable, environ), variable), variable)


def lsf(environ: Mapping[str, str]) -> Allocation | None:
    """LSB_MCPU_HOSTS, `a 4 b 4`; or a name for each slot, in a file or in LSB_HOSTS.

    LSB_HOSTS is missing in large jobs. Where jsrun starts the ranks, CSM has made the allocation,
    and its first host is the launch node, which gets none; slots of the others are processors.
    """
    for variable in ("LSB_MCPU_HOSTS", "LSB_DJOB_HOSTFILE", "LSB_HOSTS"):
        words = environ.get(variable, "").split()
        if not words:
            continue
        if variable == "LSB_MCPU_HOSTS":
            counts = pairs_of(words, variable)
        elif variable == "LSB_DJOB_HOSTFILE":
            counts = lines_of(variable, environ)
        else:
            counts = Counter(words)
        hosts = hosts_of(counts, variable)
        if environ.get("CSM_ALLOCATION_ID") and len(hosts) > 1:
            return Allocation("lsf", hosts[1:], variable, is_for_ranks=False)
        return Allocation("lsf", hosts, variable)
    return None


def pairs_of(words: Sequence[str], variable: str) -> Counter[str]:
    """Names and counts in turn."""
    if len(words) % 2 or not all(COUNT.fullmatch(count) for count in words[1::2]):
        raise LaunchError(f"{variable} must be as in 'a 4 b 4', got {' '.join(words)!r}")
    counts: Counter[str] = Counter()
    for name, count in zip(words[::2], words[1::2], strict=True):
        counts[name] += int(count)
    return counts


def lines_of(variable: str, environ: Mapping[str, str]) -> Counter[str]:
    """How often each name comes in a file that a variable names."""
    try:
        with open(environ[variable], errors="replace") as file:
            return Counter(line.strip() for line in file if line.strip())
    except (OSError, ValueError) as error:
        raise LaunchError(f"{variable} must name the file of the hosts, got {error}") from None


def hosts_of(counts: Mapping[str, int], variable: str) -> tuple[Host, ...]:
    """Hosts with slots, their names checked."""
    if not counts:
        raise LaunchError(f"{variable} must name a host, got none")
    for name in counts:
        if [host.name for host in parse_hosts(name, variable)] != [name]:
            raise LaunchError(f"{variable} must have names of hosts, got {name!r}")
    return tuple(Host(name, count) for name, count in counts.items())


def flux(environ: Mapping[str, str]) -> Allocation | None:
    """FLUX_URI says that there is an instance; what it has, `flux` itself must say.

    Without that program, as in a container, the instance is of no use, and this host is alone.
    """
    if not environ.get("FLUX_URI"):
        return None
    import json
    import shutil
    import subprocess

    program = shutil.which("flux", path=environ.get("PATH", os.defpath))
    if program is None:
        return None
    contract = "FLUX_URI must name a Flux instance that answers `flux resource R`"
    try:
        said = subprocess.run(
            [program, "resource", "R", "--states=up"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=FLUX_SECONDS,
        ).stdout
        hosts = flux_hosts(json.loads(said))
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip() or f"status {error.returncode}"
        raise LaunchError(f"{contract}, got {reason!r}; else unset it") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{contract}, got {error}; else unset it") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise LaunchError(f"{contract}, got {said[:200]!r}; else unset it") from None
    return Allocation("flux", hosts, "FLUX_URI", is_for_ranks=False)


def flux_hosts(resources: Any) -> tuple[Host, ...]:
    """Hosts and cores of a resource set, version 1: broker ranks with cores, and their hosts."""
    execution = resources["execution"]
    nodes = ",".join(execution["nodelist"])  # one host comes again for each of its brokers
    names = [name for _, part in split(nodes) for name in expand(part)]
    cores = [
        count_ids(group["children"]["core"])
        for group in execution["R_lite"]
        for _ in range(count_ids(group["rank"]))
    ]
    return merge(Host(name, count) for name, count in zip(names, cores, strict=True))


def count_ids(text: str) -> int:
    """How many numbers `0-3,8` has."""
    total = 0
    for part in text.split(","):
        first, _, last = part.partition("-")
        total += int(last or first) - int(first) + 1
    return total
