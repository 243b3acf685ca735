"""Does a sketch stay as good, and as small, as workers become many?

    python benchmarks/workers.py --plot docs/workers.svg

Trains the model of ``examples/digits.py`` with 4 to 256 simulated workers that share one batch,
by ``sketch`` and by ``topk`` of the same density. Workers that choose on their own choose
different elements: the union of their choices grows with their number, and so does what each
worker takes in. A sketch leads to one choice, that of the mean, and but for rounding to the same
training for all numbers of workers. Bytes are what each worker sends in a step into a ring
all-reduce, 2 (n - 1) / n messages, or a ring all-gather, n - 1 messages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

from mpicomp.compress import Mean, Message, Simulation
from mpicomp.compress.select import largest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from digits import build_model, load_data

MOMENTUM = 0.9
POINTS = 1.0
PLACES = (0, 2, 2, 0, 0, 0, 0, 2, 2)  # decimals of each column
TARGET = (
    f"sketch: held-out accuracy within {POINTS:g} point and what a worker hands over equal for all "
    "numbers of workers"
)
Row = dict[str, Any]


class Traffic:
    """A tap that adds up what one worker sends, and looks at what workers choose by top-k."""

    def __init__(self, size: int, numel: int, density: float) -> None:
        self.handed_over = 0.0
        self.sent = 0.0
        self.unions: list[float] = []  # |U| / k
        self.looking = False
        self._size, self._numel, self._kept = size, numel, int(density * numel)
        self._chosen: list[Tensor] = []

    def __call__(self, rank: int, message: Message) -> None:
        if rank == 0:
            self.handed_over += message.num_bytes
            times = 2 / self._size if isinstance(message, Mean) else 1
            self.sent += times * (self._size - 1) * message.num_bytes
        if self.looking:
            self._look(message)

    def _look(self, message: Message) -> None:
        """Keep a choice; where everything is averaged instead, what would have been chosen."""
        first, *indices = message.tensors
        if indices:
            self._chosen.append(indices[0].clone())
        elif first.numel() == self._numel:
            self._chosen.append(largest(first, self._kept).int())
        if len(self._chosen) == self._size:
            self.unions.append(torch.cat(self._chosen).unique().numel() / self._kept)
            self._chosen = []


def batches(data: TensorDataset, args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Random batches, the same for every method and number of workers."""
    x, y = data[:]
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        picks = torch.randperm(len(x), generator=generator)[: args.batch]
        yield x[picks], y[picks]


def train(spec: str, size: int, args: argparse.Namespace) -> Row:
    torch.manual_seed(args.seed)
    train_data, held_out = load_data()
    model = build_model()
    params = {name: p.detach() for name, p in model.named_parameters()}  # shared memory
    numel = sum(p.numel() for p in params.values() if p.dim() > 1)
    traffic = Traffic(size, numel, args.density)
    simulation = Simulation(spec, params, size=size, tap=traffic)
    local = any(g.compressor.capabilities.momentum for g in simulation.groups)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0 if local else MOMENTUM)

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (x,)), y)

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    for step, (x, y) in enumerate(batches(train_data, args)):
        traffic.looking = spec.startswith("topk") and step % 20 == 19
        shards = x.view(size, -1, *x.shape[1:]), y.view(size, -1)
        grads = gradients(params, *shards)  # each (size, *shape)
        workers = [{name: g[rank] for name, g in grads.items()} for rank in range(size)]
        means = simulation.step(workers).means[0]
        for name, p in model.named_parameters():
            p.grad = means[name]
        optimizer.step()
    x, y = held_out[:]
    with torch.no_grad():
        right = (model(x).argmax(dim=1) == y).double().mean()
    return {
        "accuracy": 100 * float(right),
        "handed_over": traffic.handed_over / args.steps,
        "sent": traffic.sent / args.steps,
        "unions": traffic.unions,
    }


def measure(size: int, args: argparse.Namespace) -> Row:
    sketch = train(f"sketch:density={args.density},momentum={MOMENTUM}", size, args)
    topk = train(f"topk:density={args.density}", size, args)
    return {
        "workers": size,
        "sketch_accuracy": sketch["accuracy"],
        "topk_accuracy": topk["accuracy"],
        "sketch_bytes_handed_over": sketch["handed_over"],
        "topk_bytes_handed_over": topk["handed_over"],
        "sketch_bytes_sent": sketch["sent"],
        "topk_bytes_sent": topk["sent"],
        "topk_union_per_k": statistics.mean(topk["unions"]),
        "independent_union_per_k": (1 - (1 - args.density) ** size) / args.density,
    }


def plot(rows: list[Row], path: str) -> None:
    from matplotlib import pyplot as plt
    from matplotlib.ticker import ScalarFormatter

    plt.rcParams["svg.hashsalt"] = "workers"  # the same picture from the same numbers
    workers = [row["workers"] for row in rows]
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for method in ("sketch", "topk"):
        panels[0].plot(workers, [row[f"{method}_accuracy"] for row in rows], "o-", label=method)
        sent = [row[f"{method}_bytes_sent"] / 1e3 for row in rows]
        panels[1].plot(workers, sent, "o-", label=method)
    panels[1].set_yscale("log")
    for key, style, label in (
        ("topk_union_per_k", "C1o-", "topk, measured"),
        ("independent_union_per_k", "k--", "independent choices"),
    ):
        panels[2].plot(workers, [row[key] for row in rows], style, label=label)
    titles = ("held-out accuracy, %", "kB sent per worker and step", "chosen by any worker / k")
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title)
        panel.set_xlabel("workers")
        panel.set_xscale("log", base=2)
        panel.set_xticks(workers)
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.legend()
    panels[0].set_ylim(90, 100)
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[4, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch", type=int, default=256, help="samples a step, over all workers")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="write a picture (needs matplotlib)")
    return parser.parse_args()


def main() -> None:
    args = options()
    torch.set_num_threads(1)
    plain = train("none", 1, args)["accuracy"]
    print(f"none: accuracy {plain:.2f} %")
    groups = ("accuracy %", "bytes handed over", "bytes sent", "union / k")
    print(f"{'':>11}" + "".join(f"{group:>22}" for group in groups))
    names = ("workers", *3 * ("sketch", "topk"), "measured", "formula")
    print("".join(f"{name:>11}" for name in names))
    rows = []
    for size in args.workers:
        rows.append(measure(size, args))
        cells = zip(rows[-1].values(), PLACES, strict=True)
        print("".join(f"{value:>11.{places}f}" for value, places in cells), flush=True)
    if args.plot:
        plot(rows, args.plot)
    accuracy = [row["sketch_accuracy"] for row in rows]
    handed = {row["sketch_bytes_handed_over"] for row in rows}
    holds = len(handed) == 1 and max(accuracy) - min(accuracy) <= POINTS
    result = {"none_accuracy": plain, "rows": rows, "target": TARGET, "holds": holds}
    print(json.dumps({"benchmark": "workers", **result}))


if __name__ == "__main__":
    main()
