"""What a scheduler has granted: hosts and slots, as its variables and files say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from mpicomp_launch.errors import LaunchError
from mpicomp_launch.hosts import Host, parse_hosts

# Each says that this process is a rank. Shells of salloc and sbatch have SLURM_PROCID, too.
RANK_VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "PALS_RANKID",
    "FLUX_TASK_RANK",
    "MV2_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
)
FLUX_SECONDS = 20


@dataclass(frozen=True)
class Allocation:
    """Hosts of a scheduler.

    Attributes:
        scheduler: "slurm", "pbs", "lsf" or "flux".
        hosts: With the slots granted on each.
        origin: The variables that say so.
    """

    scheduler: str
    hosts: tuple[Host, ...]
    origin: str


def inside_step(environ: Mapping[str, str]) -> str | None:
    """The variable which says that this process is a rank of a running job already."""
    return next((name for name in RANK_VARIABLES if environ.get(name)), None)


def detect(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation we are in, None outside of one.

    Raises:
        LaunchError: Its variables contradict each other, or name a file that cannot be read.
    """
    for find in (slurm, pbs, lsf, flux):
        found = find(environ)
        if found is not None:
            return found
    return None


def slurm(environ: Mapping[str, str]) -> Allocation | None:
    """SLURM_JOB_NODELIST, and tasks for each node; without those one for each, as srun has it."""
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        return None
    origin = "SLURM_JOB_NODELIST"
    hosts = parse_hosts(nodes)
    tasks = environ.get("SLURM_TASKS_PER_NODE", "")
    if not tasks:
        return Allocation("slurm", hosts, origin)
    counts: list[int] = []
    for part in tasks.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise LaunchError(f"SLURM_TASKS_PER_NODE must be as in 4(x2),1, got {tasks!r}")
        counts += [int(found.group(1))] * int(found.group(2) or 1)
    if len(counts) != len(hosts):
        raise LaunchError(
            f"SLURM_TASKS_PER_NODE must have a count for each of the {len(hosts)} hosts of "
            f"{origin}, got {tasks!r}"
        )
    named = tuple(Host(h.name, n) for h, n in zip(hosts, counts, strict=True) if n)
    return Allocation("slurm", named, f"{origin} and SLURM_TASKS_PER_NODE")


def pbs(environ: Mapping[str, str]) -> Allocation | None:
    """PBS_NODEFILE: a line for each slot."""
    return from_lines("pbs", "PBS_NODEFILE", environ)


def lsf(environ: Mapping[str, str]) -> Allocation | None:
    """LSB_MCPU_HOSTS, `a 4 b 4`; or a file with a line for each slot."""
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    if not words:
        return from_lines("lsf", "LSB_DJOB_HOSTFILE", environ)
    if len(words) % 2 or not all(count.isdigit() and int(count) for count in words[1::2]):
        raise LaunchError(f"LSB_MCPU_HOSTS must be as in 'a 4 b 4', got {' '.join(words)!r}")
    hosts = tuple(Host(n, int(c)) for n, c in zip(words[::2], words[1::2], strict=True))
    return Allocation("lsf", hosts, "LSB_MCPU_HOSTS")


def from_lines(scheduler: str, variable: str, environ: Mapping[str, str]) -> Allocation | None:
    """A file that a variable names, with a host's name for each of its slots."""
    path = environ.get(variable, "")
    if not path:
        return None
    try:
        with open(path, errors="replace") as file:
            slots = Counter(line.strip() for line in file if line.strip())
    except OSError as error:
        raise LaunchError(
            f"{variable} must name the file of the hosts, got {path!r}: {error.strerror}"
        ) from None
    hosts = tuple(Host(name, count) for name, count in slots.items())
    return Allocation(scheduler, hosts, variable)


def flux(environ: Mapping[str, str]) -> Allocation | None:
    """FLUX_URI says that there is an instance; what it has, `flux` itself must say."""
    program = shutil.which("flux", path=environ.get("PATH", os.defpath))
    if not environ.get("FLUX_URI") or program is None:
        return None
    question = [program, "resource", "list", "--states=up", "-no", "{nodelist} {ncores}"]
    try:
        said = subprocess.run(
            question,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FLUX_SECONDS,
        ).stdout.split()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"FLUX_URI must name a Flux instance that answers, got {error}") from None
    if len(said) < 2 or not said[1].isdigit():
        return None
    hosts = parse_hosts(said[0])
    cores = max(1, int(said[1]) // len(hosts))
    return Allocation("flux", tuple(Host(host.name, cores) for host in hosts), "FLUX_URI")
