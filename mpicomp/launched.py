"""What the program that started the ranks has told them, and whether MPI agrees.

When the launcher and the MPI library do not belong together, every rank believes to be alone, and
the job trains N copies without an error. Launchers leave the truth in the environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from mpicomp.errors import MpicompError

_SRUN = (
    "start it with `srun --mpi=pmix` or `srun --mpi=pmi2`, whichever this MPI was built for "
    "(`srun --mpi=list` shows what there is)"
)
_MPIRUN = "start the job with the mpirun of that MPI, or with mpicomp-launch, which finds it"


@dataclass(frozen=True)
class _Launcher:
    """The variables of one launcher; "" where it has none."""

    title: str
    rank: str
    size: str
    remedy: str = _MPIRUN


_LAUNCHERS = (
    _Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    _Launcher("MVAPICH's mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    _Launcher("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    _Launcher("PALS mpiexec", "PALS_RANKID", "PALS_SIZE"),
    _Launcher(
        "flux run",
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        "start it with `flux run -o pmi=pmix` for Open MPI, and plain `flux run` for others",
    ),
    _Launcher("mpiexec", "PMI_RANK", "PMI_SIZE"),
    _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", _SRUN),
    _Launcher("a PMIx launcher", "PMIX_RANK", ""),
)
# Shells of `sbatch` and `salloc` are steps, too, with the tasks of the whole job; one process there
# is no rank.
_SHELL_STEPS = ("", "batch", "interactive", "extern", "4294967291", "4294967290", "4294967292")


def check_size(actual: int, expected: int, library: str) -> None:
    """Compares MPI's number of ranks with what the launcher has started.

    Args:
        actual: Size of `MPI_COMM_WORLD`.
        expected: What mpicomp-launch says, 0 if it did not start us.
        library: What the MPI library says it is.

    Raises:
        MpicompError: They differ. All ranks meet it, so that only rank 0 tells the whole story.
    """
    launcher, rank, size = _told(os.environ)
    if launcher is None and not expected:
        return
    size = expected or size
    is_alone = actual == 1 and (rank or 0) > 0
    if size == actual or (not size and not is_alone):
        return
    if rank and actual == 1:
        raise MpicompError(f"init: rank {rank} believes to be alone; rank 0 says why")
    started = f"{size} ranks" if size else "several ranks"
    by = f" ({launcher.title})" if launcher else ""
    remedy = launcher.remedy if launcher else _MPIRUN
    if "SLURM_STEP_ID" in os.environ and remedy is _MPIRUN:
        remedy = f"{_MPIRUN}; if srun started it, {_SRUN}"
    raise MpicompError(
        f"init: the launcher{by} started {started}, but this one is in a world of {actual}: "
        f"launcher and MPI library do not belong together. The library is "
        f"{library.splitlines()[0].strip()!r}; {remedy}"
    )


def report(text: str, status: int) -> bool:
    """Tells mpicomp-launch why this rank fails, if it started us; False if it did not.

    `MPICOMP_REPORT_FD` is `descriptor:process`: children of a rank inherit the variable, but not
    the descriptor.
    """
    fd, _, pid = os.environ.get("MPICOMP_REPORT_FD", "").partition(":")
    if pid != str(os.getpid()):
        return False
    try:
        os.write(int(fd), json.dumps({"status": status, "text": text}).encode() + b"\n")
    except OSError:  # the launcher is gone
        return False
    return True


def _told(environ: Mapping[str, str]) -> tuple[_Launcher | None, int | None, int]:
    """Launcher, rank and size as the environment has them; size 0 where it does not say."""
    for launcher in _LAUNCHERS:
        rank = environ.get(launcher.rank, "")
        size = environ.get(launcher.size, "")
        if launcher.title == "srun" and environ.get("SLURM_STEP_ID", "") in _SHELL_STEPS:
            continue
        if rank.isdigit() or size.isdigit():
            return launcher, int(rank) if rank.isdigit() else None, int(size or 0)
    return None, None, 0
