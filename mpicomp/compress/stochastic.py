"""What unbiased quantisers share: rounding at random, and when a plain mean is cheaper."""

from __future__ import annotations

import abc
import math

import torch
from torch import Tensor

from .base import Bucket, Compressor, Exchange, State
from .draws import own_generator
from .scalars import step_of, steps
from .sparse import average_all


class Stochastic(Compressor):
    """A quantiser whose every step draws random numbers of its own, from its field ``seed``.

    State: slot ``step``, the number of steps taken. Where quantising would move no fewer bytes
    than a plain mean, the plain mean is taken.
    """

    seed: int

    def helps(self, shape: tuple[int, ...]) -> bool:
        return super().helps(shape) and not self.dense_is_cheaper(math.prod(shape), 4, size=1)

    def init(self, bucket: Bucket) -> State:
        return {"step": steps(bucket)}

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        flat = bucket.flat
        if self.dense_is_cheaper(flat.numel(), flat.element_size(), size=bucket.size):
            return (yield from average_all(bucket))
        return (yield from self.quantise(bucket, state))

    @abc.abstractmethod
    def quantise(self, bucket: Bucket, state: State) -> Exchange:
        """The exchange of a bucket for which it pays; there is at least one element."""

    @abc.abstractmethod
    def dense_is_cheaper(self, numel: int, element_bytes: int, *, size: int) -> bool:
        """Whether a plain mean over ``size`` ranks would move no more bytes than this method."""

    def own_generator(self, bucket: Bucket, state: State) -> torch.Generator:
        """Random numbers of this step and rank, on the device of the bucket."""
        return own_generator(bucket, type(self).__name__, self.seed, step_of(state))


# ------------------------------------------------------------------------------------- rounding


def round_randomly_(values: Tensor, random: torch.Generator) -> Tensor:
    """Round each of ``values``, of magnitude up to 127, up or down at random, in place.

    The chances make the mean the value itself, to within 2**-16; whole numbers stay as they are.
    One draw of 64 bits rounds four numbers: drawing is what takes longest.
    """
    noise = random_bits(values.numel(), torch.int16, random).view_as(values)
    noise.bitwise_or_(1)  # odd: never a half, and as often above zero as below
    return values.add_(noise, alpha=2.0**-16).round_()


def random_bits(numel: int, dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """Integers (numel,) of type ``dtype`` whose bits are all random."""
    per = torch.int64.itemsize // dtype.itemsize
    words = torch.empty(-(-numel // per), dtype=torch.int64, device=random.device)
    return words.random_(-(2**63), None, generator=random).view(dtype)[:numel]


# --------------------------------------------------------------------------------------- scales


def peak(values: Tensor, dim: int) -> Tensor:
    """The largest magnitude along ``dim``; NaN where there is one."""
    return torch.maximum(values.amax(dim), -values.amin(dim))


def nonzero(scales: Tensor) -> Tensor:
    """``scales`` with 1 in place of 0, to divide zeros by."""
    return scales.masked_fill(scales == 0, 1.0)


def comparable(scales: Tensor) -> Tensor:
    """``scales`` with infinity in place of NaN, which a maximum over ranks might lose."""
    return scales.nan_to_num(nan=math.inf, posinf=math.inf)


def sum_dtype(largest: int) -> torch.dtype:
    """The narrowest integer type for sums of magnitude up to ``largest``."""
    types = (torch.int8, torch.int16, torch.int32)
    return next((t for t in types if largest <= torch.iinfo(t).max), torch.int64)
