"""DEFT: tensors are dealt out to the ranks, and each rank chooses within its own hand only.

Reference: D. Yoon and S. Oh, "DEFT: Exploiting Gradient Norm Difference between Model Layers for
Scalable Gradient Sparsification", ICPP 2023.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .base import Broadcast, Bucket, Capabilities, Exchange, State, wide
from .registry import register
from .scalars import count_step, step_of, steps
from .select import largest
from .sparse import UnionSparsifier, average_all, average_union, union_costs_more

COMMON = -1
"""In place of a bin: all elements of the fragment are sent, so nobody has to choose."""


@register("deft")
@dataclass(frozen=True)
class DEFT(UnionSparsifier):
    """About ``int(density * n)`` elements of a bucket, more of them where gradients are large.

    Tensors, and pieces of large tensors, are the fragments. Each step the leader, rank
    ``t mod size``, says which rank chooses in which fragment, so that all have equal work; how
    many elements to choose in a fragment follows from the norms of the rank that does it.

    State: slot ``step``, per parameter the number of steps taken.

    Args:
        density: fraction of elements kept, in (0, 1]; at least one element of each fragment.
        error_feedback: whether what was not sent is carried to the next step.
    """

    density: float = 0.01
    error_feedback: bool = True

    capabilities: ClassVar[Capabilities] = Capabilities(
        biased=True, stateful=True, linear=False, rounds=3, min_ndim=2
    )

    def init(self, bucket: Bucket) -> State:
        return {"step": steps(bucket)}

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        flat, size, step = bucket.flat, bucket.size, step_of(state)
        sizes = fragment_sizes((entry.numel for entry in bucket.entries), size)
        target = self.num_kept(flat.numel())
        if union_costs_more(flat.numel(), max(target, len(sizes)), flat.element_size()):
            return (yield from average_all(bucket))

        counts = allot(sizes, norms(flat, sizes), target)
        leader, bins = step % size, [COMMON] * len(sizes)
        if bucket.rank == leader:
            bins = assign_bins(sizes, counts, size)
        (dealt,) = yield Broadcast((torch.tensor(bins, dtype=torch.int32),), root=leader)
        bins, own = dealt.tolist(), (step + bucket.rank) % size

        pieces = list(zip(bins, _starts(sizes), flat.split(sizes), counts, strict=True))
        chosen = [start + largest(piece, k) for at, start, piece, k in pieces if at == own]
        common = [_whole(start, piece) for at, start, piece, _ in pieces if at == COMMON]
        outcome = yield from average_union(
            bucket, _joined(chosen, flat), disjoint=True, common=_joined(common, flat)
        )
        return replace(outcome, commit=lambda skip: count_step(state, skip))


def fragment_sizes(tensors: Iterable[int], size: int) -> list[int]:
    """Sizes of the fragments of tensors of these many elements, in order; none is empty.

    A tensor with more than a ``size``-th of all elements is cut into ``size`` nearly equal
    fragments, the first ones the larger.
    """
    tensors = list(tensors)
    total, sizes = sum(tensors), list[int]()
    for numel in tensors:
        if numel * size > total:
            small, more = divmod(numel, size)
            sizes += [small + 1] * more + [small] * (size - more)
        else:
            sizes.append(numel)
    return [numel for numel in sizes if numel]


def norms(flat: Tensor, sizes: Sequence[int]) -> list[float]:
    """The l2 norms of consecutive fragments of ``flat``, up to a common factor.

    Fragments of zeros only weigh as much as they are long.
    """
    found = _norms(flat, sizes)
    numbers = torch.finfo(wide(flat.dtype))
    if not 1e4 * math.sqrt(numbers.tiny) < sum(found) < math.inf:  # squares leave the range
        peak = float(flat.abs().max())
        found = _norms(flat / peak, sizes) if peak else [float(numel) for numel in sizes]
    return found


def _norms(flat: Tensor, sizes: Sequence[int]) -> list[float]:
    found: list[float] = torch.stack(torch._foreach_norm(flat.split(list(sizes)))).tolist()
    return found


def allot(sizes: Sequence[int], norms: Sequence[float], k: int) -> list[int]:
    """How many of ``k`` elements each fragment gets: in proportion to its norm, at least one.

    The fragments come in order of decreasing norm, and what one cannot take is left to those
    after it.
    """
    order = sorted(range(len(sizes)), key=lambda i: -norms[i])
    weights = list(itertools.accumulate(norms[i] for i in reversed(order)))[::-1]  # of the rest
    counts = [0] * len(sizes)
    for i, weight in zip(order, weights, strict=True):
        share = math.floor(k * (norms[i] / weight)) if weight else 0
        counts[i] = min(max(share, 1), sizes[i])
        k -= counts[i]
    return counts


def assign_bins(sizes: Sequence[int], counts: Sequence[int], size: int) -> list[int]:
    """The bin, below ``size``, of each fragment; `COMMON` for those that are sent as a whole.

    Fragments come in order of decreasing cost, each into the bin with the least cost so far.
    """
    costs = [n * math.log2(k) if k > 1 else float(n) for n, k in zip(sizes, counts, strict=True)]
    loads = [(0.0, one) for one in range(size)]  # a heap
    bins = [COMMON] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -costs[i]):
        if counts[i] < sizes[i]:
            load, bins[i] = loads[0]
            heapq.heapreplace(loads, (load + costs[i], bins[i]))
    return bins


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)][:-1]


def _whole(start: int, piece: Tensor) -> Tensor:
    return torch.arange(start, start + piece.numel(), device=piece.device)


def _joined(indices: Sequence[Tensor], flat: Tensor) -> Tensor:
    return torch.cat([flat.new_empty(0, dtype=torch.int64), *indices])
