"""Codes of 1, 2, 4 or 8 bits, packed into bytes.

Code i lies in byte ``i // per`` from bit ``bits * (i % per)`` upwards, where ``per = 8 / bits``
codes share a byte. The bits after the last code are zero and are never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDTHS = (1, 2, 4, 8)
"""The numbers of bits that a code may have."""

# the bytes that are to share one byte, seen as one little-endian integer
_TOGETHER = {1: torch.int64, 2: torch.int32, 4: torch.int16}


def packed_numel(numel: int, bits: int) -> int:
    """How many bytes ``numel`` codes take."""
    return -(-numel * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack ``codes`` (d,) uint8, each below ``2**bits``, into ``packed_numel(d, bits)`` bytes.

    With 8 bits there is nothing to do: the answer is ``codes`` itself.
    """
    if bits == 8:
        return codes
    per = 8 // bits
    if codes.numel() % per or codes.storage_offset() % per:
        whole = codes.new_zeros(packed_numel(codes.numel(), bits) * per)
        whole[: codes.numel()] = codes
        codes = whole
    # One multiplication moves every code to its place in the highest byte: code i goes from bit
    # 8 i up to bit 8 (per - 1) + bits i. No two products meet, so nothing carries.
    top = 8 * (per - 1)
    magic = sum(1 << (top - (8 - bits) * i) for i in range(per))
    together = codes.contiguous().view(_TOGETHER[bits])
    return (together * magic >> top).to(torch.uint8)


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """The first ``numel`` codes in ``packed``, as uint8 (numel,)."""
    if bits == 8:
        return packed[:numel]
    per = 8 // bits
    every = torch.arange(256, device=packed.device)
    shifts = bits * torch.arange(per, device=packed.device)
    table = every.unsqueeze(1) >> shifts & (1 << bits) - 1  # (256, per): all codes of each byte
    together = table.to(torch.uint8).view(_TOGETHER[bits]).view(-1)  # (256,)
    packed = packed[: packed_numel(numel, bits)]
    return together.index_select(0, packed.int()).view(torch.uint8)[:numel]
