"""Gradients as integers of 8 or 4 bits, with a scale for every block of elements.

References: T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022 (blocks);
D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
NeurIPS 2017 (rounding at random). How they are averaged: `two_sided`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

from .base import Bucket, Capabilities, Compressor, Exchange, State
from .codecs import Grid
from .draws import own_generator
from .registry import register
from .scalars import count_step, step_of, steps
from .tiles import block_tiles, num_rows
from .two_sided import average_codes


@dataclass(frozen=True)
class Integers(Compressor):
    """What `Int8` and `Int4` share.

    State, with ``stochastic``: slot ``step``, per parameter the number of steps taken.
    """

    block: int = 256
    stochastic: bool = False
    error_feedback: bool = True
    seed: int = 0

    bits: ClassVar[int]

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or self.block < 1:
            raise ValueError(
                f"{self._name}: block must be an integer from 1 up, got {self.block!r}"
            )

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            biased=not self.stochastic,
            stateful=self.stochastic,
            linear=False,
            rounds=2,
            min_ndim=2,
            chunks=True,
        )

    def helps(self, shape: tuple[int, ...]) -> bool:
        numel = math.prod(shape)
        scale_bytes = 4 * num_rows(block_tiles(numel, self.block))
        return super().helps(shape) and numel * self.bits / 8 + scale_bytes < 4 * numel

    def init(self, bucket: Bucket) -> State:
        return {"step": steps(bucket)} if self.stochastic else {}

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        generator = None
        if self.stochastic:
            generator = own_generator(bucket, self._name, self.seed, step_of(state))
        outcome = yield from average_codes(
            bucket,
            block_tiles(bucket.flat.numel(), self.block),
            align=math.lcm(self.block, 8),
            codec=Grid(self.bits, generator),
        )
        if not self.stochastic:
            return outcome
        return dataclasses.replace(outcome, commit=lambda skip: count_step(state, skip))

    @property
    def _name(self) -> str:
        return type(self).__name__.lower()


@register("int8")
@dataclass(frozen=True)
class Int8(Integers):
    """Integers from -127 to 127 times a scale for each block, there and back.

    Args:
        block: elements that share a scale, at least 1.
        stochastic: round up or down at random, so that the mean is unbiased; no error feedback.
        error_feedback: whether what rounding has changed is carried to the next step.
        seed: of the rounding at random.
    """

    bits: ClassVar[int] = 8


@register("int4")
@dataclass(frozen=True)
class Int4(Integers):
    """Integers from -7 to 7 times a scale for each block, there and back.

    Args:
        block: elements that share a scale, at least 1.
        stochastic: round up or down at random, so that the mean is unbiased; no error feedback.
        error_feedback: whether what rounding has changed is carried to the next step.
        seed: of the rounding at random.
    """

    bits: ClassVar[int] = 4
