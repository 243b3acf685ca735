"""SIDCo: top-k by a threshold, from a distribution fitted to the gradient in several stages.

Reference: A. M. Abdelmoniem, A. Elzanaty, M.-S. Alouini and M. Canini, "An Efficient
Statistical-based Gradient Compression Technique for Distributed Training Systems", MLSys 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Bucket, Capabilities, Exchange, Exchanged, State
from .registry import register
from .scalars import count_step, scalar, scalars, set_scalar, step_of, steps
from .select import above_at_most, blocks, largest
from .sparse import PairSparsifier, SparseMean, average_all, gather_pairs

FIRST_RATIO = 0.25  # what the first of several stages leaves
ADAPT_EVERY = 5  # steps
TOLERANCE = 0.2  # of the number of elements aimed at
HEADROOM = 2  # at most this many times the number of elements aimed at


@register("sidco")
@dataclass(frozen=True)
class SIDCo(PairSparsifier):
    """About k, the ``int(density * n)`` largest of n elements, found without sorting.

    A distribution is fitted to the magnitudes, and its quantile is the threshold. One fit is poor
    far out in the tail, so a first threshold leaves a quarter of the elements, and each further
    stage fits the excess of what is left. It begins with one stage; where the ranks together
    sent over 20 % too many or too few in five steps, there is one more from then on.

    State, equal on all ranks: slot ``stages``, per parameter the number of stages; slot
    ``filled``, the elements sent, relative to k, summed since the last look at them; slot ``step``.

    Args:
        density: fraction of elements aimed at, in (0, 1].
        error_feedback: whether what was not sent is carried to the next step.
        fit: ``exponential``; ``pareto``, for heavier or lighter tails; or ``gamma``, which is
            gamma in the first stage and Pareto from then on.
        max_stages: the number of stages to stop at, from 1 up.
    """

    density: float = 0.01
    error_feedback: bool = True
    fit: str = "exponential"
    max_stages: int = 4

    capabilities: ClassVar[Capabilities] = Capabilities(
        biased=True, stateful=True, linear=False, rounds=1, min_ndim=2, gathers_values=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fit not in _FITS:
            raise ValueError(f"sidco: fit must be one of {', '.join(_FITS)}, got {self.fit!r}")
        if not isinstance(self.max_stages, int) or self.max_stages < 1:
            raise ValueError(
                f"sidco: max_stages must be an integer from 1 up, got {self.max_stages!r}"
            )

    def init(self, bucket: Bucket) -> State:
        return {
            "stages": scalars(bucket, 1.0),
            "filled": scalars(bucket, 0.0),
            "step": steps(bucket),
        }

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        flat = bucket.flat
        if self.dense_is_cheaper(flat.numel(), flat.element_size(), size=bucket.size):
            return (yield from average_all(bucket))
        k = self.num_kept(flat.numel())
        indices = choose(flat, k, stages=int(scalar(state, "stages")), fit=self.fit)
        outcome = yield from gather_pairs(bucket, indices, equal_counts=False)
        assert isinstance(outcome.mean, SparseMean)
        counts = [values.numel() for values, _ in outcome.mean.parts]
        filled = sum(counts) / (len(counts) * k)

        def commit(skip: frozenset[str]) -> None:
            self._adapt(state, filled, skip)

        return Exchanged(outcome.mean, outcome.sent, commit)

    def _adapt(self, state: State, filled: float, skip: frozenset[str]) -> None:
        """Every fifth step, one stage more if the counts were off: each brings them closer."""
        total = scalar(state, "filled") + filled
        if (step_of(state) + 1) % ADAPT_EVERY == 0:
            if abs(total / ADAPT_EVERY - 1.0) > TOLERANCE:
                stages = min(scalar(state, "stages") + 1.0, self.max_stages)
                set_scalar(state, "stages", stages, skip)
            total = 0.0
        set_scalar(state, "filled", total, skip)
        count_step(state, skip)


def choose(flat: Tensor, k: int, *, stages: int, fit: str) -> Tensor:
    """Indices of about the k largest elements of ``flat``, at most twice as many.

    What each stage has left is counted, and the ratio still to go starts from there, so that
    errors of the stages do not multiply. Zeros take no part in a fit.
    """
    first, later = _FITS[fit]
    excess = moments(flat, 0.0, logs=first is gamma_quantile)
    if excess.count == 0:
        return torch.empty(0, dtype=torch.int64, device=flat.device)
    to_go = min(k / excess.count, 1.0)
    threshold = first(excess, max(to_go, FIRST_RATIO) if stages > 1 else to_go)
    for left in range(stages - 1, 0, -1):
        excess = moments(flat, threshold, logs=False)
        if excess.count == 0:
            break
        threshold += later(excess, min(k / excess.count, 1.0) ** (1.0 / left))
    indices = above_at_most(flat, threshold, HEADROOM * k)
    if indices.numel() == 0:  # half of k, exactly: few enough to call for another stage
        return largest(flat, (k + 1) // 2)
    return indices


# ----------------------------------------------------------------------------------- statistics


@dataclass(frozen=True, slots=True)
class Moments:
    """How many numbers, their mean and variance, and the mean of their logarithms."""

    count: int
    mean: float
    variance: float
    mean_log: float = math.nan  # if it was wanted


def moments(flat: Tensor, offset: float, *, logs: bool) -> Moments:
    """Of ``|x| - offset`` over the elements of ``flat`` where it is positive, in fp64.

    One pass, without setting these elements aside: that would take longer than to read the others.

    Args:
        logs: whether the mean logarithm is wanted too, which costs as much as all the rest.
    """
    sums = []
    for _, block in blocks(flat):
        excess = block.abs().double().sub_(offset).clamp_min_(0.0)  # fresh memory
        parts = [excess.sum(), excess.dot(excess)]
        if logs:
            parts.append(torch.where(excess > 0.0, excess, 1.0).log_().sum())
        parts.append(excess.ne_(0.0).sum())  # a count as fast as a sum, in place
        sums.append(torch.stack(parts))
    total, squares, *total_log, count = torch.stack(sums).sum(0).tolist()
    if count == 0.0:
        return Moments(0, 0.0, 0.0)
    mean = total / count
    mean_log = total_log[0] / count if logs else math.nan
    return Moments(int(count), mean, squares / count - mean * mean, mean_log)


# All magnitudes alike, up to rounding: then their mean is every quantile.
_NARROW = 1e-9


def exponential_quantile(of: Moments, ratio: float) -> float:
    """What an exponential variable of that mean exceeds with probability ``ratio``."""
    return -of.mean * math.log(ratio)


def pareto_quantile(of: Moments, ratio: float) -> float:
    """The same for a generalised Pareto variable of that mean and variance."""
    squared = of.mean * of.mean
    if of.variance <= _NARROW * squared:
        return of.mean
    shape = 0.5 * (1.0 - squared / of.variance)
    scale = 0.5 * of.mean * (squared / of.variance + 1.0)
    if abs(shape) < 1e-9:  # the exponential distribution
        return -scale * math.log(ratio)
    return scale * math.expm1(-shape * math.log(ratio)) / shape


def gamma_quantile(of: Moments, ratio: float) -> float:
    """The same for a gamma variable of that mean and mean logarithm.

    The shape is the usual closed approximation of the likeliest one; the quantile is exact,
    by bisection.
    """
    spread = math.log(of.mean) - of.mean_log if of.mean else 0.0  # 0 for numbers all alike
    if spread <= _NARROW:
        return of.mean
    shape = (3.0 - spread + math.sqrt((spread - 3.0) ** 2 + 24.0 * spread)) / (12.0 * spread)

    def exceeded(x: float) -> float:
        pair = torch.tensor([shape, x], dtype=torch.float64)
        return float(torch.special.gammaincc(pair[0], pair[1]))

    low, high = 0.0, 1.0
    while exceeded(high) > ratio:
        low, high = high, 2.0 * high
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if exceeded(middle) > ratio else (low, middle)
    return of.mean / shape * high


Quantile = Callable[[Moments, float], float]

_FITS: dict[str, tuple[Quantile, Quantile]] = {  # of the first stage, and of those after it
    "exponential": (exponential_quantile, exponential_quantile),
    "gamma": (gamma_quantile, pareto_quantile),
    "pareto": (pareto_quantile, pareto_quantile),
}
