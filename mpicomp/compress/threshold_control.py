"""What MiCRO and ExDyna share: each rank sends what passes a threshold in its own partition.

The partitions move on by one rank each step. All ranks hold the same threshold, and correct it by
how many elements passed it. References: see `micro` and `exdyna`, whose rule is `corrected`. What
is done far from the target is our own: the counts travel ahead, so that the ranks can send less or
more in the same step, and `caught_up` corrects the threshold.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .base import Bucket, Capabilities, Exchange, Gather, State
from .scalars import count_step, scalar, scalars, set_scalar, step_of, steps
from .select import above, largest
from .sparse import Sparsifier, average_all, average_union, union_costs_more

UNKNOWN = 0.0
"""A threshold that has to be measured, by an exact selection."""

BAND = (0.9, 1.1)
"""Ratios of passed to wanted elements at which all that passed is sent, and nothing else."""

WIDE_BAND = (0.8, 1.25)
"""Ratios of passed to wanted elements which `corrected` is left to deal with."""


@dataclass(frozen=True)
class ThresholdSparsifier(Sparsifier):
    """About `target` elements of a bucket, and never more than twice as many.

    With ``adapt``, no more than a tenth above or below, as far as there are non-zero elements.

    State, equal on all ranks: slot ``threshold``, and slot ``step``, the number of steps taken.

    Args:
        density: fraction of elements that all ranks together keep, in (0, 1].
        error_feedback: whether what was not sent is carried to the next step.
        adapt: where the number that passed is over 10 % off, send as many as wanted all the same,
            and let the threshold catch up; otherwise it changes by 0.5 % a step at most.
        initial: ``quantile`` to measure the first threshold, ``paper`` for 1 / (2 sqrt(k)).
        symmetric: near the target, lower the threshold where too few passed; the paper raises it.
    """

    density: float = 0.01
    error_feedback: bool = True
    adapt: bool = True
    initial: str = "quantile"
    symmetric: bool = True

    capabilities: ClassVar[Capabilities] = Capabilities(
        biased=True, stateful=True, linear=False, rounds=3, min_ndim=2
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial not in ("quantile", "paper"):
            kind = type(self).__name__.lower()
            raise ValueError(f"{kind}: initial must be quantile or paper, got {self.initial!r}")

    def init(self, bucket: Bucket) -> State:
        target = max(self.target(bucket.flat.numel(), bucket.size), 1)
        start = UNKNOWN if self.initial == "quantile" else 1 / (2 * math.sqrt(target))
        return {"threshold": scalars(bucket, start), "step": steps(bucket)}

    @abc.abstractmethod
    def bounds(self, bucket: Bucket, state: State) -> list[int]:
        """Where the partitions begin, and last where they end: (size + 1,), ascending."""

    def rearrange(
        self, bucket: Bucket, state: State, counts: Sequence[int], skip: frozenset[str]
    ) -> None:
        """Learn from how many elements passed in each partition; nothing unless overridden."""

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        flat, size = bucket.flat, bucket.size
        target = self.target(flat.numel(), size)
        if self.dense_is_cheaper(flat.numel(), flat.element_size(), size=size):
            return (yield from average_all(bucket))

        step, threshold = step_of(state), scalar(state, "threshold")
        bounds, own = self.bounds(bucket, state), (step + bucket.rank) % size
        part = flat[bounds[own] : bounds[own + 1]]
        if threshold == UNKNOWN:
            chosen, level = best(part, (target + bucket.rank) // size)
        else:
            chosen, level = passing(part, threshold)
        rows = yield Gather((torch.stack([level.new_tensor(chosen.numel()), level]),))
        counts, levels = torch.stack([row for (row,) in rows]).T.tolist()  # (size,) each

        allowed = self._allowed([int(count) for count in counts], target)[bucket.rank]
        if allowed < chosen.numel():
            chosen = chosen[largest(part[chosen], allowed)]
        elif allowed > chosen.numel():
            chosen, _ = best(part, allowed)
        if not chosen.numel():
            chosen = dummy(part, step)
        outcome = yield from average_union(bucket, bounds[own] + chosen, disjoint=True)

        def commit(skip: frozenset[str]) -> None:
            in_order = [int(counts[(i - step) % size]) for i in range(size)]
            self.rearrange(bucket, state, in_order, skip)
            updated = self._updated(threshold, sum(in_order), levels, target)
            set_scalar(state, "threshold", updated, skip)
            count_step(state, skip)

        return replace(outcome, commit=commit)

    def _allowed(self, counts: Sequence[int], target: int) -> list[int]:
        """How many elements each rank is to send, where ``counts`` passed."""
        ratio = sum(counts) / target
        if self.adapt and ratio < BAND[0]:
            return topped_up(counts, target)
        return limited(counts, target if self.adapt and ratio > BAND[1] else 2 * target)

    def _updated(self, threshold: float, count: int, levels: list[float], target: int) -> float:
        """The next threshold, from the ``count`` of what passed and the ``levels`` of all ranks."""
        if threshold == UNKNOWN:
            return middle(levels)
        ratio = count / target
        updated = corrected(threshold, ratio, symmetric=self.symmetric)
        if not self.adapt or WIDE_BAND[0] <= ratio <= WIDE_BAND[1]:
            return updated
        if count == 0:
            return UNKNOWN
        caught = caught_up(threshold, ratio, excess=sum(levels) / count)
        return max(caught, updated) if ratio > 1 else min(caught, updated)

    def target(self, numel: int, size: int) -> int:
        """How many elements all ranks together shall send: at least one each, if there are any."""
        return max(self.num_kept(numel), min(size, numel))

    def dense_is_cheaper(self, numel: int, element_bytes: int, *, size: int) -> bool:
        return union_costs_more(numel, self.target(numel, size), element_bytes)


# ----------------------------------------------------------------------------------- selection


def even_bounds(numel: int, size: int) -> list[int]:
    """Bounds (size + 1,) of nearly equal partitions, the first ones the larger."""
    small, more = divmod(numel, size)
    return [small * i + min(i, more) for i in range(size + 1)]


def best(part: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Indices of the ``k`` largest elements, without zeros, and the least of their magnitudes."""
    chosen = largest(part, min(k, part.numel()))
    chosen = chosen[part[chosen] != 0]
    if not chosen.numel():
        return chosen, torch.zeros((), dtype=torch.float64, device=part.device)
    return chosen, part[chosen].abs().min().double()


