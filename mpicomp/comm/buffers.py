"""The one gate between tensors and MPI: device, layout and type are checked here and stated.

mpi4py takes any object with memory and guesses the type. What it guesses wrong it sends wrong,
without an error: bfloat16 is summed as bytes, a transposed tensor travels in memory order. So every
call in this package goes through `buffer` or `raw`, which hand over address, count and type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from mpi4py import MPI
from torch import Tensor

Buffer: TypeAlias = list[object]  # [memory, count, MPI datatype], as mpi4py takes it

# A single call takes at most this many elements: counts are 32-bit in MPI before version 4.
MAX_COUNT = 2**30

# Floats for which MPI has no portable type: our own code adds them up, in float32.
HALVES = frozenset({torch.float16, torch.bfloat16})

# Types that MPI can reduce. Halves and bool are reduced by our own code.
NATIVE = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
}


def check(tensor: Tensor, *, device_pointers: bool = False) -> None:
    """Raise unless MPI may touch the memory of ``tensor`` from its first byte to its last."""
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        got = f"strides {tensor.stride()}" if tensor.layout == torch.strided else tensor.layout
        raise ValueError(f"comm: tensor must be dense and contiguous, got {got}")
    if not (tensor.is_cpu or device_pointers):
        raise ValueError(f"comm: tensor must be in host memory for this MPI, got {tensor.device}")


def memory(tensor: Tensor) -> MPI.buffer:
    """The bytes of ``tensor``, not copied. The caller keeps the tensor alive during the call."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def buffer(tensor: Tensor, *, device_pointers: bool = False) -> Buffer:
    """``tensor`` for a reduction: its own MPI type.

    Raises:
        TypeError: MPI has no such type.
        ValueError: not contiguous, or on a device that this MPI cannot read.
    """
    check(tensor, device_pointers=device_pointers)
    if tensor.dtype not in NATIVE:
        raise TypeError(f"comm: dtype must be one that MPI can reduce, got {tensor.dtype}")
    return [memory(tensor), tensor.numel(), NATIVE[tensor.dtype]]


def raw(tensor: Tensor, *, device_pointers: bool = False) -> Buffer:
    """``tensor`` for a move: plain bytes, so that every dtype travels unchanged."""
    check(tensor, device_pointers=device_pointers)
    return [memory(tensor), tensor.numel() * tensor.element_size(), MPI.BYTE]


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as (n,) uint8, not copied.

    If it is empty, or has one element only, its strides may be such that `view` refuses.
    """
    check(tensor, device_pointers=True)
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def pieces(numel: int, limit: int) -> Iterator[slice]:
    """Slices of at most ``limit`` that cover ``range(numel)`` in order."""
    for start in range(0, numel, limit):
        yield slice(start, min(start + limit, numel))
