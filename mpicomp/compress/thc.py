"""THC: gradients are rotated, then quantised on one grid for all ranks, so that codes add up.

Reference: M. Li et al., "THC: Accelerating Distributed Deep Learning Using Tensor Homomorphic
Compression", NSDI 2024. From the paper: the randomised Hadamard transform, the range agreed in a
round of its own, stochastic quantisation, and sums of codes. Other than there, the range is the
largest coefficient, so nothing is cut off and the mean is unbiased without error feedback; and the
levels are evenly spaced, so that codes need no table to be added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from .base import Bucket, Capabilities, Coded, Dense, Exchange, Exchanged, Max, State, Sum, wide
from .draws import agreed_seed, generator, no_seed
from .hadamard import hadamard
from .registry import register
from .scalars import count_step, set_scalar, step_of
from .stochastic import Stochastic, comparable, nonzero, peak, round_randomly_, sum_dtype
from .tiles import Tiles, columns, merged, num_rows, views

BLOCKS = tuple(2**power for power in range(1, 17))


@register("thc")
@dataclass(frozen=True)
class THC(Stochastic):
    """Sums of integer codes of the rotated gradient, in the narrowest type that holds them.

    State: slots ``step`` and ``seed``, rank 0's seed.

    Args:
        bits: width of a code, 2 to 8: it counts from -s to s with s = 2**(bits - 1) - 1. Sums over
            n ranks take one byte for an element while n s <= 127, else two.
        block: elements that are rotated together and share a range: a power of two, 2 to 65536.
        seed: of the random signs and the random rounding; rank 0's counts for the signs.
    """

    bits: int = 4
    block: int = 1024
    seed: int = 0

    capabilities: ClassVar[Capabilities] = Capabilities(
        biased=False, stateful=True, linear=True, rounds=2, min_ndim=2
    )

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise ValueError(f"thc: bits must be an integer from 2 to 8, got {self.bits!r}")
        if not isinstance(self.block, int) or self.block not in BLOCKS:
            raise ValueError(f"thc: block must be a power of two, 2 to 65536, got {self.block!r}")

    @property
    def levels(self) -> int:
        """The largest code s; the smallest is -s."""
        return (1 << self.bits - 1) - 1

    def dense_is_cheaper(self, numel: int, element_bytes: int, *, size: int) -> bool:
        tiles = _tiles(numel, self.block)
        codes = _padded(tiles) * sum_dtype(size * self.levels).itemsize
        return codes + num_rows(tiles) * max(element_bytes, 4) >= numel * element_bytes

    def init(self, bucket: Bucket) -> State:
        return {**super().init(bucket), "seed": no_seed(bucket)}

    def quantise(self, bucket: Bucket, state: State) -> Exchange:
        numel = bucket.flat.numel()
        tiles = _tiles(numel, self.block)
        seed = yield from agreed_seed(self.seed, state)
        signs = self._signs(seed, step_of(state), bucket)
        rotated = _rotate(bucket.flat, signs, tiles)
        (ranges,) = yield Max((comparable(torch.cat([peak(rows, 1) for rows in rotated])),))
        own = self._encode(rotated, columns(nonzero(ranges), tiles), bucket, state)
        (sums,) = yield Sum((own.to(sum_dtype(bucket.size * self.levels), copy=True),))

        def decode(codes: Tensor, size: int) -> Tensor:
            steps = ranges / (self.levels * size)
            return _rotate_back(codes, steps, signs, tiles)[:numel]

        def commit(skip: frozenset[str]) -> None:
            set_scalar(state, "seed", seed, skip)
            count_step(state, skip)

        return Exchanged(
            mean=Dense(decode(sums, bucket.size).to(bucket.flat.dtype)),
            sent=Coded(lambda: decode(own, 1)),
            commit=commit,
        )

    def _encode(
        self, rotated: list[Tensor], tops: list[Tensor], bucket: Bucket, state: State
    ) -> Tensor:
        """Codes int8, 1-d, of coefficients whose largest in a row is to become s, or -s."""
        random = self.own_generator(bucket, state)
        codes = []
        for rows, top in zip(rotated, tops, strict=True):
            values = round_randomly_(rows.div_(top).mul_(self.levels), random)
            codes.append(values.to(torch.int8).view(-1))
        return torch.cat(codes)

    def _signs(self, seed: int, step: int, bucket: Bucket) -> Tensor:
        """Random signs (block,), the same for all blocks and on all ranks whatever their device."""
        random = generator("thc signs", seed, step, bucket.entries[0].name)
        signs = torch.randint(0, 2, (self.block,), generator=random).mul_(2).sub_(1)
        return signs.to(bucket.flat.device, wide(bucket.flat.dtype))


def _tiles(numel: int, block: int) -> Tiles:
    """Rows of ``block`` elements, and a last one of the next power of two."""
    whole, rest = divmod(numel, block)
    return merged([(whole, block), (1, 1 << (rest - 1).bit_length() if rest else 0)])


def _padded(tiles: Tiles) -> int:
    return sum(rows * width for rows, width in tiles)


def _rotate(flat: Tensor, signs: Tensor, tiles: Tiles) -> list[Tensor]:
    """Coefficients of each matrix of ``tiles``, the last row filled up with zeros before."""
    values = pad(flat.to(signs.dtype), (0, _padded(tiles) - len(flat)))
    return [hadamard(rows * signs[: rows.shape[1]]) for rows in views(values, tiles)]


def _rotate_back(codes: Tensor, steps: Tensor, signs: Tensor, tiles: Tiles) -> Tensor:
    """Values of ``codes``, given what a code of 1 stands for in each row; 1-d, with the filling."""
    values = codes.to(steps.dtype)
    for rows, step in zip(views(values, tiles), columns(steps, tiles), strict=True):
        torch.mul(hadamard(rows.mul_(step)), signs[: rows.shape[1]], out=rows)
    return values
