"""Bytes that a rank receives in a step: counted from messages, and by formula.

An allreduce of b bytes brings a rank 2 (n - 1) / n b of them, a gather the parts of all others, an
all-to-all what the others have for it, and a broadcast the message, once. Where ranks receive
unequal amounts, the average counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpicomp.compress import AllToAll, Broadcast, Gather, GatherV, Message, Simulation
from mpicomp.compress.rules import resolve
from mpicomp.compress.wrapper import innermost

Grads = Mapping[str, Tensor]

# -------------------------------------------------------------------------------------- counted


def received(messages: list[Message]) -> float:
    """Bytes that a rank receives in one round, on average; one message of each rank."""
    size, first = len(messages), messages[0]
    total = sum(message.num_bytes for message in messages)
    if isinstance(first, Gather | GatherV):
        return total * (size - 1) / size
    if isinstance(first, AllToAll):
        kept = (message.tensors[rank] for rank, message in enumerate(messages))
        return (total - sum(t.numel() * t.element_size() for t in kept)) / size
    if isinstance(first, Broadcast):
        return first.num_bytes * (size - 1) / size
    return 2 * (size - 1) / size * first.num_bytes


SEEN = ("threshold", "gaussiank", "sidco", "oktopk")
"""Methods whose formula takes the number of elements that each of two ranks chose: data decide."""

TEAMS = 16  # ranks at least that are counted, in teams that know nothing of each other


def count_bytes(spec: str, pool: Sequence[Grads], *, size: int) -> float:
    """Bytes that a rank receives in a step, of ``size`` ranks; a mean of a few, if data decide."""
    starts = range(0, max(TEAMS, size) if name_of(spec) in SEEN else size, size)
    return statistics.mean(_count(spec, pool, size, start) for start in starts)


def _count(spec: str, pool: Sequence[Grads], size: int, start: int) -> float:
    """In two steps, on average: after one step, or later where thresholds have to settle.

    Rank r begins with the gradient ``start + r``.
    """
    rounds: list[float] = []
    pending: list[Message] = []

    def tap(rank: int, message: Message) -> None:
        pending.append(message)
        if len(pending) == size:
            rounds.append(received(pending))
            pending.clear()

    simulation = Simulation(spec, pool[0], size=size, tap=tap)
    first = 12 if name_of(spec) in SEEN else 1
    for step in range(first + 2):
        if step == first:
            rounds.clear()
        simulation.step([pool[(start + step + rank) % len(pool)] for rank in range(size)])
    return sum(rounds) / 2


def name_of(spec: str) -> str:
    return spec.partition(":")[0]


# ------------------------------------------------------------------------------------ predicted


@dataclass(frozen=True)
class Setting:
    """What a formula may use.

    Attributes:
        n: ranks.
        method: the options.
        shapes: (rows, columns) of each matrix that is compressed.
        v: elements of all others, which go dense.
        seen: elements that a rank chose, where data decide on their number; of two ranks.
    """

    n: int
    method: Any
    shapes: tuple[tuple[int, int], ...]
    v: int
    seen: float = math.nan

    @property
    def d(self) -> int:
        """Elements that are compressed."""
        return sum(rows * columns for rows, columns in self.shapes)

    @property
    def k(self) -> int:
        """Elements that a sparsifier keeps."""
        return max(int(self.method.density * self.d), 1)

    @property
    def fragments(self) -> int:
        """Of deft: tensors with more than their share of all elements are cut into n."""
        return sum(self.n if r * c * self.n > self.d else 1 for r, c in self.shapes)

    # what a rank receives, if each hands over so many bytes

    def mean(self, bytes_: float) -> float:
        """Also a sum, or a maximum."""
        return 2 * (self.n - 1) / self.n * bytes_

    def gather(self, bytes_: float) -> float:
        return (self.n - 1) * bytes_

    def deal(self, bytes_: float) -> float:
        """An all-to-all, or a broadcast."""
        return (self.n - 1) / self.n * bytes_

    # in terms of these

    def pairs(self, k: float) -> float:
        """Values and 32-bit indices of k elements of each rank."""
        return self.gather(8 * k)

    def union(self, k: float) -> float:
        """Indices of k elements, dealt out to the ranks, and the mean of their values."""
        return self.gather(4 * k / self.n) + self.mean(4 * k)

    def merged(self, k: float) -> float:
        """Pairs of k elements on their way together, and k back."""
        return self.deal(8 * k) + self.deal(8 * k)

    def two_sided(self, there: float, back: float, rows: int, row: int, *, cut: bool) -> float:
        """Codes of so many bits, and ``row`` bytes for each of the rows, which n chunks may cut."""
        if self.n <= 2:
            return self.gather(self.d * there / 8 + rows * row)
        rows += (self.n - 1) * cut
        return self.deal(self.d * there / 8 + rows * row) + self.deal(
            self.d * back / 8 + rows * row
        )

    def cheaper(self, own: float, really: float | None = None) -> float:
        """``own``, or the plain mean where that is no more.

        Args:
            own: what the method expects.
            really: what comes of it, if something else.
        """
        dense = self.mean(4 * self.d)
        return dense if own >= dense else own if really is None else really


def blocks(s: Setting) -> int:
    return -(-s.d // int(s.method.block))


def rows(s: Setting) -> int:
    """With numbers of their own: parameters, or the rows of their matrices."""
    return len(s.shapes) if s.method.per == "parameter" else sum(r for r, _ in s.shapes)


def sum_bytes(largest: int) -> int:
    """Of an integer that has to hold a sum up to this."""
    return 1 if largest <= 127 else 2 if largest <= 32767 else 4


def factors(s: Setting, *, rows: float, columns: float) -> float:
    """Numbers in both factors of all matrices, weighted."""
    rank: int = s.method.rank
    return sum(min(r, c, rank) * (rows * r + columns * c) for r, c in s.shapes)


def table(s: Setting, columns: float) -> int:
    """Numbers in a sketch of so many columns."""
    return int(s.method.rows) * max(round(columns), 32)


def signs(s: Setting, back: int, row: int) -> float:
    return s.two_sided(1, back, rows(s), row, cut=True)


FORMULAS: dict[str, Callable[[Setting], float]] = {
    "none": lambda s: s.mean(4 * s.d),
    "fp16": lambda s: s.mean(2 * s.d),
    "bf16": lambda s: s.mean(2 * s.d),
    # sketching: tables can be added up
    "sketch": lambda s: s.cheaper(
        s.mean(4 * (table(s, s.method.columns * s.k) + s.method.candidates * s.k))
    ),
    "fetchsgd": lambda s: s.mean(
        4 * sum(min(table(s, s.method.width * r * c), r * c) for r, c in s.shapes)
    ),
    # low rank: so can factors
    "powersgd": lambda s: s.mean(4 * s.method.iterations * factors(s, rows=1, columns=1)),
    "acpsgd": lambda s: s.mean(4 * factors(s, rows=1 / 2, columns=1 / 2)),
    # local selection: pairs of all others
    "topk": lambda s: s.cheaper(s.pairs(s.k)),
    "dgc": lambda s: s.cheaper(s.pairs(s.k)),
    "threshold": lambda s: s.cheaper(s.pairs(s.k), s.pairs(s.seen)),
    "gaussiank": lambda s: s.cheaper(s.pairs(s.k), s.pairs(s.seen)),
    "sidco": lambda s: s.cheaper(s.pairs(s.k), s.pairs(s.seen)),
    "randomk": lambda s: s.mean(4 * s.k),
    # without build-up
    "gtopk": lambda s: s.cheaper(2 * math.ceil(math.log2(s.n)) * s.deal(8 * s.k), s.merged(s.k)),
    "oktopk": lambda s: s.cheaper(s.merged(s.k), s.merged(s.seen)),
    "cltk": lambda s: s.cheaper(s.deal(4 * s.k) + s.mean(4 * s.k)),
    "deft": lambda s: s.cheaper(s.deal(4 * s.fragments) + s.union(max(s.k, s.fragments))),
    "micro": lambda s: s.cheaper(s.union(max(s.k, s.n)) + s.gather(16)),
    "exdyna": lambda s: s.cheaper(s.union(max(s.k, s.n)) + s.gather(16)),
    # codes, to the owner of a chunk and back
    "int8": lambda s: s.two_sided(8, 8, blocks(s), 4, cut=False),
    "int4": lambda s: s.two_sided(4, 4, blocks(s), 4, cut=False),
    "signsgd": lambda s: signs(s, back=2, row=4),
    "efsign": lambda s: signs(s, back=1, row=4),
    "onebit": lambda s: signs(s, back=1, row=8),
    # codes of all others, or sums of codes
    "natural": lambda s: s.cheaper(s.gather(9 / 8 * s.d)),
    "qsgd": lambda s: s.cheaper(s.gather(s.d * s.method.bits / 8 + 4 * blocks(s))),
    "terngrad": lambda s: (
        s.mean(4 * len(s.shapes)) + (s.gather(s.d / 4) if s.n < 8 else s.mean(s.d * sum_bytes(s.n)))
    ),
    "thc": lambda s: s.mean(4 * blocks(s) + s.d * sum_bytes(s.n * (2 ** (s.method.bits - 1) - 1))),
}
"""Of the compressed part; the plain mean of the rest comes on top."""


def predict_bytes(spec: str, params: Grads, counted_on_two: float, *, size: int) -> float:
    """Bytes that a rank receives in a step, from the settings.

    Args:
        counted_on_two: what `count_bytes` says for two ranks; used for the methods in `SEEN` only.
    """
    name = name_of(spec)
    ((_, method),) = resolve(spec)
    vectors = ("sketch", "fetchsgd", "dgc")  # these take all parameters, and do it themselves
    shapes = [tuple(param.shape) for param in params.values()]
    chosen = [s for s in shapes if method.helps(s) and not (name in vectors and len(s) < 2)]
    v = sum(math.prod(s) for s in shapes) - sum(math.prod(s) for s in chosen)
    matrices = tuple((s[0], math.prod(s[1:])) for s in chosen)
    setting = Setting(size, innermost(method), matrices, v)
    if name in SEEN:
        two = Setting(2, setting.method, matrices, v)
        seen = (counted_on_two - two.mean(4 * v)) / two.pairs(1)
        setting = Setting(size, setting.method, matrices, v, seen)
    return setting.mean(4 * v) + FORMULAS[name](setting)
