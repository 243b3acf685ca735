"""Compressors over a communicator: every message becomes one collective per element type."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpicomp.comm.buffers import as_bytes
from mpicomp.comm.communicator import Communicator, Op
from mpicomp.comm.waiting import Task
from mpicomp.compress.base import (
    AllToAll,
    Answer,
    Broadcast,
    Bucket,
    Compressor,
    Exchanged,
    Gather,
    GatherV,
    Max,
    Mean,
    Message,
    State,
    Sum,
    all_finite,
)
from mpicomp.profile import Profile

INDEX = (torch.int32, torch.int64)  # what says where values belong; codes are narrower


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that take part in a step: all, or those that still have data (see ``join``)."""

    communicator: Communicator
    active: tuple[int, ...]  # communicator ranks, in order


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one bucket: the result, and whether all that was seen of it is finite."""

    exchanged: Exchanged
    finite: bool


def exchange(
    compressor: Compressor,
    bucket: Bucket,
    state: State,
    group: Group,
    profile: Profile,
    name: str,
    *,
    watched: bool = True,
) -> Task[Outcome]:
    """Run ``compressor`` on ``bucket`` over the network.

    A compressor with memory is not shown values that are not finite: it exchanges zeros, and the
    step is to be discarded. One without memory passes them on, and the mean stores itself.

    Args:
        watched: whether some compressor of the optimizer has a memory, so that a mean that is not
            finite matters here too.
    """
    start = time.perf_counter()
    stateful = compressor.capabilities.stateful
    finite = not stateful or all_finite(bucket.flat)
    if not finite:
        bucket.flat.zero_()
    steps = compressor.exchange(bucket, state)
    answer: Answer = None
    while True:
        try:
            with profile.span(f"{'encode' if answer is None else 'decode'} {name}"):
                message = steps.send(answer)
        except StopIteration as stop:
            result: Exchanged = stop.value
            break
        profile.stats.encode_seconds += time.perf_counter() - start
        with profile.span(f"{type(message).__name__} {name}", bytes=message.num_bytes):
            answer = yield from carry(message, group, profile)
        start = time.perf_counter()
    if watched:
        finite &= result.mean.is_finite()  # large finite gradients overflow on the way
    if not stateful:
        result.mean.store_(bucket)
    profile.stats.decode_seconds += time.perf_counter() - start
    return Outcome(result, finite)


def carry(message: Message, group: Group, profile: Profile) -> Task[Answer]:
    """Send ``message``, return the answer that its kind promises, and count both."""
    start = time.perf_counter()
    num_bytes = message.num_bytes
    num_index_bytes = sum(t.numel() * t.element_size() for t in message.tensors if t.dtype in INDEX)
    answer = yield from _answer(message, group)
    seconds = time.perf_counter() - start
    profile.stats.communicate_seconds += seconds
    profile.stats.index_seconds += seconds * num_index_bytes / max(num_bytes, 1)
    profile.stats.bytes_sent += num_bytes
    profile.stats.bytes_received += _received_bytes(message, answer, group)
    return answer


def _answer(message: Message, group: Group) -> Task[Answer]:
    comm = group.communicator
    match message:
        case Mean():
            return (yield from _reduce(message.tensors, comm, Op.SUM, 1.0 / len(group.active)))
        case Sum():
            return (yield from _reduce(message.tensors, comm, Op.SUM, None))
        case Max():
            return (yield from _reduce(message.tensors, comm, Op.MAX, None))
        case Gather():
            packed = _pack(message.tensors)
            parts = yield from _moved(comm, packed, [packed.numel()] * comm.size)
            shapes = [t.shape for t in message.tensors]
            return tuple(_unpack(parts[r], message.tensors, shapes) for r in group.active)
        case GatherV():
            return (yield from _gather_v(message.tensors, group))
        case Broadcast(root=root):
            packed = _pack(message.tensors)
            host = comm.readable(packed)
            yield from comm.broadcast_(host, group.active[root])
            shapes = [t.shape for t in message.tensors]
            return _unpack(host.to(packed.device), message.tensors, shapes)
        case AllToAll():
            return (yield from _all_to_all(message.tensors, group))
    raise TypeError(f"exchange: message must be one of those in compress.base, got {message!r}")


def _reduce(
    tensors: Sequence[Tensor], comm: Communicator, op: Op, scale: float | None
) -> Task[tuple[Tensor, ...]]:
    answers: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        indices = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        if len(indices) == 1 and tensors[indices[0]].is_contiguous():
            flat = tensors[indices[0]].view(-1)
        else:
            flat = torch.cat([tensors[i].reshape(-1) for i in indices])
        yield from comm.reduce_(flat, op, scale)
        for i, part in zip(indices, flat.split([tensors[i].numel() for i in indices]), strict=True):
            answers[i] = part.view(tensors[i].shape)
    return tuple(answers[i] for i in range(len(tensors)))


def _gather_v(tensors: Sequence[Tensor], group: Group) -> Task[tuple[tuple[Tensor, ...], ...]]:
    comm = group.communicator
    rows = torch.tensor([len(t) for t in tensors], dtype=torch.int64)
    every = yield from comm.gather(rows, [len(rows)] * comm.size)
    row_bytes = [math.prod(t.shape[1:]) * t.element_size() for t in tensors]
    lengths = [sum(int(n) * b for n, b in zip(r, row_bytes, strict=True)) for r in every]
    parts = yield from _moved(comm, _pack(tensors), lengths)
    return tuple(
        _unpack(
            parts[r],
            tensors,
            [(int(n), *t.shape[1:]) for n, t in zip(every[r], tensors, strict=True)],
        )
        for r in group.active
    )


def _all_to_all(tensors: Sequence[Tensor], group: Group) -> Task[tuple[Tensor, ...]]:
    comm = group.communicator
    outgoing = [tensors[0].new_empty(0)] * comm.size
    for rank, tensor in zip(group.active, tensors, strict=True):
        outgoing[rank] = tensor.contiguous()
    counts = [torch.tensor([t.numel()]) for t in outgoing]
    lengths = yield from comm.all_to_all(counts, [1] * comm.size)
    incoming = yield from comm.all_to_all(
        [comm.readable(t) for t in outgoing], [int(n) for n in lengths]
    )
    return tuple(incoming[r].to(tensors[0].device) for r in group.active)


# Moves do not look at the elements: all tensors of a message travel as one string of bytes.


def _moved(comm: Communicator, packed: Tensor, lengths: list[int]) -> Task[list[Tensor]]:
    parts = yield from comm.gather(comm.readable(packed), lengths)
    return [part.to(packed.device) for part in parts]


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([as_bytes(t.contiguous()) for t in tensors])


def _unpack(
    packed: Tensor, like: Sequence[Tensor], shapes: Sequence[Sequence[int]]
) -> tuple[Tensor, ...]:
    tensors, start = [], 0
    for tensor, shape in zip(like, shapes, strict=True):
        stop = start + math.prod(shape) * tensor.element_size()
        part = packed[start:stop]
        if part.storage_offset() % tensor.element_size():
            part = part.clone()  # a view of wider elements must begin at a multiple of their size
        tensors.append(part.view(tensor.dtype).view(tuple(shape)))
        start = stop
    return tuple(tensors)


def _received_bytes(message: Message, answer: Answer, group: Group) -> int:
    """Bytes that came from other ranks: none of an answer is counted that this rank sent."""
    if len(group.active) == 1:
        return 0
    if isinstance(message, Mean | Sum | Max | Broadcast):
        return message.num_bytes
    own = (
        group.active.index(group.communicator.rank)
        if group.communicator.rank in group.active
        else -1
    )
    parts = [part for i, part in enumerate(answer) if i != own]
    tensors = parts if isinstance(message, AllToAll) else [t for part in parts for t in part]
    return sum(t.numel() * t.element_size() for t in tensors)
