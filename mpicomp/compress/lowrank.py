"""What low-rank methods share: matrices as products of two thin factors, and how factors live on.

A factor that begins the next step is one that a mean of all ranks has left, or drawn numbers where
that mean had no such direction.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import draws
from .base import Bucket, Compressor, Decoded, all_finite, wide

# --------------------------------------------------------------------------------- decoded form


@dataclass(frozen=True, slots=True)
class LowRank(Decoded):
    """Matrices as products: for each a name, a left (n, r) and a right factor (m, r)."""

    factors: tuple[tuple[str, Tensor, Tensor], ...]

    def store_(self, bucket: Bucket) -> None:
        for name, p, q in self.factors:
            matrix = bucket.matrix(name)
            if matrix.dtype == p.dtype:
                torch.mm(p, q.mT, out=matrix)
            else:
                matrix.copy_(p @ q.mT)

    def subtract_(self, bucket: Bucket) -> None:
        for name, p, q in self.factors:
            matrix = bucket.matrix(name)
            if matrix.dtype == p.dtype:
                matrix.addmm_(p, q.mT, alpha=-1.0)
            else:
                matrix.sub_(p @ q.mT)

    def is_finite(self) -> bool:
        return all(all_finite(p) and all_finite(q) for _, p, q in self.factors)


# ------------------------------------------------------------------------------------- factors


def orthonormal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Matrices (n, r) of orthonormal columns whose spans contain those of ``matrices`` (n, r).

    Householder reflections never divide by a small norm: where columns are zero or depend on
    each other, the basis is filled up with other directions, which can only improve a
    projection. Matrices of one shape are factorised together, in fresh memory: LAPACK's last
    bits depend on alignment, and all ranks need the same bits from the same input.
    """
    groups: dict[torch.Size, list[int]] = {}
    for position, matrix in enumerate(matrices):
        groups.setdefault(matrix.shape, []).append(position)
    result = list(matrices)
    for positions in groups.values():
        bases = torch.linalg.qr(torch.stack([matrices[i] for i in positions])).Q
        for position, basis in zip(positions, bases, strict=True):
            result[position] = basis
    return result


def product(matrix: Tensor, factor: Tensor) -> Tensor:
    """``matrix`` (n, m) times a thin ``factor`` (m, r).

    Computed as (r, m) x (m, n): on CPUs two to six times as fast for a few columns, whichever way
    the matrix lies in memory, as the library then reads it once and in order.
    """
    return (factor.mT.contiguous() @ matrix.mT).mT


def scaled(factor: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of a factor (n, r), each scaled to a largest element of 1; which are alive (r,).

    Scaling changes no span and keeps the next product within range. A column is dead when the
    gradient had no such direction: zero, or rounding noise. It comes out as zero.
    """
    peak = factor.abs().amax(0)
    alive = peak > 16 * torch.finfo(factor.dtype).eps * peak.max()  # false for NaN
    return torch.where(alive, factor / peak, 0.0), alive


def renewed(
    factors: Mapping[str, Tensor], draw: Callable[[str, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Factors to begin the next step with: scaled, and fresh columns where they are dead.

    Args:
        factors: by parameter name, each (n, r).
        draw: numbers like this tensor for this parameter, the same on all ranks.
    """
    kept = {name: scaled(factor) for name, factor in factors.items()}
    if not kept or bool(torch.cat([alive for _, alive in kept.values()]).all()):
        return {name: factor for name, (factor, _) in kept.items()}
    return {
        name: torch.where(alive, factor, draw(name, factor))
        for name, (factor, alive) in kept.items()
    }


def drawn(method: str, seed: int, step: int, name: str, like: Tensor) -> Tensor:
    """Normal numbers in the shape, type and place of ``like``, the same on all ranks."""
    generator = draws.generator(method, seed, step, name)
    return torch.randn(*like.shape, generator=generator).to(like)


# ------------------------------------------------------------------------------------- buckets


def matrices(bucket: Bucket) -> list[str]:
    """The names of the parameters that have elements."""
    return [entry.name for entry in bucket.entries if entry.numel > 0]


def widened(bucket: Bucket) -> Bucket:
    """The bucket, in fp32 if it has 16 bits: so are products, factors and messages."""
    dtype = wide(bucket.flat.dtype)
    if dtype == bucket.flat.dtype:
        return bucket
    return Bucket(bucket.flat.to(dtype), bucket.entries)


# ------------------------------------------------------------------------------------- methods


class LowRankMethod(Compressor):
    """A method that approximates an (n, m) matrix at rank min(n, m, its field ``rank``)."""

    rank: int
    min_compression_rate: float

    def __post_init__(self) -> None:
        kind = type(self).__name__.lower()
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"{kind}: rank must be an integer from 1 up, got {self.rank!r}")
        if not 0.0 <= self.min_compression_rate < math.inf:
            raise ValueError(
                f"{kind}: min_compression_rate must be a number from 0 up, "
                f"got {self.min_compression_rate!r}"
            )

    def helps(self, shape: tuple[int, ...]) -> bool:
        if not super().helps(shape):
            return False
        n, m = shape[0], math.prod(shape[1:])
        return self.min_compression_rate * self.num_sent(n, m) < n * m

    def factors(self, bucket: Bucket, *, side: int) -> dict[str, Tensor]:
        """Zeros by name: left factors (n, r) for side 0, right ones (m, r) for side 1."""
        dtype = wide(bucket.flat.dtype)
        shapes = {name: bucket.matrix(name).shape for name in matrices(bucket)}
        return {
            name: bucket.flat.new_zeros(shape[side], min(*shape, self.rank), dtype=dtype)
            for name, shape in shapes.items()
        }

    @abc.abstractmethod
    def num_sent(self, n: int, m: int) -> int:
        """The most numbers that a rank sends in one step for an (n, m) matrix."""
