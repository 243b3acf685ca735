"""ScaleCom: in turn one rank chooses for all, so that all send values at the same places.

Reference: C.-Y. Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for
Communication-Efficient Distributed Training", NeurIPS 2020: the cyclic local top-k compressor
(CLT-k).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Broadcast, Bucket, Capabilities, Exchange, Exchanged, Mean, State
from .registry import register
from .scalars import count_step, step_of, steps
from .select import largest
from .sparse import Sparse, UnionSparsifier, average_all, index_dtype


@register("cltk")
@dataclass(frozen=True)
class CLTK(UnionSparsifier):
    """The ``int(density * n)`` largest elements of one rank, averaged over all ranks.

    The leader of step t is rank ``t mod size``. Only its places travel as places; the values at
    them are added up on the way, and their number does not depend on the number of ranks.

    State: slot ``step``, per parameter the number of steps taken.

    Args:
        density: fraction of elements kept, in (0, 1].
        error_feedback: whether what was not sent is carried to the next step.
    """

    density: float = 0.01
    error_feedback: bool = True

    capabilities: ClassVar[Capabilities] = Capabilities(
        biased=True, stateful=True, linear=True, rounds=2, min_ndim=2
    )

    def init(self, bucket: Bucket) -> State:
        return {"step": steps(bucket)}

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        flat = bucket.flat
        if self.dense_is_cheaper(flat.numel(), flat.element_size(), size=bucket.size):
            return (yield from average_all(bucket))
        k, dtype = self.num_kept(flat.numel()), index_dtype(flat.numel())
        leader = step_of(state) % bucket.size
        if bucket.rank == leader:
            chosen = largest(flat, k).to(dtype)
        else:
            chosen = flat.new_zeros(k, dtype=dtype)
        (indices,) = yield Broadcast((chosen,), root=leader)
        (mean,) = yield Mean((flat[indices],))
        return Exchanged(
            mean=Sparse(indices, mean),
            sent=Sparse(indices, flat[indices]),
            commit=lambda skip: count_step(state, skip),
        )
