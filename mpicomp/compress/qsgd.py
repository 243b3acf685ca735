"""QSGD: blocks of elements as a norm and few-bit multiples of it, rounded at random.

Reference: D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding", NeurIPS 2017, section 3.1 (the quantiser) and section 4 (blocks, norms); codes have a
fixed width here, where the paper uses Elias codes.
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
from .stochastic import Stochastic, nonzero, peak, round_randomly_
from .tiles import Tiles, block_tiles, columns, views


@register("qsgd")
@dataclass(frozen=True)
class QSGD(Stochastic):
    """Q(x) = norm(x) * sign(x) * l / s for each block, with l a random whole number in [0, s].

    s = 2**(bits - 1) - 1, and l rounds ``s |x| / norm(x)`` so that Q(x) is x on average.

    Args:
        bits: width of a code with its sign: 2, 4 or 8.
        block: elements that share a norm.
        norm: ``"l2"``, for which the paper's bounds hold, or ``"max"``, the largest magnitude:
            finer steps and less variance.
        seed: of the random rounding.
    """

    bits: int = 4
    block: int = 512
    norm: str = "l2"
    seed: int = 0

    capabilities: ClassVar[Capabilities] = Capabilities(
        biased=False, stateful=True, linear=False, rounds=1, min_ndim=2
    )

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or self.bits not in (2, 4, 8):
            raise ValueError(f"qsgd: bits must be 2, 4 or 8, got {self.bits!r}")
        if not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"qsgd: block must be an integer from 1 up, got {self.block!r}")
        if self.norm not in ("l2", "max"):
            raise ValueError(f"qsgd: norm must be 'l2' or 'max', got {self.norm!r}")

    @property
    def levels(self) -> int:
        """The largest code s; the smallest is -s."""
        return (1 << self.bits - 1) - 1

    def dense_is_cheaper(self, numel: int, element_bytes: int, *, size: int) -> bool:
        own = numel * self.bits / 8 + -(-numel // self.block) * max(element_bytes, 4)
        return max(size, 2) * own >= 2 * numel * element_bytes

    def quantise(self, bucket: Bucket, state: State) -> Exchange:
        flat = bucket.flat
        tiles = block_tiles(flat.numel(), self.block)
        parts = yield Gather(self._encode(flat, tiles, self.own_generator(bucket, state)))
        mean = torch.zeros_like(flat, dtype=wide(flat.dtype))
        for part in parts:  # in rank order, for equal bits
            self._add_to(mean, part, tiles)
        own = parts[bucket.rank]
        return Exchanged(
            mean=Dense(mean.div_(len(parts)).to(flat.dtype)),
            sent=Coded(lambda: self._add_to(torch.zeros_like(mean), own, tiles)),
            commit=lambda skip: count_step(state, skip),
        )

    def _encode(self, flat: Tensor, tiles: Tiles, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Packed codes from 0 to 2 s, and for each block what a step of one is worth."""
        values = flat.to(wide(flat.dtype), copy=True)
        steps = []
        for rows in views(values, tiles):  # (blocks, block)
            peaks = peak(rows, 1)
            rows.div_(nonzero(peaks).unsqueeze(1))  # at most 1: squares do not overflow
            norms = torch.ones_like(peaks)
            if self.norm == "l2":
                norms = torch.linalg.vector_norm(rows, dim=1).clamp_(min=1.0)
            rows.mul_((self.levels / norms).unsqueeze(1))
            steps.append(peaks * (norms / self.levels))
        codes = round_randomly_(values, random).add_(self.levels).to(torch.uint8)
        return pack(codes, self.bits), torch.cat(steps)

    def _add_to(self, total: Tensor, part: tuple[Tensor, Tensor], tiles: Tiles) -> Tensor:
        """Add to ``total`` (d,) what the codes and steps of one rank stand for."""
        codes, steps = part
        levels = unpack(codes, self.bits, total.numel()) - self.levels  # wraps around
        signed = views(levels.view(torch.int8), tiles)
        for rows, own, step in zip(views(total, tiles), signed, columns(steps, tiles), strict=True):
            rows.addcmul_(own, step)
        return total
