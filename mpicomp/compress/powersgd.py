"""PowerSGD: every gradient matrix as a product of two thin ones, by one step of power iteration.

Reference: T. Vogels, S. P. Karimireddy and M. Jaggi, "PowerSGD: Practical Low-Rank Gradient
Compression for Distributed Optimization", NeurIPS 2019, algorithm 1 (algorithm 2 is the error
feedback around it; the residual is taken against the mean, as in the authors' experiments).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import (
    Bucket,
    Capabilities,
    Compressor,
    Decoded,
    Exchange,
    Exchanged,
    Mean,
    State,
    all_finite,
)
from .registry import register


@register("powersgd")
@dataclass(frozen=True)
class PowerSGD(Compressor):
    """A rank-``rank`` approximation of the mean of each matrix, in two rounds.

    State: slot ``q``, per parameter the right factor (m, r) of an (n, m) matrix, equal on all
    ranks; slot ``step``, per parameter the number of steps taken.

    Args:
        rank: rank of the approximation, at least 1; clipped to the sides of each matrix.
        error_feedback: whether what was not sent is carried to the next step.
        seed: of the first right factors; the same on all ranks.
        warm_start: begin each step with the last right factor, not with a random one.
    """

    rank: int = 2
    error_feedback: bool = True
    seed: int = 0
    warm_start: bool = True

    capabilities: ClassVar[Capabilities] = Capabilities(
        biased=True, stateful=True, linear=True, rounds=2, min_ndim=2
    )

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"powersgd: rank must be an integer from 1 up, got {self.rank!r}")

    def helps(self, shape: tuple[int, ...]) -> bool:
        if not super().helps(shape):
            return False
        n, m = shape[0], math.prod(shape[1:])
        return min(n, m, self.rank) * (n + m) < n * m

    def init(self, bucket: Bucket) -> State:
        dtype = _wide(bucket.flat.dtype)
        shapes = {name: bucket.matrix(name).shape for name in _matrices(bucket)}
        columns = {name: (m, min(n, m, self.rank)) for name, (n, m) in shapes.items()}
        drawn = {name: self._draw(name, shape, step=0) for name, shape in columns.items()}
        return {
            "q": {name: q.to(bucket.flat.device, dtype) for name, q in drawn.items()},
            "step": {name: torch.zeros((), dtype=torch.int64) for name in columns},
        }

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        names = _matrices(bucket)
        wide = _widened(bucket)
        grads = [wide.matrix(name) for name in names]  # (n, m)
        old = [state["q"][name] for name in names]  # (m, r)
        ps = yield Mean(tuple(grad @ q for grad, q in zip(grads, old, strict=True)))
        ps = orthonormal(ps)  # (n, r)
        qs = yield Mean(tuple(grad.mT @ p for grad, p in zip(grads, ps, strict=True)))
        mean = LowRank(tuple(zip(names, ps, qs, strict=True)))

        def commit(skip: frozenset[str]) -> None:
            self._advance({name: q for name, _, q in mean.factors if name not in skip}, state)

        return Exchanged(mean=mean, sent=mean, commit=commit)

    def _advance(self, qs: dict[str, Tensor], state: State) -> None:
        """Keep the new right factors for the next step, with fresh columns for dead ones.

        A column is dead when the gradient had no such direction: zero, or rounding noise. The
        others are scaled to a largest element of 1, which changes no span and keeps the next
        product within range.
        """
        alive = {}
        for name, q in qs.items():
            state["step"][name] += 1
            peak = q.abs().amax(0)
            alive[name] = peak > 16 * torch.finfo(q.dtype).eps * peak.max()  # false for NaN
            state["q"][name].copy_(q / peak)
        if self.warm_start and alive and bool(torch.cat(list(alive.values())).all()):
            return
        for name, q in qs.items():
            fresh = self._draw(name, q.shape, step=int(state["step"][name])).to(q)
            keep = alive[name] & self.warm_start
            state["q"][name].copy_(torch.where(keep, state["q"][name], fresh))

    def _draw(self, name: str, shape: Sequence[int], *, step: int) -> Tensor:
        """Normal numbers, the same on all ranks, that leave the user's generator alone."""
        key = zlib.crc32(f"{self.seed}/{step}/{name}".encode())
        return torch.randn(*shape, generator=torch.Generator().manual_seed(key))


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


def _matrices(bucket: Bucket) -> list[str]:
    return [entry.name for entry in bucket.entries if entry.numel > 0]


def _widened(bucket: Bucket) -> Bucket:
    dtype = _wide(bucket.flat.dtype)
    if dtype == bucket.flat.dtype:
        return bucket
    return Bucket(bucket.flat.to(dtype), bucket.entries)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Products, factors and messages of 16-bit gradients are fp32."""
    return torch.promote_types(dtype, torch.float32)
