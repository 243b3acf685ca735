"""Numbers of few bits with a scale for every block of elements.

References: T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022
(a largest magnitude for every block, so that an outlier spoils one block only; here on a linear
grid); the rounding at random is that of D. Alistarh et al., "QSGD: Communication-Efficient SGD via
Gradient Quantization and Encoding", NeurIPS 2017.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import wide
from .bits import pack, unpack
from .tiles import Tiles, block_tiles, columns, views


def quantize_blocks(
    x: Tensor, bits: int, block: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Round ``x`` (d,) to multiples of a scale for each block.

    A block with a NaN or an infinite element decodes to nothing finite; one of zeros to zeros.

    Args:
        bits: 2, 4 or 8 per element; the grid is symmetric, from -(2**(bits-1) - 1) up.
        block: elements that share a scale, the last block may be shorter.
        generator: for rounding up or down at random, unbiased; None rounds to the nearest.

    Returns:
        The packed codes, uint8 (ceil(d bits / 8),), and the scales (ceil(d / block),), fp32, or
        fp64 if ``x`` is.
    """
    scales, codes = quantize_tiles(x, bits, block_tiles(x.numel(), block), generator)
    return codes, scales


def dequantize_blocks(
    codes: Tensor,
    scales: Tensor,
    bits: int,
    block: int,
    numel: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """What `quantize_blocks` made of ``numel`` elements, in ``dtype`` or that of ``scales``."""
    values = dequantize_tiles(scales, codes, bits, block_tiles(numel, block))
    return values if dtype is None else values.to(dtype)


def quantize_tiles(
    x: Tensor, bits: int, tiles: Tiles, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """As `quantize_blocks`, with a scale for each row of ``tiles``; scales come first."""
    levels = (1 << bits - 1) - 1
    dtype = wide(x.dtype)
    scales = x.new_empty(0, dtype=dtype)
    matrices = views(x, tiles)
    if matrices:
        scales = torch.cat([matrix.abs().amax(1) for matrix in matrices]).to(dtype) / levels
    scales.clamp_(min=torch.finfo(dtype).tiny)  # the inverse of anything smaller overflows
    scaled = torch.empty_like(x, dtype=dtype)
    for matrix, out, column in zip(
        matrices, views(scaled, tiles), columns(scales, tiles), strict=True
    ):
        torch.div(matrix, column, out=out)
    if generator is None:
        scaled.round_()
    else:
        noise = torch.rand(x.shape, dtype=dtype, device=x.device, generator=generator)
        scaled.add_(noise).floor_().clamp_(max=levels)
    # code 0 stands for -(levels + 1), which never occurs; what is NaN has a scale that is NaN
    return scales, pack(scaled.to(torch.int8).view(torch.uint8) + (levels + 1), bits)


def dequantize_tiles(scales: Tensor, codes: Tensor, bits: int, tiles: Tiles) -> Tensor:
    """What `quantize_tiles` made of the elements of ``tiles``, in the precision of ``scales``."""
    numel = sum(rows * width for rows, width in tiles)
    signed = unpack(codes, bits, numel) - (1 << bits - 1)  # wraps around
    values = signed.view(torch.int8).to(scales.dtype)
    for matrix, column in zip(views(values, tiles), columns(scales, tiles), strict=True):
        matrix.mul_(column)
    return values
