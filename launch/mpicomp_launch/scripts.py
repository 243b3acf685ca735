"""Batch scripts for schedulers: the head they want, and the launcher within the allocation."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence

from mpicomp_launch import hosts, planner
from mpicomp_launch.errors import LaunchError
from mpicomp_launch.kinds import FLAG, number_text
from mpicomp_launch.options import FIELDS, flag_of
from mpicomp_launch.resolve import Resolved

DEFAULT_SECONDS = 3600.0
# The scheduler decides these, or they become part of the head.
NOT_PASSED = (
    "np",
    "hosts",
    "hostfile",
    "host",
    "rsh_agent",
    "ssh_port",
    "ssh_identity",
    "ssh_args",
)
HEADS = {
    "slurm": """#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes={nodes}
#SBATCH --ntasks={np}
#SBATCH --ntasks-per-node={per_node}
#SBATCH --time={time}
#SBATCH --output=%x-%j.out
# The scheduler sends this so long before the end that a checkpoint can be written.
#SBATCH --signal=B:USR1@120
# With GPUs: #SBATCH --gpus-per-node={per_node}
""",
    "pbs": """#!/bin/bash
#PBS -N train
#PBS -l select={nodes}:ncpus={per_node}:mpiprocs={per_node}
#PBS -l walltime={time}
#PBS -j oe
""",
}
BODY = {
    "slurm": """
# . /path/to/.venv/bin/activate
exec {command}
""",
    "pbs": """
cd "$PBS_O_WORKDIR" || exit
# . /path/to/.venv/bin/activate
exec {command}
""",
}


def script(scheduler: str, resolved: Resolved, words: Sequence[str]) -> str:
    """A script to hand in with `sbatch` or `qsub`; hosts and ranks are in its head.

    Raises:
        LaunchError: There is no command, nothing says how many ranks there shall be, or a host
            has variables of its own.
    """
    if not words:
        raise LaunchError("COMMAND must be given for --write-script, got nothing")
    refuse_variables_of_hosts(resolved)
    nodes, np = size(resolved)
    seconds = math.ceil(resolved.options.timeout or DEFAULT_SECONDS)
    values = {
        "nodes": nodes,
        "np": np,
        "per_node": math.ceil(np / nodes),
        "time": f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}",
    }
    command = shlex.join(["mpicomp-launch", *passed(resolved), *words])
    return HEADS[scheduler].format(**values) + BODY[scheduler].format(command=command)


def refuse_variables_of_hosts(resolved: Resolved) -> None:
    """The scheduler chooses the hosts, so what is special about one cannot be passed on."""
    for section in resolved.options.host:
        if section.env:
            raise LaunchError(
                f"host sections must have no env for --write-script, got one of {section.name!r} "
                f"({resolved.origins['host']}); give it to all ranks with --env"
            )


def size(resolved: Resolved) -> tuple[int, int]:
    """Nodes and ranks."""
    options = resolved.options
    named = planner.named_hosts(options)
    if named:
        placement = hosts.place(named, options.np)
        return len(placement), sum(each.ranks for each in placement)
    if options.np is None:
        raise LaunchError("-np or --hosts must be given for --write-script, got nothing")
    return 1, options.np


def passed(resolved: Resolved) -> Iterator[str]:
    """The other options that were given, as words."""
    for name in resolved.origins:
        value = getattr(resolved.options, name)
        if name in NOT_PASSED:
            continue
        if FIELDS[name].metadata["kind"] is FLAG:
            yield flag_of(name) if value else flag_of(name).replace("--", "--no-", 1)
        elif name == "env":
            for variable, text in value:
                yield from (flag_of(name), variable if text is None else f"{variable}={text}")
        elif isinstance(value, tuple):
            yield f"{flag_of(name)}={shlex.join(value)}"
        else:
            yield from (
                flag_of(name),
                number_text(value) if isinstance(value, float) else str(value),
            )
