"""The Count-Sketch: a long vector in a small table from which its large elements can be read.

Reference: M. Charikar, K. Chen and M. Farach-Colton, "Finding Frequent Items in Data Streams",
ICALP 2002.

Each row of the table adds up all elements, each with a sign, in columns; the estimate of an
element is the median over rows of what its column holds, with its sign. Here neighbours stay
together: the vector is cut into blocks no longer than a row, and every row puts every block at
a random place, wrapped around at the end, with a random sign. Adding up and reading are then
passes over contiguous memory, in an order that is the same on every device.

What the usual analysis needs of the hashes holds: two elements of one block never share a column;
two of different blocks do with probability exactly 1 / columns, as their blocks are placed
independently; and the signs of different blocks are independent of each other and of the places.
So a row estimates x_i without bias and with variance (|x|^2 - |block of x_i|^2) / columns, which
is no more than with hashes of single elements, and rows are independent. Errors of neighbours are
not, and the norm of a row is no estimate of the norm of the vector.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import wide
from .select import largest

MIN_COLUMNS = 32  # shorter rows cost more time than they save bytes
_MIN_BLOCK, _MAX_BLOCKS = 1 << 14, 256  # fits a cache; keeps the number of operations down


@dataclass(frozen=True, slots=True)
class CountSketch:
    """Places and signs for vectors of ``numel`` elements; the table is (rows, ``columns``).

    Attributes:
        block: length of the pieces that are placed together, at most ``columns``.
        places: for each block and row the first column, and whether the sign is minus.
    """

    numel: int
    columns: int
    block: int
    places: tuple[tuple[tuple[int, bool], ...], ...]

    @classmethod
    def draw(
        cls, numel: int, *, rows: int, columns: int, generator: torch.Generator
    ) -> CountSketch:
        """Equal arguments and generators give equal sketches. ``rows`` is odd, for the median.

        A table as wide as the vector holds it without collisions.
        """
        short = min(columns, max(_MIN_BLOCK, math.ceil(numel / _MAX_BLOCKS)))
        block = short if columns < numel else columns
        shape = (math.ceil(numel / block), rows)
        starts = torch.randint(columns, shape, generator=generator).tolist()
        minus = torch.randint(2, shape, generator=generator).bool().tolist()
        places = tuple(tuple(zip(*pair, strict=True)) for pair in zip(starts, minus, strict=True))
        return cls(numel, columns, block, places)

    @property
    def rows(self) -> int:
        return len(self.places[0]) if self.places else 1

    def encode(self, flat: Tensor) -> Tensor:
        """The table, in at least fp32, of a vector (numel,)."""
        dtype = wide(flat.dtype)
        wrapped = flat.new_zeros(self.rows, self.columns + self.block, dtype=dtype)
        rows = wrapped.unbind()
        for piece, places in zip(flat.split(self.block), self.places, strict=False):
            length = piece.numel()
            for row, (start, minus) in zip(rows, places, strict=True):
                row.narrow(0, start, length).add_(piece, alpha=-1 if minus else 1)
        table = wrapped[:, : self.columns].clone()
        table[:, : self.block] += wrapped[:, self.columns :]
        return table

    def query(self, table: Tensor) -> Tensor:
        """Estimates (numel,) of the elements of the vector that ``table`` is of."""
        wrapped = torch.cat([table, table[:, : self.block]], dim=1)
        rows = tuple(zip(wrapped.unbind(), (-wrapped).unbind(), strict=True))
        estimates = table.new_empty(self.numel)
        for piece, places in zip(estimates.split(self.block), self.places, strict=False):
            length = piece.numel()
            reads = [
                signed[minus].narrow(0, start, length)
                for signed, (start, minus) in zip(rows, places, strict=True)
            ]
            piece.copy_(median(reads))
        return estimates


def median(rows: Sequence[Tensor]) -> Tensor:
    """Element by element the median of an odd number of tensors; NaN if one of them is NaN.

    Taking away the smallest, over and over, is many times faster than `torch.median` for so few.
    """
    rest = list(rows)
    for _ in range(len(rows) // 2):
        low, *others = rest
        rest = []
        for row in others:
            rest.append(torch.maximum(low, row))
            low = torch.minimum(low, row)
    return functools.reduce(torch.minimum, rest)


def heaviest(values: Tensor, k: int) -> Tensor:
    """Indices (k,), in order, of the k elements of largest magnitude; the first among equals.

    The result depends on the values alone, so ranks that have equal values choose alike. NaN
    counts as infinite.

    Args:
        values: 1-d tensor.
        k: how many, between 0 and ``values.numel()``.
    """
    if k in (0, values.numel()):
        return torch.arange(k, device=values.device)
    sizes = values.abs().nan_to_num_(nan=math.inf, posinf=math.inf)
    bound = sizes[largest(sizes, k)].min()
    chosen = sizes > bound
    equal = (sizes == bound).nonzero().squeeze(1)
    chosen[equal[: k - int(chosen.sum())]] = True
    return chosen.nonzero().squeeze(1)


def check_table(method: str, *, rows: int, momentum: float) -> None:
    """Raise a ValueError unless these are legal options of a method that sketches."""
    if not isinstance(rows, int) or rows < 1 or rows % 2 == 0:
        raise ValueError(f"{method}: rows must be an odd integer from 1 up, got {rows!r}")
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"{method}: momentum must be in [0, 1), got {momentum!r}")
