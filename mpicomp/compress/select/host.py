"""Passes over host memory with NumPy, in chunks whose intermediate results stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .search import Array, magnitudes

__all__ = ["above", "equal", "xp"]

xp: Any = np

CHUNK_BYTES = 1 << 20  # smaller ones pay for calls, larger ones leave the cache


def above(bits: Array, floor: Array, limit: int) -> Array | None:
    """See `search.Passes`."""
    step = CHUNK_BYTES // bits.itemsize
    scratch, passed = np.empty(step, bits.dtype), np.empty(step, np.bool_)
    parts, total = [np.empty(0, np.int64)], 0
    for start, chunk in _chunks(bits):
        values, flags = scratch[: len(chunk)], passed[: len(chunk)]
        np.bitwise_and(chunk, np.iinfo(bits.dtype).max, out=values)
        np.greater(values, floor, out=flags)
        (found,) = flags.nonzero()
        found += start
        parts.append(found)
        total += len(found)
        if total > limit:
            return None
    return np.concatenate(parts)


def equal(bits: Array, value: Array, count: int) -> Array:
    """See `search.Passes`."""
    parts, missing = [], count
    for start, chunk in _chunks(bits):
        found = np.flatnonzero(magnitudes(chunk, np) == value)[:missing] + start
        parts.append(found)
        missing -= len(found)
        if not missing:
            break
    return np.concatenate(parts)


def _chunks(bits: Array) -> Iterator[tuple[int, Array]]:
    step = CHUNK_BYTES // bits.itemsize
    for start in range(0, len(bits), step):
        yield start, bits[start : start + step]
