"""Seconds until a language model needs few enough bits per byte: compressors against dense.

    lab="python benchmarks/netlab.py --hosts 2"
    $lab --rate 100mbit python benchmarks/time_to_quality.py --network "100 Mb/s" --out slow.json
    $lab --rate 1gbit python benchmarks/time_to_quality.py --network "1 Gb/s" --out fast.json
    python benchmarks/time_to_quality.py --merge slow.json fast.json --plot quality.svg

Trains the transformer of ``examples/language_model.py`` on all ranks, with one thread each, until
it needs ``--target`` bits for a byte of files that it has not seen. The sides are ``none``, which
is dense, ``ddp``, which is dense over Gloo, and compressors. All start from the same weights, see
the same batches, and have the same learning rate and size of buckets, both chosen for ``none``
alone. The sides of a seed take turns, some steps each, and every turn begins with another one. The
clock of a side runs in its own training steps only, not while its model is judged, and follows the
rank that takes longest. When the target is met is interpolated between two evaluations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _gloo import start_gloo
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mpicomp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from language_model import Size, Transformer, batches, bits_per_byte, load_text, loss_of

DENSE, PEER = "none", "ddp"
COMPRESSORS = ("fp16", "int4", "signsgd", "powersgd:rank=4", "topk:density=0.01")
SIZE = Size(layers=3, width=128)
WARM_UP = 20  # steps in which the learning rate rises to where it stays
TARGET = "on each network, at least one compressor meets the target sooner than none"

Curve = list[tuple[int, float, float]]  # steps, seconds in them, bits per byte after them
Row = dict[str, Any]  # what one side took on one network: see `row_of`

# -------------------------------------------------------------------------------------- training


class Side:
    """A model in training, with one way to average the gradients of all ranks."""

    def __init__(self, name: str, seed: int, args: argparse.Namespace) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = Transformer(SIZE, args.context)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=args.lr
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / WARM_UP)
        )
        if name == PEER:
            self.trained: nn.Module = DistributedDataParallel(
                self.model, bucket_cap_mb=args.bucket_mb, gradient_as_bucket_view=True
            )
        else:
            self.trained = self.model
            self.optimizer = mpicomp.DistributedOptimizer(
                self.optimizer, compression=name, model=self.model, fusion_mb=args.bucket_mb
            )

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        loss_of(self.trained, x, y).backward()
        self.optimizer.step()
        self.scheduler.step()

    def close(self) -> None:
        if isinstance(self.optimizer, mpicomp.DistributedOptimizer):
            self.optimizer.close()


def train(side: Side, data: list[tuple[Tensor, Tensor]]) -> float:
    """Seconds that the steps take, on the rank that takes longest."""
    mpicomp.barrier()
    started = time.perf_counter()
    for sample in data:
        side.step(*sample)
    own = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    return float(mpicomp.allreduce(own, op=mpicomp.Max))


def race(
    names: list[str], seed: int, texts: tuple[Tensor, Tensor], args: argparse.Namespace
) -> dict[str, Curve]:
    """Train the sides in turns, each until it meets the target or has taken all its steps."""
    text, held_out = texts
    sides = {name: Side(name, seed, args) for name in names}
    curves: dict[str, Curve] = {
        name: [(0, 0.0, bits_per_byte(side.model, held_out, args.context))]
        for name, side in sides.items()
    }
    stream = batches(text, args, torch.Generator().manual_seed(seed))
    for turn in range(args.steps // args.every):
        data = list(islice(stream, args.every))
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            steps, seconds, bits = curves[name][-1]
            if bits > args.target:
                seconds += train(sides[name], data)
                bits = bits_per_byte(sides[name].model, held_out, args.context)
                curves[name].append((steps + args.every, seconds, bits))
    for side in sides.values():
        side.close()
    return curves


def measure(args: argparse.Namespace) -> list[Row]:
    """A row for each side; each seed is a race of its own."""
    torch.set_num_threads(1)
    mpicomp.init()
    if args.batch % mpicomp.size():
        raise SystemExit(f"--batch must be a multiple of {mpicomp.size()} ranks, got {args.batch}")
    start_gloo()
    texts = load_text()
    names = [DENSE, PEER, *args.compression]
    races = []
    for seed in range(args.seeds):
        races.append(race(names, seed, texts, args))
        if mpicomp.rank() == 0:
            for name, curve in races[-1].items():
                steps, seconds, bits = curve[-1]
                print(
                    f"seed {seed}   {name:20} {steps:5} steps {seconds:7.1f} s {bits:7.3f} bits",
                    flush=True,
                )
    dist.destroy_process_group()
    return [row_of(name, races, args) for name in names]


# --------------------------------------------------------------------------------------- results


def meets(curve: Curve, target: float) -> tuple[float, float] | None:
    """Steps and seconds after which a curve first meets the target; None if it never does."""
    for (steps0, seconds0, bits0), (steps1, seconds1, bits1) in pairwise(curve):
        if bits1 <= target:
            part = (bits0 - target) / (bits0 - bits1)
            return steps0 + part * (steps1 - steps0), seconds0 + part * (seconds1 - seconds0)
    return None


def row_of(name: str, races: list[dict[str, Curve]], args: argparse.Namespace) -> Row:
    """What a side took; lists have an element for each seed, None where the target was not met."""
    curves = [race[name] for race in races]
    met = [meets(curve, args.target) for curve in curves]
    dense = [meets(race[DENSE], args.target) for race in races]
    return {
        "network": args.network,
        "compression": name,
        "bits_per_byte": args.target,
        "steps": [each and round(each[0], 1) for each in met],
        "seconds": [each and round(each[1], 3) for each in met],
        "times_dense": [
            round(its[1] / each[1], 3) if each and its else None
            for each, its in zip(met, dense, strict=True)
        ],
        "step_ms": [round(1e3 * curve[-1][1] / curve[-1][0], 2) for curve in curves],
        "curves": [[(s, round(t, 3), round(bits, 4)) for s, t, bits in c] for c in curves],
    }


def middle(values: list[float | None]) -> float | None:
    """The median over seeds; one that was not met counts as later than all others."""
    known = [float("inf") if value is None else value for value in values]
    median = statistics.median(known)
    return None if median == float("inf") else median


def times_sooner(row: Row) -> float:
    """How many times sooner than dense, the median over seeds; 0 where the target is not met."""
    return statistics.median(value or 0.0 for value in row["times_dense"])


def cells(row: Row) -> Iterator[str]:
    """A line of the table: medians over seeds, with the least and the greatest."""
    yield row["network"]
    yield f"`{row['compression']}`"
    for key, form in (("steps", ".0f"), ("step_ms", ".0f"), ("seconds", ".1f")):
        known = [value for value in row[key] if value is not None]
        value = middle(row[key])
        spread = f"{min(known):{form}} to {max(known):{form}}" if known else "no seed"
        yield f"{'not met' if value is None else format(value, form)} ({spread})"
    yield f"{times_sooner(row):.2f}"


def table(rows: list[Row]) -> str:
    """In Markdown: medians over seeds, with the least and the greatest."""
    head = ("network", "compression", "steps", "ms a step", "seconds", "times sooner than none")
    lines = [head, ("---",) * len(head), *(tuple(cells(row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def holds(rows: list[Row]) -> bool:
    """Whether `TARGET` holds."""
    sooner: dict[str, list[bool]] = {row["network"]: [] for row in rows}
    for row in rows:
        if row["compression"] not in (DENSE, PEER):
            sooner[row["network"]].append(times_sooner(row) > 1)
    return all(any(each) for each in sooner.values())


# ------------------------------------------------------------------------------------------ main


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--network", default="one host", help="what the network is called")
    parser.add_argument("--compression", nargs="*", default=COMPRESSORS, help="beside none and ddp")
    parser.add_argument("--target", type=float, default=3.8, help="bits per byte")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600, help="after which a side gives up")
    parser.add_argument("--every", type=int, default=20, help="steps between two evaluations")
    parser.add_argument("--batch", type=int, default=8, help="samples a step, over all ranks")
    parser.add_argument("--context", type=int, default=64, help="bytes in a sample")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--bucket-mb", type=float, default=1.0, help="size of a bucket of gradients"
    )
    parser.add_argument("--merge", nargs="+", metavar="FILE", help="train nothing, join these")
    parser.add_argument("--out", metavar="FILE", help="where to write the JSON too")
    parser.add_argument("--plot", metavar="FILE", help="where to draw bits per byte over seconds")
    return parser.parse_args()


def main() -> None:
    args = options()
    if args.merge:
        rows = [row for file in args.merge for row in json.loads(Path(file).read_text())["rows"]]
    else:
        rows = measure(args)
        if mpicomp.rank() != 0:
            return
    result = {
        "benchmark": "time to quality",
        "rows": rows,
        "target": TARGET,
        "holds": holds(rows),
    }
    if args.out:
        Path(args.out).write_text(json.dumps(result) + "\n")
    if args.plot:
        from _quality_chart import draw  # Matplotlib is needed for this alone

        draw(rows, Path(args.plot))
    print(table(rows))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
