"""The k largest magnitudes at the price of about one pass: guess a threshold, then be exact.

A sample tells a threshold that is likely to lie a little below the k-th largest magnitude. One pass
collects what is above it, which are few, and among those an exact partition decides. Should the
guess have been too high, equal elements make up for what is missing, or else the partition is of
everything: slower, and as exact.

Numbers are compared by their bits without the sign, seen as integers. That is the order of
magnitudes for every IEEE type, NaN last, and needs no arithmetic on 16-bit types.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeAlias

Array: TypeAlias = Any  # of NumPy or CuPy

SAMPLES = 1 << 14


class Passes(Protocol):
    """What reads all of ``bits``, done by chunks on a host and by a kernel on a device."""

    @property
    def xp(self) -> Any:
        """The module of the arrays: numpy or cupy."""

    def above(self, bits: Array, floor: Array, limit: int) -> Array | None:
        """Indices of the magnitudes above ``floor`` (0-d), ascending; None for over ``limit``."""

    def equal(self, bits: Array, value: Array, count: int) -> Array:
        """The first ``count`` indices of magnitudes that are ``value`` (0-d); fewer at the end."""


def search(bits: Array, k: int, passes: Passes) -> Array:
    """Indices (k,), int64, of the k largest magnitudes.

    Args:
        bits: (n,) floating-point numbers seen as signed integers of the same width, at least as
            many as there are samples.
        k: how many, from 1 to n.
        passes: of the kind of memory that ``bits`` lies in.
    """
    xp = passes.xp
    rank = _rank(k, len(bits))
    if rank < SAMPLES:
        floor = _smallest_of_top(sample(bits, xp), rank, xp)
        found = passes.above(bits, floor, limit=2 * rank * len(bits) // SAMPLES)
        if found is not None and len(found) >= k:
            return found[top(magnitudes(bits[found], xp), k, xp)]
        if found is not None:
            tied = passes.equal(bits, floor, k - len(found))
            if len(found) + len(tied) == k:
                return xp.concatenate((found, tied))
    return top(magnitudes(bits, xp), k, xp)


def magnitudes(bits: Array, xp: Any) -> Array:
    """The same numbers without their sign."""
    return xp.bitwise_and(bits, xp.iinfo(bits.dtype).max)


def top(values: Array, k: int, xp: Any) -> Array:
    """Indices (k,) of the k largest ``values``; of equal ones at the limit the first."""
    smallest = _smallest_of_top(values, k, xp)
    above = xp.flatnonzero(values > smallest)
    tied = xp.flatnonzero(values == smallest)
    return xp.concatenate((above, tied[: k - len(above)]))


def _smallest_of_top(values: Array, k: int, xp: Any) -> Array:
    """The k-th largest, 0-d."""
    kth = len(values) - k
    return xp.partition(values, kth)[kth]


def sample(bits: Array, xp: Any) -> Array:
    """`SAMPLES` magnitudes from all over ``bits``, the same at every call.

    One from each of as many stretches, at a place in it that looks random, so that a pattern in
    ``bits`` that repeats, such as the rows of a matrix, is not mistaken for all of it.
    """
    number = xp.arange(SAMPLES, dtype=xp.int64)
    noise = (number * number * 0x9E3779B1 & 0xFFFFFFFF) >> 8  # 24 bits
    inside = noise * len(bits) >> 24
    return magnitudes(bits[(number * len(bits) + inside) // SAMPLES], xp)


def _rank(k: int, numel: int) -> int:
    """Which largest of the sample to take as threshold, four standard deviations to be safe."""
    expected = k * SAMPLES / numel
    return math.ceil(expected + 4 * math.sqrt(expected) + 4)
