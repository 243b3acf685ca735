"""Threshold sparsification: each rank sends the elements above a fixed magnitude.

References: N. Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing",
Interspeech 2015, which sends one step of the threshold where this sends the value itself; for
the comparison with top-k and the threshold's default, D. Yoon, M. Jeong and S. Oh, "SAGE: toward
on-the-fly gradient compression ratio scaling", The Journal of Supercomputing, 2023.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .base import Bucket, Capabilities, Exchange, State
from .registry import register
from .select import above_at_most
from .sparse import PairSparsifier, average_all, gather_pairs


@register("threshold")
@dataclass(frozen=True)
class Threshold(PairSparsifier):
    """The elements of a bucket of at least a fixed magnitude, however many, up to a cap.

    With error feedback, what is small adds up until it is above. Nothing is sent where nothing is
    above. A threshold far too low is met by the cap: then the largest elements are sent.

    Args:
        density: fraction of elements expected to be sent, in (0, 1]. It sets the default
            threshold and the cap, and says where a plain mean is cheaper.
        error_feedback: whether what was not sent is carried to the next step.
        value: the threshold, in units of the unscaled gradient; 0 stands for 1 / (2 sqrt(k))
            with k the number of elements expected.
        headroom: at most this many times the elements expected are sent, at least 1.
    """

    density: float = 0.01
    error_feedback: bool = True
    value: float = 0.0
    headroom: float = 10.0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            biased=True, stateful=False, linear=False, rounds=1, min_ndim=2, gathers_values=True
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.value < math.inf:
            raise ValueError(
                f"threshold: value must be positive, or 0 for the default, got {self.value!r}"
            )
        if not 1.0 <= self.headroom < math.inf:
            raise ValueError(
                f"threshold: headroom must be a number from 1 up, got {self.headroom!r}"
            )

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        flat = bucket.flat
        if self.dense_is_cheaper(flat.numel(), flat.element_size(), size=bucket.size):
            return (yield from average_all(bucket))
        kept = self.num_kept(flat.numel())
        threshold = self.value or 0.5 / math.sqrt(kept)
        indices = above_at_most(flat, threshold, int(self.headroom * kept))
        return (yield from gather_pairs(bucket, indices, equal_counts=False))
