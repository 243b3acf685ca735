"""The mean of quantised gradients: quantised on the way to an owner, and again on the way back.

Codes of different ranks cannot be added up on the way, and gathering all of them costs each rank as
many times as there are ranks. So every rank owns a chunk of the bucket: it gets the codes of this
chunk from all ranks, averages what they decode to, quantises the mean and hands it to all. What a
rank sends does not depend on the number of ranks.

The error of the second quantisation goes to the account of the owner: it counts as if the owner had
sent that much more, or less. So with error feedback the next step makes up for it, and no second
memory is needed, which would have to move whenever chunks change hands.

References: F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
Distributed Training of Speech DNNs", Interspeech 2014 (quantisation in both directions); S.
Zheng, Z. Huang and J. T. Kwok, "Communication-Efficient Distributed Blockwise Momentum SGD with
Error-Feedback", NeurIPS 2019 (error feedback in both directions, with a memory of the server's
own); H. Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with
Adam's Convergence Speed", ICML 2021 (owners of chunks as servers).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .base import AllToAll, Bucket, Coded, Dense, Exchange, Exchanged, Gather, GatherV
from .bits import packed_numel
from .codecs import Codec
from .tiles import Tiles, merged, num_rows, split

Combine = Callable[[Sequence[Tensor]], Tensor]


def mean_of(parts: Sequence[Tensor]) -> Tensor:
    """The element-wise mean, added up in the order of the ranks; overwrites the first."""
    total = parts[0]
    for part in parts[1:]:
        total.add_(part)
    return total.div_(len(parts))


def average_codes(
    bucket: Bucket,
    tiles: Tiles,
    *,
    align: int,
    codec: Codec,
    back: Codec | None = None,
    combine: Combine = mean_of,
) -> Exchange:
    """Average over ranks by way of ``codec``; leaves the bucket as it is.

    On one or two ranks everybody gathers all codes instead: that moves no more bytes, in one round
    and with one quantisation.

    Args:
        tiles: rows of the bucket; each has scales of its own, as has a part of a row that lies in
            another chunk.
        align: chunks begin at multiples of this, a multiple of 8.
        codec: for the way to the owner.
        back: for the way back; as on the way there by default.
        combine: what the owner makes of the ranks' decoded chunks, which it may overwrite.
    """
    dtype = bucket.flat.dtype
    if bucket.size <= 2:
        parts = yield Gather(codec.encode(tiles, bucket.flat))
        mean = combine([codec.decode(tiles, *part) for part in parts])
        own_codes = parts[bucket.rank]
        return Exchanged(Dense(mean.to(dtype)), Coded(partial(codec.decode, tiles, *own_codes)))
    plan = Plan.of(bucket.flat.numel(), tiles, size=bucket.size, align=align)
    scales, codes = codec.encode(plan.tiles, bucket.flat)
    outgoing = plan.messages(scales, codes, codec)
    own = plan.chunks[bucket.rank]
    parts = yield AllToAll(outgoing)
    exact = _combined(parts, own, codec, combine, like=scales)
    back = back or codec
    pieces = yield GatherV(back.encode(own, exact))
    mean = back.decode(plan.tiles, *(torch.cat(column) for column in zip(*pieces, strict=True)))
    start, stop = plan.bounds[bucket.rank : bucket.rank + 2]
    error = mean[start:stop].sub(exact).mul_(bucket.size)

    def sent() -> Tensor:
        values = codec.decode(plan.tiles, scales, codes)
        values[start:stop] += error
        return values

    return Exchanged(Dense(mean.to(dtype)), Coded(sent))


def _combined(
    parts: Sequence[Tensor], own: Tiles, codec: Codec, combine: Combine, *, like: Tensor
) -> Tensor:
    """What the ranks have sent of the own chunk, combined; ``like`` has the type of scales."""
    numel = sum(rows * width for rows, width in own)
    rows, scale_bytes = num_rows(own), like.element_size() * codec.scales
    decoded = []
    for part in parts:
        if numel and not part.numel():  # to a rank that has run out of data nothing is sent
            return like.new_zeros(numel)
        head, codes = part.split([rows * scale_bytes, packed_numel(numel, codec.bits)])
        scales = head.clone().view(like.dtype).view(rows, codec.scales)
        decoded.append(codec.decode(own, scales, codes))
    return combine(decoded)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which rank owns what: rank r the elements from ``bounds[r]`` to ``bounds[r + 1]``.

    Attributes:
        bounds: where chunks begin, and the end of the last one; multiples of 8, but for the end.
        chunks: for each rank the tiles of its chunk.
        tiles: those of all chunks, one after another.
    """

    bounds: tuple[int, ...]
    chunks: tuple[Tiles, ...]
    tiles: Tiles

    @staticmethod
    def of(numel: int, tiles: Tiles, *, size: int, align: int) -> Plan:
        """Chunks of nearly equal sizes; on the smallest buckets some are empty."""
        units = math.ceil(numel / align)
        bounds = tuple(min(units * rank // size * align, numel) for rank in range(size + 1))
        chunks = tuple(split(tiles, bounds))
        return Plan(bounds, chunks, merged(tile for chunk in chunks for tile in chunk))

    def messages(self, scales: Tensor, codes: Tensor, codec: Codec) -> tuple[Tensor, ...]:
        """For each owner the scales and codes of its chunk as one string of bytes."""
        heads = scales.split([num_rows(chunk) for chunk in self.chunks])
        cuts = [packed_numel(bound, codec.bits) for bound in self.bounds]
        bodies = codes.split([b - a for a, b in itertools.pairwise(cuts)])
        return tuple(
            torch.cat([head.reshape(-1).view(torch.uint8), body])
            for head, body in zip(heads, bodies, strict=True)
        )