def passing(part: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Indices of all elements from ``threshold`` up, and by how much they exceed it together."""
    chosen = above(part, threshold)
    return chosen, (part[chosen].abs().double() - threshold).sum()


def limited(counts: Sequence[int], limit: int) -> list[int]:
    """``counts``, scaled down where they add up to more than ``limit``, at least one a rank.

    Each keeps at least one, so that with one dummy for each 0 the limit still holds.
    """
    total = sum(counts)
    if total <= limit - counts.count(0):
        return list(counts)
    return [min(n, 1 + n * (limit - len(counts)) // total) for n in counts]


def topped_up(counts: Sequence[int], target: int) -> list[int]:
    """``counts``, with what is missing to ``target`` spread evenly."""
    missing = target - sum(counts)
    return [n + (missing + rank) // len(counts) for rank, n in enumerate(counts)]


def dummy(part: Tensor, step: int) -> Tensor:
    """One index (1,) of ``part`` where nothing was chosen, another one each step."""
    places = [step % part.numel()] if part.numel() else []
    return torch.tensor(places, dtype=torch.int64, device=part.device)


# ------------------------------------------------------------------------------------- control


def corrected(threshold: float, ratio: float, *, symmetric: bool) -> float:
    """The papers' rule: a small step against the ``ratio`` of passed to wanted elements.

    Args:
        symmetric: within the band lower the threshold where too few passed, where the papers
            raise it whatever the ratio.
    """
    if ratio > 1.1:
        return threshold * 1.005
    if ratio > 0.909:
        return threshold * (1.00125 if ratio >= 1 or not symmetric else 0.99875)
    return threshold * 0.995


def caught_up(threshold: float, ratio: float, *, excess: float) -> float:
    """The threshold that brings ``ratio`` to 1 where magnitudes have an exponential tail.

    Args:
        excess: by how much the elements that passed exceed the threshold, on average; it is the
            scale of the tail. A step is no longer than a factor of 8.
    """
    factor = 1 + excess / threshold * math.log(ratio)
    return threshold * min(max(factor, 1 / 8), 8.0)


def middle(levels: Sequence[float]) -> float:
    """The lower median of the positive ``levels``, `UNKNOWN` if there are none."""
    known = sorted(level for level in levels if level > 0)
    return known[(len(known) - 1) // 2] if known else UNKNOWN
