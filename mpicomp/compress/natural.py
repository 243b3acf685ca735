"""Natural compression: every element rounded to a power of two at random, sign and exponent sent.

Reference: S. Horvath et al., "Natural Compression for Distributed Deep Learning", 2019 (MSML
2022), section 2: the operator, and its variance of at most 1/8 of the squared norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Bucket, Capabilities, Coded, Dense, Exchange, Exchanged, Gather, State, wide
from .bits import pack, unpack
from .registry import register
from .scalars import count_step
from .stochastic import Stochastic, random_bits

MANTISSA_BITS = 23
MANTISSA = 2**MANTISSA_BITS - 1
INFINITY = 255 << MANTISSA_BITS


@register("natural")
@dataclass(frozen=True)
class Natural(Stochastic):
    """The power of two above or below, so that the mean is the value: 9 bits for an element.

    Exponents are those of fp32; fp64 gradients are rounded to fp32 first. A value of 2**127 or
    more may become infinite.

    Args:
        seed: of the random rounding.
    """

    seed: int = 0

    capabilities: ClassVar[Capabilities] = Capabilities(
        biased=False, stateful=True, linear=False, rounds=1, min_ndim=2
    )

    def dense_is_cheaper(self, numel: int, element_bytes: int, *, size: int) -> bool:
        return numel == 0 or max(size, 2) * 9 >= 2 * 8 * element_bytes

    def quantise(self, bucket: Bucket, state: State) -> Exchange:
        flat = bucket.flat
        exponents, signs = encode(flat, self.own_generator(bucket, state))
        parts = yield Gather((exponents, signs))
        mean = torch.zeros_like(flat, dtype=wide(flat.dtype))
        for part in parts:  # in rank order, for equal bits
            mean.add_(decode(*part))
        own = parts[bucket.rank]
        return Exchanged(
            mean=Dense(mean.div_(len(parts)).to(flat.dtype)),
            sent=Coded(lambda: decode(*own)),
            commit=lambda skip: count_step(state, skip),
        )


def encode(values: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Biased exponents (d,) and packed signs, both uint8; 0 and 255 stand for zero and infinity.

    A random number is added to the mantissa, and the carry rounds up: with a chance in proportion
    to the mantissa, as it has to be. The same holds below 2**-126, where the way down is to zero.
    """
    words = values.to(torch.float32).view(torch.int32)
    signs = pack((words < 0).to(torch.uint8), 1)
    words = words.bitwise_and(0x7FFFFFFF).clamp_(max=INFINITY)  # NaN too, lest it carries
    words.add_(random_bits(len(words), torch.int32, random).bitwise_and_(MANTISSA))
    return words.bitwise_right_shift_(MANTISSA_BITS).to(torch.uint8), signs


def decode(exponents: Tensor, signs: Tensor) -> Tensor:
    """Powers of two (d,) fp32, or zero."""
    words = unpack(signs, 1, len(exponents)).to(torch.int32)
    words.bitwise_left_shift_(8).bitwise_or_(exponents)
    return words.bitwise_left_shift_(MANTISSA_BITS).view(torch.float32)
