"""Scaled signs with error feedback.

Reference: S. P. Karimireddy, Q. Rebjock, S. U. Stich and M. Jaggi, "Error Feedback Fixes SignSGD
and other Gradient Compression Schemes", ICML 2019, algorithm 1, with the learning rate outside the
memory. How the ranks' signs are averaged: `two_sided`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Bucket, Capabilities, Compressor, Exchange, State
from .codecs import Signs, check_per, rows_of, signs_help
from .registry import register
from .two_sided import average_codes


@register("efsign")
@dataclass(frozen=True)
class EFSign(Compressor):
    """(|p|_1 / d) sign(p) for the d elements p of each parameter; a zero counts as positive.

    Args:
        error_feedback: whether what was not sent is carried to the next step.
        per: what has a scale of its own, a whole ``parameter`` or each ``row`` of its matrix.
    """

    error_feedback: bool = True
    per: str = "parameter"

    capabilities: ClassVar[Capabilities] = Capabilities(
        biased=True, stateful=False, linear=False, rounds=2, min_ndim=2, chunks=True
    )

    def __post_init__(self) -> None:
        check_per("efsign", self.per)

    def helps(self, shape: tuple[int, ...]) -> bool:
        return super().helps(shape) and signs_help(shape, self.per, scale_bytes=4)

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        return (yield from average_codes(bucket, rows_of(bucket, self.per), align=8, codec=Signs()))
