"""What sparsifiers share: gradients as values and indices, and two ways to average them.

`gather_pairs` is for ranks that choose independently: every rank gets the (value, index) pairs of
all others. `average_union` is for ranks whose choices hardly overlap: the indices are gathered,
then all ranks average their values at all of them.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from .base import (
    Bucket,
    Compressor,
    Decoded,
    Dense,
    Exchange,
    Exchanged,
    Gather,
    GatherV,
    Mean,
    all_finite,
    wide,
)

Pairs: TypeAlias = tuple[Tensor, Tensor]  # values (k,), and their indices (k,), distinct

# -------------------------------------------------------------------------------- decoded forms


@dataclass(frozen=True, slots=True)
class Sparse(Decoded):
    """``values`` (k,) at distinct ``indices`` (k,) of the flat bucket, zero elsewhere."""

    indices: Tensor
    values: Tensor

    def store_(self, bucket: Bucket) -> None:
        bucket.flat.zero_()
        bucket.flat[self.indices] = self.values.to(bucket.flat.dtype)

    def subtract_(self, bucket: Bucket) -> None:
        bucket.flat[self.indices] -= self.values

    def is_finite(self) -> bool:
        return all_finite(self.values)


@dataclass(frozen=True, slots=True)
class SparseMean(Decoded):
    """The mean of one sparse vector per rank, added up in rank order.

    Args:
        parts: for each rank its values (k,) and their indices (k,), distinct within a rank.
    """

    parts: Sequence[Pairs]

    def store_(self, bucket: Bucket) -> None:
        dtype = wide(bucket.flat.dtype)
        if bucket.flat.dtype == dtype:
            self._add_to(bucket.flat.zero_())
        else:
            bucket.flat.copy_(self._add_to(torch.zeros_like(bucket.flat, dtype=dtype)))

    def subtract_(self, bucket: Bucket) -> None:
        dtype = wide(bucket.flat.dtype)
        bucket.flat.sub_(self._add_to(torch.zeros_like(bucket.flat, dtype=dtype)))

    def is_finite(self) -> bool:
        return all(all_finite(values) for values, _ in self.parts)

    def _add_to(self, total: Tensor) -> Tensor:
        # one rank at a time: distinct indices make the sums the same on every device and rank
        for values, indices in self.parts:
            total.index_add_(0, indices, values.to(total.dtype) / len(self.parts))
        return total


# ------------------------------------------------------------------------------------ exchanges


def gather_pairs(bucket: Bucket, indices: Tensor, *, equal_counts: bool) -> Exchange:
    """Average what each rank has at its own ``indices`` (k,), which are distinct.

    Args:
        equal_counts: whether k is the same on all ranks by construction.
    """
    narrow = indices.to(index_dtype(bucket.flat.numel()), copy=True)
    kind = Gather if equal_counts else GatherV
    parts = yield kind((bucket.flat[indices], narrow))
    values, own = parts[bucket.rank]
    return Exchanged(mean=SparseMean(parts), sent=Sparse(own, values))


def average_union(
    bucket: Bucket, indices: Tensor, *, disjoint: bool, common: Tensor | None = None
) -> Exchange:
    """Average what all ranks have at the union of all ranks' ``indices`` (k,).

    Args:
        disjoint: whether no index is chosen by two ranks, by construction.
        common: more indices, equal on all ranks and chosen by none; they need not travel.
    """
    dtype = index_dtype(bucket.flat.numel())
    parts = yield GatherV((indices.to(dtype, copy=True),))
    chosen = [own for (own,) in parts]
    union = torch.cat(chosen if common is None else [*chosen, common.to(dtype)])
    if not disjoint:
        union = union.unique()  # sorted
    (mean,) = yield Mean((bucket.flat[union],))
    return Exchanged(mean=Sparse(union, mean), sent=Sparse(union, bucket.flat[union]))


def average_all(bucket: Bucket) -> Exchange:
    """The plain mean, for where choosing would not pay; the bucket stays as it was."""
    (mean,) = yield Mean((bucket.flat.clone(),))
    return Exchanged(mean=Dense(mean), sent=Dense(bucket.flat))


# ---------------------------------------------------------------------------------------- pairs


def add_up(parts: Sequence[Pairs]) -> Pairs:
    """The sum of sparse vectors, its indices ascending."""
    indices, places = torch.cat([own for _, own in parts]).unique(return_inverse=True)
    total = torch.zeros(len(indices), dtype=parts[0][0].dtype, device=indices.device)
    places = places.split([len(own) for _, own in parts])
    for (values, _), place in zip(parts, places, strict=True):  # in order: equal bits every time
        total.index_add_(0, place, values)
    return total, indices


def pack_pairs(values: Tensor, indices: Tensor) -> Tensor:
    """One row of bytes for each pair (k, bytes of a value + bytes of an index)."""
    columns = (t.view(torch.uint8).view(len(t), t.element_size()) for t in (values, indices))
    return torch.cat(tuple(columns), dim=1)


def unpack_pairs(packed: Tensor, *, values: torch.dtype, indices: torch.dtype) -> Pairs:
    """The pairs in ``packed`` (bytes,), the rows of `pack_pairs` one after another."""
    rows = packed.view(-1, values.itemsize + indices.itemsize)
    first, last = rows[:, : values.itemsize], rows[:, values.itemsize :]
    # in memory of their own, because wider types have to begin at multiples of their size
    return _flat(first).view(values), _flat(last).view(indices)


def _flat(rows: Tensor) -> Tensor:
    return rows.clone(memory_format=torch.contiguous_format).view(-1)


# ---------------------------------------------------------------------------------- sparsifiers


class Sparsifier(Compressor):
    """A method that keeps a fraction of the elements of a bucket, its field ``density``."""

    density: float

    def __post_init__(self) -> None:
        if isinstance(self.density, str) or not 0.0 < self.density <= 1.0:
            kind = type(self).__name__.lower()
            raise ValueError(f"{kind}: density must be in (0, 1], got {self.density!r}")

    def helps(self, shape: tuple[int, ...]) -> bool:
        return super().helps(shape) and not self.dense_is_cheaper(math.prod(shape), 4, size=1)

    def num_kept(self, numel: int) -> int:
        """How many of ``numel`` elements are to be kept: at least one, if there is one."""
        return min(max(int(numel * self.density), 1), numel)

    @abc.abstractmethod
    def dense_is_cheaper(self, numel: int, element_bytes: int, *, size: int) -> bool:
        """Whether a plain mean over ``size`` ranks would move no more bytes than this method."""


class PairSparsifier(Sparsifier):
    """A sparsifier whose ranks gather all (value, index) pairs of each other."""

    def dense_is_cheaper(self, numel: int, element_bytes: int, *, size: int) -> bool:
        return pairs_cost_more(numel, self.num_kept(numel), element_bytes, size=size)


class UnionSparsifier(Sparsifier):
    """A sparsifier whose ranks together choose one set, and average their values there."""

    def dense_is_cheaper(self, numel: int, element_bytes: int, *, size: int) -> bool:
        return union_costs_more(numel, self.num_kept(numel), element_bytes)


def pairs_cost_more(numel: int, kept: int, element_bytes: int, *, size: int) -> bool:
    """Whether gathering ``kept`` pairs of each rank moves as much as a mean, twice the bytes."""
    pair_bytes = element_bytes + index_dtype(numel).itemsize
    return max(size, 2) * kept * pair_bytes >= 2 * numel * element_bytes


def union_costs_more(numel: int, kept: int, element_bytes: int) -> bool:
    """Whether gathering ``kept`` indices and averaging there moves as much as a plain mean."""
    return kept * (index_dtype(numel).itemsize + 2 * element_bytes) >= 2 * numel * element_bytes


def index_dtype(numel: int) -> torch.dtype:
    """The narrowest type that counts ``numel`` elements exactly."""
    return torch.int32 if numel < 2**31 else torch.int64
