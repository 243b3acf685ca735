"""What a compressor costs: seconds on this device, and the collectives that it asks for.

A compressor is played against itself: one process runs it on real gradients and answers every
message with what this process has sent, as if all ranks held the same. So the cost at any number of
ranks is measured where there is one; only the choices of other ranks, which would differ, do not.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpicomp.compress.base import (
    AllToAll,
    Answer,
    Broadcast,
    Bucket,
    Compressor,
    Entry,
    Gather,
    GatherV,
    Max,
    Mean,
    Message,
    State,
    Sum,
)
from mpicomp.fusion import Plan
from mpicomp.predict.timeline import now

COUNT_BYTES = 8  # of a length, sent ahead where lengths differ
CACHE_BYTES = 64 << 20  # more than what a processor keeps
EVEN = 4096  # elements of which chunks are multiples, in whatever unit a method divides


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective, with a size as in `collectives`."""

    kind: str
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Cost:
    """One bucket with one compressor, at one number of ranks.

    Attributes:
        accumulate_seconds: on the training thread, while gradients arrive.
        encode_seconds: before and between messages.
        decode_seconds: after the last answer, the result and the memory written.
        collectives: in order.
        num_bytes: in this rank's messages.
    """

    accumulate_seconds: float
    encode_seconds: float
    decode_seconds: float
    collectives: tuple[Collective, ...]
    num_bytes: float

    def __mul__(self, factor: float) -> Cost:
        """The cost of ``factor`` times as many elements."""
        return Cost(
            self.accumulate_seconds * factor,
            self.encode_seconds * factor,
            self.decode_seconds * factor,
            tuple(Collective(c.kind, c.num_bytes * factor) for c in self.collectives),
            self.num_bytes * factor,
        )


def measure(plan: Plan, grads: Mapping[str, Tensor], size: int, *, repeats: int = 3) -> Cost:
    """What ``plan``'s bucket costs among ``size`` ranks: medians, after one exchange to warm up.

    Args:
        plan: bucket and compressor.
        grads: gradients, at least of the bucket's parameters, by name.
        size: number of ranks.
        repeats: how many exchanges are timed.
    """
    entries, factor = plan.entries, 1.0
    if plan.compressor.capabilities.chunks and size > 2:
        entries, grads, factor = _even(plan, grads, size)
    numel = sum(entry.numel for entry in entries)
    flat = torch.zeros(numel, dtype=plan.dtype, device=plan.device)
    bucket = Bucket(flat, entries, size=size)
    state = plan.compressor.init(bucket)
    others = torch.zeros(min(CACHE_BYTES, 16 * flat.nbytes), dtype=torch.uint8)
    costs = []
    for _ in range(repeats + 1):
        bucket.rank = leader(plan.compressor, bucket, state)
        others.add_(1)  # in training, too, a bucket comes out of memory, not out of the cache
        costs.append(play(plan.compressor, bucket, state, grads))
    del costs[0]
    names = ("accumulate_seconds", "encode_seconds", "decode_seconds")
    medians = {name: statistics.median(getattr(cost, name) for cost in costs) for name in names}
    return replace(costs[-1], **medians) * factor


def _even(
    plan: Plan, grads: Mapping[str, Tensor], size: int
) -> tuple[tuple[Entry, ...], dict[str, Tensor], float]:
    """The bucket as one row that divides evenly: then all ranks' chunks are as long as ours."""
    unit = EVEN * size
    numel = -(-plan.numel // unit) * unit
    flat = torch.cat([grads[entry.name].reshape(-1).to(plan.dtype) for entry in plan.entries])
    row = flat.repeat(-(-numel // plan.numel))[:numel].view(size, -1)
    entry = Entry("row", tuple(row.shape), row.stride(), 0)
    return (entry,), {"row": row}, plan.numel / numel


def leader(compressor: Compressor, bucket: Bucket, state: State) -> int:
    """The rank that all others wait for, if the exchange begins with a broadcast; else ours."""
    first = next(compressor.exchange(bucket, state), None)
    return first.root if isinstance(first, Broadcast) else bucket.rank


def play(compressor: Compressor, bucket: Bucket, state: State, grads: Mapping[str, Tensor]) -> Cost:
    """One exchange of ``grads`` with ``bucket.size`` ranks that hold the same."""
    start = now(bucket.flat.device)
    for name in bucket:
        compressor.load_(bucket, state, name, grads[name])
    accumulate = now(bucket.flat.device) - start
    steps = compressor.exchange(bucket, state)
    collectives: list[Collective] = []
    encode, num_bytes = 0.0, 0
    answer: Answer = None
    while True:
        start = now(bucket.flat.device)
        try:
            message = steps.send(answer)
        except StopIteration as stop:
            exchanged = stop.value
            break
        encode += now(bucket.flat.device) - start
        collectives += collectives_of(message, bucket.size)
        num_bytes += message.num_bytes
        answer = answer_to(message, bucket)
    exchanged.commit(frozenset())
    exchanged.mean.store_(bucket)
    decode = now(bucket.flat.device) - start
    return Cost(accumulate, encode, decode, tuple(collectives), num_bytes)


def collectives_of(message: Message, size: int) -> tuple[Collective, ...]:
    """What `exchange.carry` makes of a message."""
    match message:
        case Mean() | Sum() | Max():
            sizes: dict[torch.dtype, int] = {}
            for t in message.tensors:
                sizes[t.dtype] = sizes.get(t.dtype, 0) + t.numel() * t.element_size()
            return tuple(Collective("all-reduce", num_bytes) for num_bytes in sizes.values())
        case Gather():
            return (Collective("all-gather", message.num_bytes),)
        case GatherV():
            counts = Collective("all-gather", COUNT_BYTES * len(message.tensors))
            return counts, Collective("all-gather", message.num_bytes)
        case AllToAll():
            counts = Collective("all-to-all", COUNT_BYTES * size)
            partners = sum(t.numel() > 0 for t in message.tensors)
            kind = "all-to-all" if partners > 1 else "message"
            return counts, Collective(kind, message.num_bytes)
    return (Collective("broadcast", message.num_bytes),)


def answer_to(message: Message, bucket: Bucket) -> Answer:
    """What ranks that all hold the same would answer."""
    match message:
        case Sum():
            return tuple(t * bucket.size for t in message.tensors)
        case Gather() | GatherV():
            return (message.tensors,) * bucket.size
        case AllToAll():
            return (message.tensors[bucket.rank],) * bucket.size
    return message.tensors
