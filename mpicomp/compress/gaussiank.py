"""Gaussian-k sparsification: top-k by a threshold, the quantile of a normal distribution.

Reference: S. Shi, X. Chu, K. C. Cheung and S. See, "Understanding Top-k Sparsification in
Distributed Deep Learning", arXiv 1911.08772, 2019, the operator Gaussian_k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from .base import Bucket, Capabilities, Exchange, State
from .registry import register
from .select import above, blocks, largest
from .sparse import PairSparsifier, average_all, gather_pairs


@register("gaussiank")
@dataclass(frozen=True)
class GaussianK(PairSparsifier):
    """About k, the ``int(density * n)`` largest of n elements, found without sorting.

    The threshold begins at the quantile of a normal distribution with the mean and the variance
    of the bucket, and is corrected until it gives between 2/3 k and 4/3 k elements. More are never
    sent. Fewer are, where the last correction still leaves fewer, which happens with tails much
    heavier than the normal distribution's.

    Args:
        density: fraction of elements aimed at, in (0, 1].
        error_feedback: whether what was not sent is carried to the next step.
        corrections: how often the threshold may be changed, from 0 up.
    """

    density: float = 0.01
    error_feedback: bool = True
    corrections: int = 4

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            biased=True, stateful=False, linear=False, rounds=1, min_ndim=2, gathers_values=True
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.corrections, int) or self.corrections < 0:
            raise ValueError(
                f"gaussiank: corrections must be an integer from 0 up, got {self.corrections!r}"
            )

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        flat = bucket.flat
        if self.dense_is_cheaper(flat.numel(), flat.element_size(), size=bucket.size):
            return (yield from average_all(bucket))
        indices = self._choose(flat, self.num_kept(flat.numel()))
        return (yield from gather_pairs(bucket, indices, equal_counts=False))

    def _choose(self, flat: Tensor, k: int) -> Tensor:
        """Indices of about the k largest elements: a threshold between one too low and too high.

        Below the lowest threshold known to be too low nothing is looked at again.
        """
        mean, deviation = mean_and_deviation(flat)
        if mean == deviation == 0.0:
            return torch.empty(0, dtype=torch.int64, device=flat.device)
        threshold = normal_threshold(mean, deviation, k / flat.numel())
        low, high = 0.0, math.inf
        pool, values = None, flat  # the indices and values of all elements above `low`
        for _ in range(self.corrections + 1):
            chosen = above(values, threshold)
            if 3 * chosen.numel() < 2 * k:
                high = threshold
            else:
                indices = chosen if pool is None else pool[chosen]
                if 3 * chosen.numel() <= 4 * k:
                    return indices
                low, pool, values = threshold, indices, values[chosen]
            threshold = _between(threshold, low, high)
        if pool is not None:  # ties, or a jump too steep to hit: the largest of too many
            return pool[largest(values, k)]
        return chosen if chosen.numel() else largest(flat, k)


def mean_and_deviation(flat: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of all elements, in fp64: squares of fp32 may overflow."""
    sums = [
        torch.stack((wide.sum(), wide.dot(wide)))
        for _, block in blocks(flat)
        for wide in (block.double(),)
    ]
    total, squares = torch.stack(sums).sum(0).tolist()
    mean = total / flat.numel()
    return mean, math.sqrt(max(squares / flat.numel() - mean * mean, 0.0))


def normal_threshold(mean: float, deviation: float, ratio: float) -> float:
    """What a normal variable's magnitude exceeds with probability ``ratio``; exact for mean 0."""
    return abs(mean) + NormalDist().inv_cdf(1.0 - 0.5 * ratio) * deviation


def _between(threshold: float, low: float, high: float) -> float:
    """The next threshold to try, after one that became ``low`` or ``high``."""
    if high == math.inf:
        return 1.5 * threshold
    return 0.5 * (low + high)  # half of it, as long as none was too low
