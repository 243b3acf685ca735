"""Top-k sparsification: each rank sends the elements of largest magnitude of its own gradient.

References: A. F. Aji and K. Heafield, "Sparse Communication for Distributed Gradient Descent",
EMNLP 2017; S. U. Stich, J.-B. Cordonnier and M. Jaggi, "Sparsified SGD with Memory", NeurIPS
2018, algorithm 1; as a fused vector: D. Yoon and S. Oh, "Empirical Analysis on Top-k Gradient
Sparsification for Distributed Deep Learning in a Supercomputing Environment", 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

from .base import Bucket, Capabilities, Exchange, State
from .registry import register
from .select import largest, largest_by_sort
from .sparse import PairSparsifier, average_all, average_union, gather_pairs

SELECTIONS = {"exact": largest, "sort": largest_by_sort}


@register("topk")
@dataclass(frozen=True)
class TopK(PairSparsifier):
    """The ``int(density * n)`` largest of the n elements of a bucket, at least one.

    The ranks choose independently, so the mean has up to ``size`` times as many non-zeros. Where
    gathering them would move no fewer bytes than a plain mean, the plain mean is taken.

    Args:
        density: fraction of elements kept, in (0, 1].
        error_feedback: whether what was not sent is carried to the next step.
        union: average also what a rank has where only others chose, in a second round.
        selection: ``"exact"``, or ``"sort"``: by sorting all elements, as many implementations do,
            which chooses the same and takes far longer; to see what selection costs elsewhere.
    """

    density: float = 0.01
    error_feedback: bool = True
    union: bool = False
    selection: str = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.selection not in SELECTIONS:
            names = ", ".join(SELECTIONS)
            raise ValueError(f"topk: selection must be one of {names}, got {self.selection!r}")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            biased=True,
            stateful=False,
            linear=False,
            rounds=2 if self.union else 1,
            min_ndim=2,
            gathers_values=not self.union,
        )

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        flat = bucket.flat
        if self.dense_is_cheaper(flat.numel(), flat.element_size(), size=bucket.size):
            return (yield from average_all(bucket))
        indices = SELECTIONS[self.selection](flat, self.num_kept(flat.numel()))
        if self.union:
            return (yield from average_union(bucket, indices, disjoint=False))
        return (yield from gather_pairs(bucket, indices, equal_counts=True))
