"""1-bit SGD: signs, with one reconstruction value for each of the two.

Reference: F. Seide, H. Fu, J. Droppo, G. Li and D. Yu, "1-Bit Stochastic Gradient Descent and its
Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014, with the
threshold 0. How the ranks' codes are averaged: `two_sided`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Bucket, Capabilities, Compressor, Exchange, State, wide
from .codecs import Codec, check_per, rows_of, select, sign_bits, signs_help
from .registry import register
from .tiles import Tiles, views
from .two_sided import average_codes


@register("onebit")
@dataclass(frozen=True)
class OneBit(Compressor):
    """Elements from 0 up become the mean of those in their row, and so do the negative ones.

    Args:
        error_feedback: whether what was not sent is carried to the next step.
        per: what has means of its own, each ``row`` of a matrix or the whole ``parameter``.
    """

    error_feedback: bool = True
    per: str = "row"

    capabilities: ClassVar[Capabilities] = Capabilities(
        biased=True, stateful=False, linear=False, rounds=2, min_ndim=2, chunks=True
    )

    def __post_init__(self) -> None:
        check_per("onebit", self.per)

    def helps(self, shape: tuple[int, ...]) -> bool:
        return super().helps(shape) and signs_help(shape, self.per, scale_bytes=8)

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        tiles = rows_of(bucket, self.per)
        return (yield from average_codes(bucket, tiles, align=8, codec=TwoMeans()))


class TwoMeans(Codec):
    """One bit, set where an element is not negative, and for each row the mean of either kind."""

    bits = 1
    scales = 2

    def encode(self, tiles: Tiles, x: Tensor) -> tuple[Tensor, Tensor]:
        dtype = wide(x.dtype)
        means = [_two_means(matrix, dtype) for matrix in views(x, tiles)]
        return torch.cat([x.new_empty(0, 2, dtype=dtype), *means]), sign_bits(x)

    def decode(self, tiles: Tiles, scales: Tensor, codes: Tensor) -> Tensor:
        return select(codes, scales[:, 0], scales[:, 1], tiles)


def _two_means(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """For each row the mean of its elements from 0 up and of those below (rows, 2), 0 of none."""
    matrix = matrix.to(dtype)
    part = matrix.clamp(min=0)
    above = part.sum(1)
    below = torch.clamp(matrix, max=0, out=part).sum(1)
    num_above = torch.ge(matrix, 0, out=part).sum(1)
    num_below = torch.lt(matrix, 0, out=part).sum(1)
    return torch.stack([above / num_above.clamp(min=1), below / num_below.clamp(min=1)], dim=1)
