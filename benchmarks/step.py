"""How much does communication add to a training step of a 25M-parameter transformer?

    mpicomp-launch -np 2 --tag none python benchmarks/step.py      # beside DDP with Gloo
    python benchmarks/step.py                           # one rank, beside the bare optimizer

The same dense step without communication (``alone``), with DDP over Gloo (``ddp``) and with
mpicomp (``mpicomp``), one thread a rank. Timing: the sides take turns, a block of steps each, and
a block counts on the rank that takes longest; overhead is the median over rounds of a side's block
minus the block of ``alone`` in the same round. Memory: each side in turn, by itself, before timing;
the most that the proportional set size of the ranks grew, summed over ranks, so that pages which
ranks share are counted once.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from _gloo import start_gloo
from _turns import Turns, differences, median, take_turns, time_block
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mpicomp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from language_model import SIZES, Transformer, loss_of

CONTEXT = 64
SHARE_OF_DDP, MORE_MEMORY, MORE_ON_ONE_RANK = 0.5, 1.05, 1.03
TARGET = (
    f"overhead at most {SHARE_OF_DDP:g} of DDP's and peak memory at most {MORE_MEMORY:g} of DDP's; "
    f"on one rank a step at most {MORE_ON_ONE_RANK:g} of the bare optimizer's"
)

# --------------------------------------------------------------------------------------- sides


@dataclass
class Side:
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, x, y).backward()
        self.optimizer.step()


def make_side(name: str, size: str) -> Side:
    torch.manual_seed(0)
    model: nn.Module = Transformer(SIZES[size], CONTEXT)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    if name == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif name == "mpicomp":
        optimizer = mpicomp.DistributedOptimizer(optimizer, compression="none", model=model)
    return Side(model, optimizer)


def sample_of(batch: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    text = torch.randint(256, (batch, CONTEXT + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


# --------------------------------------------------------------------------------------- timing


def time_sides(sides: dict[str, Side], batch: int, rounds: int, steps: int) -> dict[str, float]:
    """Median milliseconds of a step for each side, and of what it takes more than ``alone``."""
    data = sample_of(batch, mpicomp.rank())
    names = list(sides)
    step_of = {name: partial(side.step, *data) for name, side in sides.items()}
    for step in step_of.values():
        time_block(step, 2)  # buckets are rebuilt after the first step
    blocks = take_turns(step_of, dict.fromkeys(names, Turns(rounds, steps)))
    row = {f"{name}_ms": median(blocks[name]) for name in names}
    for name in names[1:]:
        more = differences(blocks[name], blocks["alone"])
        row[f"{name}_overhead_ms"] = statistics.median(more)
    return {"batch": batch, **row}


# --------------------------------------------------------------------------------------- memory


def proportional_set_bytes() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    kilobytes = next(line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:"))
    return int(kilobytes) << 10


@contextmanager
def growth_of_memory() -> Iterator[Callable[[], int]]:
    """Samples this rank's memory; the result says by how many bytes it grew at most."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    mpicomp.barrier()
    before = peak = proportional_set_bytes()
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, proportional_set_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield lambda: peak - before
    finally:
        done.set()
        thread.join()


def memory_of(name: str, size: str) -> float:
    """MB by which all ranks together grow while a side is built and takes a few steps."""
    with growth_of_memory() as growth:
        side, data = make_side(name, size), sample_of(1, mpicomp.rank())
        for _ in range(4):
            side.step(*data)
        mpicomp.barrier()
    own = torch.tensor(growth() / 1e6, dtype=torch.float64)
    return float(mpicomp.allreduce(own, op=mpicomp.Sum))


# ----------------------------------------------------------------------------------------- main


def holds(row: dict[str, float]) -> bool:
    if "ddp_memory_mb" in row:
        return row["mpicomp_memory_mb"] <= MORE_MEMORY * row["ddp_memory_mb"]
    if "ddp_ms" in row:
        return row["mpicomp_overhead_ms"] <= SHARE_OF_DDP * row["ddp_overhead_ms"]
    return row["mpicomp_overhead_ms"] <= (MORE_ON_ONE_RANK - 1) * row["alone_ms"]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="25M", help="number of parameters")
    parser.add_argument("--rounds", type=int, default=15, help="blocks for each side")
    parser.add_argument("--steps", type=int, default=3, help="steps in a block")
    return parser.parse_args()


def main() -> None:
    args = options()
    torch.set_num_threads(1)
    mpicomp.init()
    names = ["alone", "mpicomp"]
    rows: list[dict[str, float]] = []
    if mpicomp.size() > 1:
        start_gloo()
        names.insert(1, "ddp")
        memory_of("alone", args.size)  # pays for what the first side loads
        rows.append({f"{name}_memory_mb": memory_of(name, args.size) for name in names})
    sides = {name: make_side(name, args.size) for name in names}
    rows += [time_sides(sides, batch, args.rounds, args.steps) for batch in (1, 4)]
    verdicts: list[dict[str, float | bool]] = [{**row, "holds": holds(row)} for row in rows]
    if mpicomp.rank() == 0:
        for row in verdicts:
            cells = (f"{k} {v:.1f}" if type(v) is float else f"{k} {v}" for k, v in row.items())
            print("   ".join(cells))
        good = all(bool(row["holds"]) for row in verdicts)
        print(json.dumps({"benchmark": "step", "rows": verdicts, "target": TARGET, "holds": good}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
