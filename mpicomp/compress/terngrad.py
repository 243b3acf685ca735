"""TernGrad: every element as -1, 0 or 1 times the largest of its parameter over all ranks.

Reference: W. Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
Learning", NeurIPS 2017, section 3: ternarizing (algorithm 1), scaler sharing, gradient clipping.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import (
    Bucket,
    Capabilities,
    Coded,
    Dense,
    Exchange,
    Exchanged,
    Gather,
    Max,
    State,
    Sum,
    wide,
)
from .bits import pack, unpack
from .registry import register
from .scalars import count_step
from .stochastic import Stochastic, comparable, nonzero, peak, round_randomly_, sum_dtype
from .tiles import Tiles, columns, merged, views

SUM_FROM = 8
"""From this many ranks up, an allreduce of bytes (2 d) is no more than a gather of 2 bits."""


@register("terngrad")
@dataclass(frozen=True)
class TernGrad(Stochastic):
    """s * sign(g) * b with b = 1 at random with chance |g| / s, else 0.

    s is the largest magnitude of a parameter's gradient on any rank. As it is shared, codes can be
    added up as integers: packed into 2 bits and gathered by few ranks, summed as bytes by many.

    Args:
        clip: magnitudes are cut down to this many root mean squares of the parameter's gradient
            first, 0 for never. It makes s and so the variance smaller, and the mean biased.
        seed: of the random rounding.
    """

    clip: float = 2.5
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip < math.inf:
            raise ValueError(f"terngrad: clip must be a number from 0 up, got {self.clip!r}")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            biased=self.clip > 0.0, stateful=True, linear=True, rounds=2, min_ndim=2
        )

    def dense_is_cheaper(self, numel: int, element_bytes: int, *, size: int) -> bool:
        return numel * sum_dtype(size).itemsize + 4 >= numel * element_bytes

    def quantise(self, bucket: Bucket, state: State) -> Exchange:
        tiles = merged((1, entry.numel) for entry in bucket.entries)
        values, units, limits = self._clipped(bucket.flat, tiles)
        (scales,) = yield Max((comparable(units * limits),))
        for rows, factor in _rows(values, units / nonzero(scales), tiles):
            rows.mul_(factor)
        codes = round_randomly_(values, self.own_generator(bucket, state)).to(torch.int8)
        if bucket.size < SUM_FROM:
            parts = yield Gather((pack((codes + 1).view(torch.uint8), 2),))
            every = torch.stack([unpack(packed, 2, len(codes)) for (packed,) in parts])
            every = (every - 1).view(torch.int8)
            codes, sums = every[bucket.rank], every.sum(0, dtype=torch.int8)
        else:
            (sums,) = yield Sum((codes.to(sum_dtype(bucket.size), copy=True),))
        return Exchanged(
            mean=Dense(_decode(sums, scales / bucket.size, tiles).to(bucket.flat.dtype)),
            sent=Coded(lambda: _decode(codes, scales, tiles)),
            commit=lambda skip: count_step(state, skip),
        )

    def _clipped(self, flat: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor, Tensor]:
        """Values (d,) in units of their parameter's peak, the peaks, and the limits in that unit.

        The root mean square stands in for the standard deviation: a gradient that is the same
        everywhere has none, and would be clipped to zero.
        """
        values = flat.to(wide(flat.dtype), copy=True)
        units = torch.cat([peak(rows, 1) for rows in views(values, tiles)])
        limits = []
        for rows, unit in _rows(values, nonzero(units), tiles):
            rows.div_(unit)  # at most 1: squares do not overflow
            limit = torch.ones_like(unit)
            if self.clip:
                norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
                limit = (norms * (self.clip / math.sqrt(rows.shape[1]))).clamp_(max=1.0)
                rows.clamp_(-limit, limit)
            limits.append(limit.squeeze(1))
        return values, units, torch.cat(limits)


def _rows(flat: Tensor, scales: Tensor, tiles: Tiles) -> Iterable[tuple[Tensor, Tensor]]:
    """Parameters of equal size as rows, and their scales as a column."""
    return zip(views(flat, tiles), columns(scales, tiles), strict=True)


def _decode(codes: Tensor, scales: Tensor, tiles: Tiles) -> Tensor:
    values = codes.to(scales.dtype)
    for rows, scale in _rows(values, scales, tiles):
        rows.mul_(scale)
    return values
