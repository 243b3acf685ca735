"""gTop-k: the ranks' top-k merged in a tree that keeps k elements at every step.

Reference: S. Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k
Sparsification for Low Bandwidth Networks", ICDCS 2019. Any number of ranks is merged, and what a
merge drops is not lost: the rank that merges keeps it for the next step.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from .base import (
    AllToAll,
    Answer,
    Broadcast,
    Bucket,
    Capabilities,
    Exchange,
    Exchanged,
    Message,
    State,
    wide,
)
from .registry import register
from .select import largest
from .sparse import (
    Pairs,
    Sparse,
    Sparsifier,
    add_up,
    average_all,
    index_dtype,
    pack_pairs,
    unpack_pairs,
)


@register("gtopk")
@dataclass(frozen=True)
class GTopK(Sparsifier):
    """About the ``int(density * n)`` largest of the n elements of the sum over ranks.

    Args:
        density: fraction of elements kept, in (0, 1].
        error_feedback: whether what was not sent is carried to the next step.
        complete: whether what a merge drops counts as not sent by the rank that merged. If not, as
            in the paper, each rank takes back only what it chose itself and the result lacks, and
            what was dropped on the way at the places of the result is lost.
    """

    density: float = 0.01
    error_feedback: bool = True
    complete: bool = True

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            biased=True,
            stateful=False,
            linear=False,
            rounds=None,  # one for each doubling of the number of ranks, and the broadcast
            min_ndim=2,
            mean_of_sent=self.complete,
            conserves=self.complete,
        )

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        flat = bucket.flat
        if self.dense_is_cheaper(flat.numel(), flat.element_size(), size=bucket.size):
            return (yield from average_all(bucket))
        chosen = largest(flat, self.num_kept(flat.numel()))
        dtype = wide(flat.dtype)
        own = flat[chosen].to(dtype), chosen.to(index_dtype(flat.numel()))
        (values, indices), dropped = yield from _merge(bucket, own)
        values, indices = yield Broadcast((values.clone(), indices.clone()))
        mean = Sparse(indices, values / bucket.size)
        if self.complete:
            values, indices = add_up([own, *((-lost, where) for lost, where in dropped)])
            return Exchanged(mean=mean, sent=Sparse(indices, values))
        taken = torch.isin(own[1], indices, assume_unique=True)
        return Exchanged(mean=mean, sent=Sparse(own[1][taken], own[0][taken]))

    def dense_is_cheaper(self, numel: int, element_bytes: int, *, size: int) -> bool:
        pair_bytes = max(element_bytes, 4) + index_dtype(numel).itemsize
        moves = 2 * max(_doublings(size), 1)  # up the tree and down again
        return moves * self.num_kept(numel) * pair_bytes >= 2 * numel * element_bytes


def _merge(bucket: Bucket, own: Pairs) -> Generator[Message, Answer, tuple[Pairs, list[Pairs]]]:
    """The k largest elements on rank 0, and what this rank dropped when it merged.

    In round j rank r receives from rank r + 2^j, if r is a multiple of 2^(j + 1).
    """
    k, kept, dropped = len(own[0]), own, []
    for distance in (2**j for j in range(_doublings(bucket.size))):
        outgoing = [torch.empty(0, dtype=torch.uint8, device=own[0].device)] * bucket.size
        place = bucket.rank % (2 * distance)
        if place == distance:
            outgoing[bucket.rank - distance] = pack_pairs(*kept).view(-1)
        incoming = yield AllToAll(tuple(outgoing))
        partner = bucket.rank + distance
        if place == 0 and partner < bucket.size:
            dtypes = {"values": own[0].dtype, "indices": own[1].dtype}
            values, indices = add_up([kept, unpack_pairs(incoming[partner], **dtypes)])
            order = values.abs().sort(descending=True, stable=True).indices  # ties: lowest index
            kept = values[order[:k]], indices[order[:k]]
            dropped.append((values[order[k:]], indices[order[k:]]))
    return kept, dropped


def _doublings(size: int) -> int:
    """How often one rank has to double to make ``size``: log2, rounded up."""
    return (size - 1).bit_length()
