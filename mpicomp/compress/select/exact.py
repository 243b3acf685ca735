"""Exact selection of the k elements of largest magnitude."""

from __future__ import annotations

import torch
from torch import Tensor

from . import gpu, host
from .search import search

SMALL = 1 << 16  # elements; up to here `torch.topk` is as fast

_INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def largest(flat: Tensor, k: int) -> Tensor:
    """Indices (k,), int64, in no particular order, of the k elements of largest magnitude.

    Exactly k distinct indices, whatever ties there are; among equals any may be taken. Infinity
    counts as larger than every number, and NaN as larger than infinity.

    On the CPU this reads ``flat`` about once, on one thread, without a copy of it; `search` has
    the algorithm. On CUDA the same is done by CuPy, and by `torch.topk` where CuPy is missing.

    Args:
        flat: 1-d tensor of real floating-point numbers, with any stride.
        k: how many, between 0 and ``flat.numel()``.
    """
    if flat.dim() != 1 or flat.dtype not in _INTEGERS:
        raise ValueError(
            "largest: flat must be 1-d, of float16, bfloat16, float32 or float64, "
            f"got {flat.dim()}-d, {flat.dtype}"
        )
    if not 0 <= k <= flat.numel():
        raise ValueError(f"largest: k must be between 0 and {flat.numel()}, got {k!r}")
    if k in (0, flat.numel()):
        return torch.arange(k, device=flat.device)
    if flat.numel() > SMALL:
        bits = flat.detach().view(_INTEGERS[flat.dtype])
        if flat.device.type == "cpu":
            return torch.from_numpy(search(bits.numpy(), k, host))
        if flat.is_cuda and gpu.available():
            return gpu.largest(bits, k)
    return torch.topk(flat.detach().abs(), k, sorted=False).indices


def largest_by_sort(flat: Tensor, k: int) -> Tensor:
    """As `largest`, by sorting all elements, with no thought of what that costs."""
    return torch.sort(flat.detach().abs(), descending=True).indices[:k]
