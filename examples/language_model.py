"""A language model: what compression is worth as models grow.

    mpicomp-launch -np 2 python examples/language_model.py --size 5M
    mpicomp-launch -np 2 python examples/language_model.py --size 5M --compression powersgd:rank=4

Trains a byte-level transformer on the source text of Python's own standard library, and tells how
many bits it needs for a byte of files that it has not seen. Try ``--size 130k`` to ``100M`` and
watch samples/s: the larger the model, the longer dense gradients keep the ranks waiting. Schedules
of learning rates and gradient clipping work as ever: after ``backward()`` gradients are means over
ranks.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from _report import Report
from torch import Tensor, nn

import mpicomp

HELD_OUT_WINDOWS = 64
NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1M", help="number of parameters")
    parser.add_argument("--compression", metavar="SPEC", help="None: MPICOMP_COMPRESSION, or none")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=16, help="samples a step, over all ranks")
    parser.add_argument("--context", type=int, default=128, help="bytes in a sample")
    parser.add_argument("--lr", type=float, default=1e-3, help="at its highest")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


# ---------------------------------------------------------------------------------------- data


def load_text() -> tuple[Tensor, Tensor]:
    """All bytes of the standard library's source, one file in ten (by name) held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out = bytearray(), bytearray()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if NOT_SOURCE.isdisjoint(name.parts):
            chosen = held_out if zlib.crc32(name.as_posix().encode()) % 10 == 0 else train
            chosen += path.read_bytes()
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (n, context): the bytes from each start, and those one further on."""
    bytes_ = text[starts[:, None] + torch.arange(context + 1)].long()
    return bytes_[:, :-1], bytes_[:, 1:]


def batches(
    text: Tensor, args: argparse.Namespace, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random batches: all ranks draw the same one, and each takes its share of it."""
    while True:
        starts = torch.randint(len(text) - args.context, (args.batch,), generator=generator)
        yield windows(text, starts[mpicomp.rank() :: mpicomp.size()], args.context)


# --------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class Size:
    layers: int
    width: int  # of which each attention head takes 64


SIZES = {
    "130k": Size(2, 64),
    "1M": Size(5, 128),
    "5M": Size(6, 256),
    "25M": Size(8, 512),
    "100M": Size(14, 768),
}


class Block(nn.Module):
    """Pre-norm: attention, then two dense layers, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, 64)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (batch, heads, context, 64) each
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, context, width))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class Transformer(nn.Module):
    """From bytes (n, context) to logits (n, context, 256) of the byte that follows each."""

    def __init__(self, size: Size, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, size.width)
        self.positions = nn.Parameter(torch.zeros(context, size.width))
        self.blocks = nn.Sequential(*(Block(size.width) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bytes(x) + self.positions[: x.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy in nats."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


# ------------------------------------------------------------------------------------ training


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: Tensor, context: int) -> float:
    """Mean over windows spread evenly over ``text``, of which each rank takes a share."""
    starts = torch.linspace(0, len(text) - context - 1, HELD_OUT_WINDOWS).long()
    x, y = windows(text, starts[mpicomp.rank() :: mpicomp.size()], context)
    nats = loss_of(model, x, y) * len(x)
    total = float(mpicomp.allreduce(nats, op=mpicomp.Sum))
    return total / HELD_OUT_WINDOWS / math.log(2)


def schedule(step: int, steps: int) -> float:
    """Share of the highest learning rate: a rise over a tenth of the steps, then half a cosine."""
    rise = max(1, steps // 10)
    return min((step + 1) / rise, 0.5 + 0.5 * math.cos(math.pi * step / steps))


def main() -> None:
    args = options()
    mpicomp.init()
    if args.batch % mpicomp.size():
        raise SystemExit(f"--batch must be a multiple of {mpicomp.size()} ranks, got {args.batch}")
    torch.manual_seed(args.seed)
    train, held_out = load_text()
    model = Transformer(SIZES[args.size], args.context)
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=args.lr)
    optimizer = mpicomp.DistributedOptimizer(optimizer, compression=args.compression, model=model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: schedule(s, args.steps))
    data = batches(train, args, torch.Generator().manual_seed(args.seed))
    every = max(1, args.steps // 10)

    with Report(steps=args.steps, samples_per_step=args.batch) as report:
        report.text(f"{sum(p.numel() for p in parameters):,} parameters, {len(train):,} bytes")
        for step in range(1, args.steps + 1):
            optimizer.zero_grad()
            loss = loss_of(model, *next(data))
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            scheduler.step()
            report.step(loss)
            if step % every == 0 or step == args.steps:
                report.line(f"bits/byte {bits_per_byte(model, held_out, args.context):.3f}")
    report.text(f"final held-out bits/byte {bits_per_byte(model, held_out, args.context):.3f}")


if __name__ == "__main__":
    main()
