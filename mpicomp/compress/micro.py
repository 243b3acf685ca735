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

    The options are those of `ThresholdSparsifier`.
    """

    def bounds(self, bucket: Bucket, state: State) -> list[int]:
        return even_bounds(bucket.flat.numel(), bucket.size)
