"""DistributedDataParallel over Gloo as a peer: bare, with PyTorch's hooks, and how those can fail.

Run by itself it is one rank of a trial of the PowerSGD hook with several buckets, which may end
the process: `powersgd_trial` starts such processes and says what became of them.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from _gloo import meeting_point
from _models import Side, build_model, make_optimizer, sample
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import mpicomp

BUCKET_MB = 25  # the default
MATRIX_RANK, DENSE_STEPS = 2, 2  # of the PowerSGD hook
TRIAL_STEPS, TRIAL_SECONDS = 8, 120


def ddp(model: nn.Module, bucket_mb: float = BUCKET_MB) -> DistributedDataParallel:
    """As its documentation advises: overlap, gradients that lie in the buckets, a fixed graph.

    Buffers stay as they are, as in mpicomp.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions have another name for it
        return DistributedDataParallel(
            model,
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
            static_graph=True,
            broadcast_buffers=False,
        )


def plain(model: nn.Module) -> Side:
    return Side(ddp(model), make_optimizer(model), dense_bytes(model))


def fp16(model: nn.Module) -> Side:
    replica = ddp(model)
    replica.register_comm_hook(None, fp16_compress_hook)
    return Side(replica, make_optimizer(model), dense_bytes(model) // 2)


def powersgd(model: nn.Module, num_buckets: int = 1) -> Side:
    """With one bucket by default: with several the hook can fail over Gloo."""
    bucket_mb = math.ceil(dense_bytes(model) / num_buckets / 2**20)
    replica = ddp(model, bucket_mb)
    state = PowerSGDState(None, MATRIX_RANK, start_powerSGD_iter=DENSE_STEPS)
    replica.register_comm_hook(state, powerSGD_hook)
    return Side(
        replica, make_optimizer(model), lambda: 4 * int(state.total_numel_after_compression)
    )


def dense_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


# ------------------------------------------------------------------------------------- trials


def powersgd_trial(model: str, batch: int, num_buckets: int) -> dict[str, Any]:
    """Train with the PowerSGD hook in processes of its own, one for each rank of ours.

    Returns the time of a step on the rank that takes longest, or how the ranks failed.
    """
    rank, size = mpicomp.rank(), mpicomp.size()
    words = [meeting_point(), rank, size, model, batch, num_buckets]
    command = [sys.executable, __file__, *map(str, words)]
    failure, step_ms = "", math.nan
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_SECONDS)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["nothing was said"]
            told = [line.strip() for line in lines if "rror" in line or "fail" in line]
            failure = f"rank {rank} ended with status {done.returncode}: {(told or lines)[-1]}"
        else:
            step_ms = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        failure = f"rank {rank} did not end in {TRIAL_SECONDS} s"
    every = mpicomp.allgather_object((failure, step_ms))
    failures = [text for text, _ in every if text]
    outcome = {"model": model, "batch": batch, "num_buckets": num_buckets, "failures": failures}
    return outcome if failures else {**outcome, "step_ms": max(ms for _, ms in every)}


def main() -> None:
    """Prints the median milliseconds of a step once the hook compresses."""
    where, rank, size, model, batch, num_buckets = sys.argv[1:]
    torch.set_num_threads(1)
    limit = timedelta(seconds=TRIAL_SECONDS / 3)
    dist.init_process_group("gloo", where, limit, world_size=int(size), rank=int(rank))
    side = powersgd(build_model(model), int(num_buckets))
    data = sample(model, int(batch), int(rank))
    times = []
    for _ in range(TRIAL_STEPS):
        started = time.perf_counter()
        side.step(*data)
        times.append(1e3 * (time.perf_counter() - started))
    print(statistics.median(times[DENSE_STEPS + 1 :]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
