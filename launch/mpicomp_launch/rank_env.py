"""What a rank knows of itself before MPI starts, and the variables that depend on it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, MutableMapping

MAX_NODES = 100_000
MPI_RANK = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "PALS_RANKID",
    "MV2_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
    "FLUX_TASK_RANK",
)
RANK = (*MPI_RANK, "SLURM_PROCID")  # which shells of `salloc` and `sbatch` have, too
LOCAL_RANK = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID",
    "PMI_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_RANK",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
)
LOCAL_SIZE = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PALS_LOCAL_SIZE",
    "PMI_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
)
# From the launcher, for the worker alone; `rank.run` takes `MPICOMP_CHDIR`.
OWN = ("MPICOMP_THREADS", "MPICOMP_GPU_BIND", "MPICOMP_RANK_ENV", "MPICOMP_GRACE")


def number(names: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
    """The first of the variables that holds a number."""
    return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), None)


def local_size(environ: Mapping[str, str]) -> int | None:
    """Ranks on this host, as far as the launcher of the MPI has told."""
    known = number(LOCAL_SIZE, environ)
    if known is not None:
        return known
    node = environ.get("SLURM_NODEID", "")
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    counts = slurm_counts(tasks) or []
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def slurm_counts(text: str) -> list[int] | None:
    """`4(x2),1` is 4, 4, 1; None for anything else, and for more than `MAX_NODES`."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if found is None or len(counts) + int(found[2] or 1) > MAX_NODES:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def prepare(environ: MutableMapping[str, str], num_cores: int, num_gpus: int) -> None:
    """Turns the launcher's own variables into those of the rank, and takes them away."""
    own = {name: environ.pop(name, "") for name in OWN}
    rank = number(RANK, environ) or 0
    for first, last, values in json.loads(own["MPICOMP_RANK_ENV"] or "[]"):
        if first <= rank <= last:
            environ.update(values)
    if own["MPICOMP_THREADS"] == "auto" and not environ.get("OMP_NUM_THREADS"):
        ranks_here = local_size(environ)
        if ranks_here:
            environ["OMP_NUM_THREADS"] = str(max(1, num_cores // ranks_here))
    local_rank = number(LOCAL_RANK, environ)
    if own["MPICOMP_GPU_BIND"] == "local" and local_rank is not None:
        bind_gpu(environ, local_rank, num_gpus)


def bind_gpu(environ: MutableMapping[str, str], local_rank: int, num_gpus: int) -> None:
    """Leaves one GPU visible: that of the local rank, by number, UUID or MIG name as it stood."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        devices = [str(index) for index in range(num_gpus)]
    else:
        devices = [name.strip() for name in visible.split(",") if name.strip()]
    if devices:
        environ["CUDA_VISIBLE_DEVICES"] = devices[local_rank % len(devices)]


def count_cores() -> int:
    """Cores this process may use, which can be fewer than the host has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def count_gpus() -> int:
    """GPUs of this host, as NVIDIA's driver lists them."""
    directory = "/proc/driver/nvidia/gpus"
    return len(os.listdir(directory)) if os.path.isdir(directory) else 0
