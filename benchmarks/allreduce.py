"""How fast is one all-reduce of fp32 between the ranks of one host?

    mpicomp-launch -np 2 --tag none python benchmarks/allreduce.py

Four sides take turns within one run: mpicomp on the memory of its gradient buckets (``bucket``),
mpicomp on an ordinary tensor (``tensor``), torch's Gloo, and the MPI library's own
``MPI_Allreduce``. mpicomp computes the mean, the others the sum, which is less work. A sample is a
few calls back to back after a barrier, on the rank that takes longest; the table has medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from _gloo import start_gloo
from mpi4py import MPI
from torch import Tensor

import mpicomp
from mpicomp import world
from mpicomp.comm.communicator import Communicator, Op

KIB, MIB = 1 << 10, 1 << 20
CALLS = {1 * KIB: 200, 64 * KIB: 50, 1 * MIB: 10, 25 * MIB: 1, 100 * MIB: 1}  # bytes -> a sample
LARGE = 25 * MIB  # from here on the factors below are the target
TIMES_GLOO, TIMES_MPI = 4.0, 2.5
TARGET = (
    f"bucket: from {LARGE // MIB} MB on at least {TIMES_GLOO:g} times as fast as Gloo and "
    f"{TIMES_MPI:g} times as fast as MPI; at no size slower than the better of the two"
)

Reduce = Callable[[Tensor], object]  # in place


def make_sides(communicator: Communicator) -> dict[str, Reduce]:
    return {
        "bucket": lambda flat: world.wait(communicator.reduce_(flat, Op.SUM), "benchmark"),
        "tensor": lambda flat: mpicomp.allreduce_(flat, op=mpicomp.Sum),
        "gloo": lambda flat: dist.all_reduce(flat),
        "mpi": lambda flat: MPI.COMM_WORLD.Allreduce(
            MPI.IN_PLACE, [flat.numpy(), MPI.FLOAT], MPI.SUM
        ),
    }


def check(side: str, reduce: Reduce, flat: Tensor) -> None:
    """Raise unless the side computes what it should; leaves zeros, which stay zeros."""
    expected = sum(range(1, mpicomp.size() + 1))
    flat.fill_(mpicomp.rank() + 1)
    reduce(flat)
    if not bool((flat == expected).all()):
        raise RuntimeError(f"{side}: expected {expected}, got {flat}")
    flat.zero_()


def sample(reduce: Reduce, flat: Tensor, calls: int) -> float:
    """Seconds for one call on this rank."""
    mpicomp.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        reduce(flat)
    return (time.perf_counter() - started) / calls


def measure(num_bytes: int, communicator: Communicator, repeats: int) -> dict[str, float]:
    """Median seconds for each side, in turns that begin with another side each time."""
    block = world.wait(communicator.allocate(num_bytes), "benchmark")
    sides = make_sides(communicator)
    flats = {
        side: block.view(torch.float32) if side == "bucket" else torch.empty(num_bytes // 4)
        for side in sides
    }
    for side, reduce in sides.items():
        check(side, reduce, flats[side])
    names = list(sides)
    samples: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(repeats):
        first = turn % len(names)
        for side in names[first:] + names[:first]:
            samples[side].append(sample(sides[side], flats[side], CALLS[num_bytes]))
    communicator.release(block)
    return {side: statistics.median(longest(own)) for side, own in samples.items()}


def longest(own: list[float]) -> list[float]:
    """Of each sample the time of the rank that took longest."""
    return [float(s) for s in mpicomp.allreduce(torch.tensor(own).double(), op=mpicomp.Max)]


def row(num_bytes: int, seconds: dict[str, float]) -> dict[str, float | bool]:
    gloo, mpi = seconds["gloo"] / seconds["bucket"], seconds["mpi"] / seconds["bucket"]
    fast_enough = num_bytes < LARGE or (gloo >= TIMES_GLOO and mpi >= TIMES_MPI)
    return {
        "bytes": num_bytes,
        **{f"{side}_ms": 1e3 * value for side, value in seconds.items()},
        "times_gloo": gloo,
        "times_mpi": mpi,
        "holds": fast_enough and min(gloo, mpi) >= 1,
    }


def show(*cells: object) -> None:
    """One line of the table, on rank 0."""
    if mpicomp.rank() == 0:
        texts = [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells]
        print("".join(f"{text:>12}" for text in texts), flush=True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--repeats", type=int, default=51, help="samples for each side and size")
    parser.add_argument("--largest", type=float, default=100, help="leave out what has more MB")
    return parser.parse_args()


def main() -> None:
    args = options()
    torch.set_num_threads(1)
    mpicomp.init()
    start_gloo()
    communicator = world.get().new_communicator()
    rows = []
    show("bytes", "bucket ms", "tensor ms", "gloo ms", "mpi ms", "x gloo", "x mpi", "holds")
    for num_bytes in CALLS:
        if num_bytes <= args.largest * MIB:
            rows.append(row(num_bytes, measure(num_bytes, communicator, args.repeats)))
            show(*rows[-1].values())
    holds = all(bool(row["holds"]) for row in rows)
    show(json.dumps({"benchmark": "allreduce", "rows": rows, "target": TARGET, "holds": holds}))
    communicator.free()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
