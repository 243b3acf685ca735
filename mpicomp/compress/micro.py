"""MiCRO: equal partitions, one for each rank, and one threshold that follows the density.

Reference: D. Yoon and S. Oh, "MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and
Accelerating Distributed DNN Training", HiPC 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

from .base import Bucket, State
from .registry import register
from .threshold_control import ThresholdSparsifier, even_bounds


@register("micro")
@dataclass(frozen=True)
class MiCRO(ThresholdSparsifier):
    """Of each of ``size`` nearly equal partitions what passes a threshold on one rank.

    In step t rank r chooses in partition ``(t + r) mod size``, so no element is chosen twice.

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

    def bounds(self, bucket: Bucket, state: State) -> list[int]:
        return even_bounds(bucket.flat.numel(), bucket.size)
