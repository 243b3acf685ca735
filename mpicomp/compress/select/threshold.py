"""Selection of elements by their magnitude against a threshold, in one pass over memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from . import host
from .exact import largest

_CPU_BLOCK = 2**16  # elements: a block and what is made of it stay in the second-level cache
_DEVICE_BLOCK = 2**24  # bounds what is held at a time, with few launches


def above(flat: Tensor, threshold: float) -> Tensor:
    """Indices (count,), int64, ascending, of the elements with ``|x| >= threshold``.

    The threshold is rounded to the precision of ``flat``, fp32 for 16-bit numbers. Zeros are
    never above, NaN always is, and everything is above a threshold that is NaN.

    Args:
        flat: 1-d tensor.
        threshold: taken as the smallest normal number if it is below that.
    """
    wide = torch.promote_types(flat.dtype, torch.float32)
    limits = torch.finfo(wide)
    threshold = min(max(threshold, limits.tiny), limits.max)  # in this order NaN stays NaN
    if flat.is_cpu and flat.dtype == wide:
        return _above_on_host(flat, threshold)
    found = [torch.empty(0, dtype=torch.int64, device=flat.device)]
    for start, block in blocks(flat):
        found.append((block.to(wide).abs() < threshold).logical_not_().nonzero().view(-1) + start)
    return torch.cat(found)


def above_at_most(flat: Tensor, threshold: float, most: int) -> Tensor:
    """As `above`, but at most ``most`` indices: exactly those of the largest elements."""
    indices = above(flat, threshold)
    if indices.numel() <= most:
        return indices
    return indices[largest(flat[indices], most)]


def blocks(flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Consecutive pieces of ``flat``, each with its offset: to read memory once, however often."""
    size = _CPU_BLOCK if flat.is_cpu else _DEVICE_BLOCK
    for start in range(0, flat.numel(), size):
        yield start, flat[start : start + size]


def _above_on_host(flat: Tensor, threshold: float) -> Tensor:
    """By the bits, as in `search`: there NaN is the largest."""
    values = flat.detach().numpy()
    bits = values.view(f"i{values.itemsize}")
    limit = values.dtype.type(threshold)
    floor = bits.dtype.type(-1 if np.isnan(limit) else limit.view(bits.dtype) - 1)
    found = host.above(bits, floor, limit=bits.size)
    assert found is not None
    # an empty tensor that NumPy made has a stride of 0, and cannot be seen as bytes
    return torch.from_numpy(found) if len(found) else torch.empty(0, dtype=torch.int64)
