"""What the program that started the ranks has told them, and whether MPI agrees.

When the launcher and the MPI library do not belong together, every rank believes to be alone, and
the job trains N copies without an error. Launchers leave the truth in the environment.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mpicomp.errors import MpicompError

PATIENCE_SECONDS = 10.0  # for rank 0 to explain; most launchers then end the job
LAST_STEP = 0xFFFFFFF0  # higher numbers are Slurm's own steps, such as the shell of `salloc`

_MPIRUN = (
    "start the job with the mpirun of that MPI{beside}, or with mpicomp-launch, which finds it"
)
_SRUN = (
    "start it with `srun --mpi=pmix` or `srun --mpi=pmi2`, whichever that MPI was built for "
    "(`srun --mpi=list` shows what there is), or with its mpirun{beside} inside the allocation"
)
_FLUX = (
    "start it with `flux run -o pmi=pmix` if that is Open MPI, which takes Flux's PMIx plug-in, "
    "or with its mpirun{beside}"
)
_PALS = (
    "use an mpi4py for the MPI of this machine (Cray MPICH), or start it with its mpirun{beside}"
)
_TORCHRUN = (
    "torchrun starts no MPI: start the job with `mpirun -n N`{beside}, or with mpicomp-launch"
)


@dataclass(frozen=True)
class _Launcher:
    """What one launcher leaves in the environment.

    Attributes:
        title: Its name, for messages.
        sign: The variable that tells it from others, which use some of the same variables.
        names: Variables of rank, size, local rank and local size; "-" where it has none.
        remedy: What to do when the MPI in use has not heard of it.
    """

    title: str
    sign: str
    names: str
    remedy: str = _MPIRUN


def _regular(title: str, prefix: str) -> _Launcher:
    names = [f"{prefix}_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    return _Launcher(title, names[0], " ".join(names))


# Those first which run inside the others: mpirun starts its helpers by srun, never the reverse.
_LAUNCHERS = (
    _regular("Open MPI's mpirun", "OMPI_COMM_WORLD"),
    _regular("MVAPICH's mpirun_rsh", "MV2_COMM_WORLD"),
    _Launcher(  # that of MPICH, Intel MPI and MVAPICH
        "Hydra's mpiexec", "MPI_LOCALNRANKS", "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"
    ),
    _Launcher(
        "PALS' mpiexec",
        "PALS_RANKID",
        "PALS_RANKID PMI_SIZE PALS_LOCAL_RANKID PALS_LOCAL_SIZE",
        _PALS,
    ),
    _regular("jsrun", "JSM_NAMESPACE"),
    _Launcher(
        "flux run", "FLUX_TASK_RANK", "FLUX_TASK_RANK FLUX_JOB_SIZE FLUX_TASK_LOCAL_ID -", _FLUX
    ),
    _Launcher("srun", "SLURM_STEP_ID", "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID -", _SRUN),
    _regular("an mpiexec", "PMI"),
    _Launcher("a PMIx launcher", "PMIX_RANK", "PMIX_RANK - - -"),
    _Launcher("torchrun", "TORCHELASTIC_RUN_ID", "RANK WORLD_SIZE - -", _TORCHRUN),
)


@dataclass(frozen=True)
class _Told:
    """The place of this process as a launcher has it; None where it does not say."""

    launcher: _Launcher
    rank: int | None
    size: int | None
    local_rank: int | None
    local_size: int | None


def check_size(actual: int, expected: int, library: str) -> None:
    """Compares MPI's number of ranks with what the launcher has started.

    A world of several ranks is one that a launcher has brought together. A process that is alone
    where several were started is not meant to be, unless ``expected`` is 1: a program which a rank
    starts with the rank's environment is such a process, too, and MPI may fail in it anyway.

    Args:
        actual: Size of `MPI_COMM_WORLD`.
        expected: `MPICOMP_EXPECT_SIZE`, which mpicomp-launch sets, 0 if it is not set.
        library: What the MPI library says it is.

    Raises:
        MpicompError: They differ, and this is rank 0, which tells the whole story.
        SystemExit: The same on all others, after a time for the launcher to end them; one line.
    """
    told = list(_told(os.environ))
    if expected == actual or (actual > 1 and not expected):
        return
    beyond = [each for each in told if (each.size or 0) > 1 or (each.rank or 0) > 0]
    if not expected and not beyond:
        return
    first = next(iter(beyond or told), None)
    rank = (first and first.rank) or 0
    size = expected or (first and first.size)
    if rank > (0 if size else 1):  # without a size rank 0 knows of nobody
        time.sleep(PATIENCE_SECONDS)
        raise SystemExit(
            f"mpicomp: rank {rank} is in a world of {actual}, not {size or 'all'}, too"
        )
    raise MpicompError(
        f"init: the launcher{f' ({first.launcher.title})' if first else ''} started "
        f"{size or 'several'} ranks, but this one is in a world of {actual}: launcher and MPI "
        f"library do not belong together. The library is {_describe(library)}; "
        f"{(first.launcher.remedy if first else _MPIRUN).format(beside=_beside(_path()))}. If this "
        "process is meant to be alone, set MPICOMP_EXPECT_SIZE=1"
    )


def compare_local(rank: int, size: int, world_size: int) -> str | None:
    """What is wrong if the launcher's place of this rank on its host is not MPI's, else None."""
    for told in _told(os.environ):
        if told.size != world_size or told.local_rank is None:
            continue
        ours = (told.local_rank, size if told.local_size is None else told.local_size)
        if ours == (rank, size):
            return None
        return (
            f"{told.launcher.title} calls this rank number {ours[0]} of {ours[1]} on its host, MPI "
            f"calls it {rank} of {size}: programs that choose a GPU by the one and by the other "
            "get in each other's way"
        )
    return None


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


def _told(environ: Mapping[str, str]) -> Iterator[_Told]:
    """What each launcher above this process says, the nearest first."""
    for launcher in _LAUNCHERS:
        if launcher.sign not in environ or _is_shell_of_slurm(launcher, environ):
            continue
        texts = [environ.get(name, "") for name in launcher.names.split()]
        yield _Told(launcher, *(int(text) if text.isdecimal() else None for text in texts))


def _is_shell_of_slurm(launcher: _Launcher, environ: Mapping[str, str]) -> bool:
    """Whether a step is that of a shell made by `sbatch` or `salloc`: a process there is no rank.

    Such shells have the number of tasks of the whole job.
    """
    step = environ.get("SLURM_STEP_ID", "")
    return launcher.title == "srun" and not (step.isdecimal() and int(step) <= LAST_STEP)


def _describe(library: str) -> str:
    """Name, version and place of the MPI library."""
    name = re.split(r"[,\n]", library.strip())[0]
    path = _path()
    return " ".join(name.split()) + (f" ({path})" if path else "")


def _path() -> Path | None:
    """The file of the MPI library that this process has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
    except OSError:
        return None
    found = re.search(r"/.*/libmpi(?:ch|_cray|_abi|_ibm)?\.so.*", maps)
    return Path(found.group()) if found else None


def _beside(library: Path | None) -> str:
    """`, /path/bin/mpiexec,` if there is one in the same prefix."""
    if library is None:
        return ""
    # Intel's mpirun runs the first mpiexec.hydra on PATH, which may be another one's.
    programs = [library.parent.parent / "bin" / name for name in ("mpiexec.hydra", "mpirun")]
    found = next((path for path in programs if os.access(path, os.X_OK)), None)
    return f" ({found})" if found else ""
