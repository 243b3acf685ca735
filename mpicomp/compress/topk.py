"""Top-k sparsification: each rank sends the elements of largest magnitude of its own gradient.

References: A. F. Aji and K. Heafield, "Sparse Communication for Distributed Gradient Descent",
EMNLP 2017; S. U. Stich, J.-B. Cordonnier and M. Jaggi, "Sparsified SGD with Memory", NeurIPS
2018, algorithm 1; as a fused vector: D. Yoon and S. Oh, "Empirical Analysis on Top-k Gradient
Sparsification for Distributed Deep Learning in a Supercomputing Environment", 2022.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import (
    Bucket,
    Capabilities,
    Compressor,
    Decoded,
    Dense,
    Exchange,
    Exchanged,
    Gather,
    Mean,
    Sparse,
    State,
    all_finite,
)
from .registry import register
from .select import largest


@register("topk")
@dataclass(frozen=True)
class TopK(Compressor):
    """The ``int(density * n)`` largest of the n elements of a bucket, at least one.

    The ranks choose independently, so the mean has up to ``size`` times as many non-zeros. Where
    gathering them would move no fewer bytes than a plain mean, the plain mean is taken.

    Args:
        density: fraction of elements kept, in (0, 1].
        error_feedback: whether what was not sent is carried to the next step.
    """

    density: float = 0.01
    error_feedback: bool = True

    capabilities: ClassVar[Capabilities] = Capabilities(
        biased=True, stateful=False, linear=False, rounds=1, min_ndim=2
    )

    def __post_init__(self) -> None:
        if not 0.0 < self.density <= 1.0:
            raise ValueError(f"topk: density must be in (0, 1], got {self.density!r}")

    def helps(self, shape: tuple[int, ...]) -> bool:
        numel = math.prod(shape)
        return super().helps(shape) and not self._dense_is_cheaper(numel, 4, size=1)

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        flat = bucket.flat
        if self._dense_is_cheaper(flat.numel(), flat.element_size(), size=bucket.size):
            (mean,) = yield Mean((flat.clone(),))  # the driver may overwrite, feedback may not
            return Exchanged(mean=Dense(mean), sent=Dense(flat))
        indices = largest(flat, self.num_kept(flat.numel()))
        narrow = indices.to(index_dtype(flat.numel()), copy=True)
        parts = yield Gather((flat[indices], narrow))
        return Exchanged(mean=SparseMean(tuple(parts)), sent=Sparse(indices, flat[indices]))

    def num_kept(self, numel: int) -> int:
        """How many of ``numel`` elements are sent."""
        return min(max(int(numel * self.density), 1), numel)

    def _dense_is_cheaper(self, numel: int, element_bytes: int, *, size: int) -> bool:
        """A gather brings all parts to every rank, a mean about twice the dense bytes."""
        pair_bytes = element_bytes + index_dtype(numel).itemsize
        return max(size, 2) * self.num_kept(numel) * pair_bytes >= 2 * numel * element_bytes


@dataclass(frozen=True, slots=True)
class SparseMean(Decoded):
    """The mean of one sparse vector per rank, added up in rank order.

    Args:
        parts: for each rank its values (k,) and their indices (k,), distinct within a rank.
    """

    parts: tuple[tuple[Tensor, Tensor], ...]

    def store_(self, bucket: Bucket) -> None:
        wide = torch.promote_types(bucket.flat.dtype, torch.float32)
        if bucket.flat.dtype == wide:
            self._add_to(bucket.flat.zero_())
        else:
            bucket.flat.copy_(self._add_to(torch.zeros_like(bucket.flat, dtype=wide)))

    def subtract_(self, bucket: Bucket) -> None:
        wide = torch.promote_types(bucket.flat.dtype, torch.float32)
        bucket.flat.sub_(self._add_to(torch.zeros_like(bucket.flat, dtype=wide)))

    def is_finite(self) -> bool:
        return all(all_finite(values) for values, _ in self.parts)

    def _add_to(self, total: Tensor) -> Tensor:
        # one rank at a time: distinct indices make the sums the same on every device and rank
        for values, indices in self.parts:
            total.index_add_(0, indices, values.to(total.dtype) / len(self.parts))
        return total


def index_dtype(numel: int) -> torch.dtype:
    """The narrowest type that counts ``numel`` elements exactly."""
    return torch.int32 if numel < 2**31 else torch.int64
