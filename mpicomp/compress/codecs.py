"""Codes of few bits, with scales for every row of a vector seen as tiles."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Bucket, wide
from .bits import pack, unpack
from .blocks import dequantize_tiles, quantize_tiles
from .tiles import Tiles, columns, merged, views


class Codec(abc.ABC):
    """How the elements of tiles become codes.

    A row with a NaN or an infinite element decodes to nothing finite, a row of zeros to zeros.

    Attributes:
        bits: of a code.
        scales: numbers that come with each row.
    """

    bits: int
    scales: int

    @abc.abstractmethod
    def encode(self, tiles: Tiles, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scales (rows, ``scales``), fp32 or wider, and packed codes, uint8 (bytes,)."""

    @abc.abstractmethod
    def decode(self, tiles: Tiles, scales: Tensor, codes: Tensor) -> Tensor:
        """What the elements of ``tiles`` have become (d,), as wide as ``scales``."""


@dataclass(frozen=True)
class Grid(Codec):
    """Multiples of a fraction of the largest magnitude in a row; see `blocks`.

    Args:
        bits: 2, 4 or 8.
        generator: for rounding at random; None rounds to the nearest.
    """

    bits: int
    generator: torch.Generator | None = None
    scales = 1

    def encode(self, tiles: Tiles, x: Tensor) -> tuple[Tensor, Tensor]:
        scales, codes = quantize_tiles(x, self.bits, tiles, self.generator)
        return scales.unsqueeze(1), codes

    def decode(self, tiles: Tiles, scales: Tensor, codes: Tensor) -> Tensor:
        return dequantize_tiles(scales.view(-1), codes, self.bits, tiles)


class Signs(Codec):
    """One bit, set where an element is not negative, and the mean magnitude of each row."""

    bits = 1
    scales = 1

    def encode(self, tiles: Tiles, x: Tensor) -> tuple[Tensor, Tensor]:
        dtype = wide(x.dtype)
        means = [matrix.abs().mean(1, keepdim=True, dtype=dtype) for matrix in views(x, tiles)]
        return torch.cat([x.new_empty(0, 1, dtype=dtype), *means]), sign_bits(x)

    def decode(self, tiles: Tiles, scales: Tensor, codes: Tensor) -> Tensor:
        return select(codes, scales[:, 0], 0.0 - scales[:, 0], tiles)


def sign_bits(x: Tensor) -> Tensor:
    """A packed bit for each element, set where it is not negative."""
    return pack((x >= 0).view(torch.uint8), 1)


def select(codes: Tensor, high: Tensor, low: Tensor, tiles: Tiles) -> Tensor:
    """The row's ``high`` (rows,) where a bit is set, its ``low`` (rows,) elsewhere."""
    bits = unpack(codes, 1, sum(rows * width for rows, width in tiles))
    values = bits.to(high.dtype)
    others = (1 - bits).to(high.dtype)
    highs, lows = columns(high, tiles), columns(low, tiles)
    parts = zip(views(values, tiles), views(others, tiles), highs, lows, strict=True)
    for out, other, one, zero in parts:
        out.mul_(one).addcmul_(other, zero)  # exact, and many times faster than torch.where
    return values


# ----------------------------------------------------------------------------- rows of a bucket

ROWS = ("parameter", "row")
"""What may have a scale of its own: a whole parameter, or each row of its matrix."""


def rows_of(bucket: Bucket, per: str) -> Tiles:
    """The parameters of ``bucket``, each as one row or as the rows of its matrix."""
    entries = [entry for entry in bucket.entries if entry.numel]
    if per == "parameter":
        return merged((1, entry.numel) for entry in entries)
    matrices = [bucket.matrix(entry.name) for entry in entries]
    return merged((len(matrix), matrix.shape[1]) for matrix in matrices)


def check_per(name: str, per: str) -> None:
    """Raise unless ``per``, an option of the method ``name``, is one of `ROWS`."""
    if per not in ROWS:
        raise ValueError(f"{name}: per must be one of {', '.join(ROWS)}, got {per!r}")


def signs_help(shape: tuple[int, ...], per: str, *, scale_bytes: int) -> bool:
    """Whether a bit per element and the scales take fewer bytes than fp32."""
    rows = shape[0] if per == "row" and shape else 1
    return math.prod(shape) / 8 + rows * scale_bytes < 4 * math.prod(shape)
