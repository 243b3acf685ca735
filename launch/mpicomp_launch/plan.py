"""A job as data: everything known about it before any MPI's dialect is spoken."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from mpicomp_launch.command import UserCommand
from mpicomp_launch.mpis import Mpi


@dataclass(frozen=True)
class Plan:
    """What to run, how often, and under which MPI.

    Attributes:
        np: Number of ranks.
        command: What every rank runs.
        mpi: The MPI, with the path of its own launcher.
        environ: The environment the user started us in; all of it reaches the ranks.
        exports: Variables added to it for the ranks.
        cwd: Working directory of every rank.
        is_root: Whether the job runs as the superuser.
    """

    np: int
    command: UserCommand
    mpi: Mpi
    environ: Mapping[str, str]
    exports: Mapping[str, str]
    cwd: str
    is_root: bool


def rank_exports(
    np: int, environ: Mapping[str, str], num_cores: int, terminal_columns: int = 0
) -> dict[str, str]:
    """Variables every job gets.

    `MPICOMP_EXPECT_SIZE` lets the library notice that it runs as N jobs of one rank. Without
    `OMP_NUM_THREADS` PyTorch takes one thread, or all cores in each rank, depending on the MPI.
    Ranks write to a pipe; `TTY_COMPATIBLE` and `COLUMNS` say that it ends on a terminal, so that
    rank 0 may show a progress bar.
    """
    exports = {"MPICOMP_EXPECT_SIZE": str(np)}
    if not environ.get("OMP_NUM_THREADS"):
        exports["OMP_NUM_THREADS"] = str(max(1, num_cores // np))
    if terminal_columns:
        exports |= {"TTY_COMPATIBLE": "1", "COLUMNS": str(terminal_columns)}
    return exports


def available_cores() -> int:
    """Cores this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def terminal_columns() -> int:
    """The width of the terminal that standard output goes to; 0 if it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
