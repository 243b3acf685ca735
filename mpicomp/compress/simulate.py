"""Many ranks in one process: the same compressors, without MPI.

`simulate` runs one exchange of one bucket; `Simulation` is a whole data-parallel step for a set
of parameters. Both hold compressors to the contract: ranks must yield alike messages, and a
message that was handed over is overwritten, so that reading it again shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ..errors import MismatchError
from .base import (
    AllToAll,
    Answer,
    Broadcast,
    Bucket,
    Compressor,
    Entry,
    Exchange,
    Exchanged,
    Gather,
    GatherV,
    Max,
    Mean,
    Message,
    State,
    Sum,
    all_finite,
    wide,
)
from .rules import Compression, assign

Tap: TypeAlias = Callable[[int, Message], None]
Grads: TypeAlias = Mapping[str, Tensor | None]


def simulate(
    compressor: Compressor,
    buckets: Sequence[Bucket],
    states: Sequence[State],
    *,
    tap: Tap | None = None,
) -> list[Exchanged]:
    """Exchange one bucket among as many ranks as there are buckets.

    Commits nothing and stores nothing: that is left to the caller. Means and sums are added up
    in rank order in at least fp32 and rounded once.

    Args:
        compressor: the same on all ranks.
        buckets: for each rank its loaded bucket, with that rank and size.
        states: for each rank its state, from ``compressor.init``.
        tap: called with rank and message before each message is answered.

    Returns:
        For each rank what its exchange returned.

    Raises:
        MismatchError: the messages of a round differ in kind, shape or dtype between ranks.
    """
    runs = [compressor.exchange(b, s) for b, s in zip(buckets, states, strict=True)]
    replies: list[Answer] = [None] * len(runs)
    while True:
        steps = [_advance(run, reply) for run, reply in zip(runs, replies, strict=True)]
        results = [step for step in steps if isinstance(step, Exchanged)]
        if len(results) == len(steps):
            return results
        messages = _alike(steps)
        for rank, message in enumerate(messages):
            if tap is not None:
                tap(rank, message)
        replies = _answers(messages)
        for message in messages:
            _poison_(message)


def _advance(run: Exchange, reply: Answer) -> Message | Exchanged:
    try:
        return run.send(reply)
    except StopIteration as stop:
        outcome: Exchanged = stop.value
        return outcome


def _alike(steps: Sequence[Message | Exchanged]) -> list[Message]:
    for rank, step in enumerate(steps):
        if _signature(step) != _signature(steps[0]):
            raise MismatchError(
                "simulate: every rank must yield the same kind, shapes and dtypes, got "
                f"{_signature(steps[0])} on rank 0 and {_signature(step)} on rank {rank}"
            )
    return [step for step in steps if isinstance(step, Message)]


def _signature(step: Message | Exchanged) -> tuple[object, ...]:
    """What must agree between ranks: all shapes, but for the lengths that are free."""
    if isinstance(step, Exchanged):
        return ("the end",)
    free = isinstance(step, (GatherV, AllToAll))
    shapes = [tuple(t.shape[1:] if free else t.shape) for t in step.tensors]
    root = step.root if isinstance(step, Broadcast) else None
    return (type(step).__name__, root, *zip(shapes, (t.dtype for t in step.tensors), strict=True))


def _answers(messages: Sequence[Message]) -> list[Answer]:
    """For each rank its answer, in memory of its own."""
    parts = [message.tensors for message in messages]
    columns = list(zip(*parts, strict=True))
    match messages[0]:
        case Mean():
            return _copies([_mean(column) for column in columns], len(parts))
        case Sum():
            sums = [_sum(column).to(column[0].dtype) for column in columns]
            return _copies(sums, len(parts))
        case Max():
            return _copies([torch.stack(column).amax(0) for column in columns], len(parts))
        case Gather() | GatherV():
            return [tuple(_copy(tensors) for tensors in parts) for _ in parts]
        case Broadcast(root=root):
            return _copies(parts[root], len(parts))
        case AllToAll():
            return [_copy(column) for column in columns]
    raise TypeError(f"simulate: message must be of a known kind, got {messages[0]!r}")


def _mean(column: Sequence[Tensor]) -> Tensor:
    return _sum(column).div_(len(column)).to(column[0].dtype)


def _sum(column: Sequence[Tensor]) -> Tensor:
    first = column[0]
    real = first.is_floating_point() or first.is_complex()
    total = first.to(wide(first.dtype) if real else None, copy=True)
    for tensor in column[1:]:
        total += tensor
    return total


def _copies(tensors: Sequence[Tensor], count: int) -> list[Answer]:
    return [_copy(tensors) for _ in range(count)]


def _copy(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor.clone() for tensor in tensors)


def _poison_(message: Message) -> None:
    for t in message.tensors:
        if t.is_floating_point() or t.is_complex():
            t.fill_(float("nan"))
        else:
            t.fill_(True if t.dtype == torch.bool else torch.iinfo(t.dtype).max)


# ---------------------------------------------------------------------------------- whole steps


def bucket_of(params: Mapping[str, Tensor], dtype: torch.dtype, *, rank: int, size: int) -> Bucket:
    """A bucket of zeros for tensors like these; dense strides are kept, others made so."""
    entries: list[Entry] = []
    offset = 0
    for name, param in params.items():
        stride = torch.empty_like(param, device="meta").stride()
        entries.append(Entry(name, tuple(param.shape), stride, offset))
        offset += param.numel()
    device = next((param.device for param in params.values()), None)
    flat = torch.zeros(offset, dtype=dtype, device=device)
    return Bucket(flat, tuple(entries), rank=rank, size=size)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step of a `Simulation`.

    Attributes:
        means: for each rank the mean gradient of every parameter, in unscaled units and in the
            precision of the bucket; None for parameters used on no rank.
        bytes_sent: for each rank the bytes in its messages.
        good: whether all gradients were finite. If not, no state has changed.
    """

    means: list[dict[str, Tensor | None]]
    bytes_sent: list[int]
    good: bool


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that share a compressor: for each rank a bucket and a state."""

    compressor: Compressor
    buckets: list[Bucket]
    states: list[State]


class Simulation:
    """Data-parallel training steps of ``size`` ranks, as the optimizer makes them over MPI.

    Args:
        compression: what the optimizer takes: a name, a spec, a compressor, or rules.
        params: the parameters, or tensors like them: shapes, strides, dtypes and device matter.
        size: number of ranks.
        tap: called with rank and message for everything that is sent.

    Attributes:
        groups: the parameters with their compressors, buckets and states.
    """

    def __init__(
        self,
        compression: Compression,
        params: Mapping[str, Tensor],
        *,
        size: int,
        tap: Tap | None = None,
    ) -> None:
        self.size = size
        self.groups: list[Group] = []
        self._tap = tap
        chosen = assign(compression, ((n, tuple(p.shape), p.dtype) for n, p in params.items()))
        members: dict[tuple[Compressor, torch.dtype], dict[str, Tensor]] = {}
        for name, param in params.items():
            members.setdefault((chosen[name], param.dtype), {})[name] = param
        for (compressor, dtype), like in members.items():
            wide = compressor.bucket_dtype(dtype)
            buckets = [bucket_of(like, wide, rank=rank, size=size) for rank in range(size)]
            states = [compressor.init(bucket) for bucket in buckets]
            self.groups.append(Group(compressor, buckets, states))

    def step(self, grads: Sequence[Grads], *, scale: float = 1.0) -> StepResult:
        """Average one gradient per rank.

        If any rank has a non-finite gradient, the step is bad on all ranks: nothing is
        committed, and parameters whose compressor has a memory come out as NaN.

        Args:
            grads: for each rank its gradients by name; None, or no entry, where it has none.
            scale: the loss scale that the gradients carry.
        """
        if len(grads) != self.size:
            raise ValueError(
                f"simulation: grads must have one entry for each of {self.size} ranks, "
                f"got {len(grads)}"
            )
        known = {name for group in self.groups for name in group.buckets[0]}
        for name in {name for mine in grads for name in mine} - known:
            raise ValueError(f"simulation: grads must be of the parameters given, got {name!r}")
        sent = [0] * self.size
        means: list[dict[str, Tensor | None]] = [{} for _ in grads]
        good = self._load(grads, scale)
        outcomes = [self._exchange(group, sent) for group in self.groups]
        good &= all(outcome[0].mean.is_finite() for outcome in outcomes)
        for group, outcome in zip(self.groups, outcomes, strict=True):
            unused = frozenset(n for n in group.buckets[0] if all(g.get(n) is None for g in grads))
            _settle(group, outcome, unused, good)
            for rank, bucket in enumerate(group.buckets):
                for name, view in bucket.items():
                    means[rank][name] = None if name in unused else view.clone()
        return StepResult(means, sent, good)

    def _load(self, grads: Sequence[Grads], scale: float) -> bool:
        """Fill all buckets; whether the step is good. A bad bucket with a memory is zeroed."""
        good = True
        for group in self.groups:
            for bucket, state, mine in zip(group.buckets, group.states, grads, strict=True):
                for name in bucket:
                    group.compressor.load_(bucket, state, name, mine.get(name), scale=scale)
                if not all_finite(bucket.flat):
                    good = False
                    if group.compressor.capabilities.stateful:
                        bucket.flat.zero_()
        return good

    def _exchange(self, group: Group, sent: list[int]) -> list[Exchanged]:
        """Each rank's outcome; the bytes of its messages are added to ``sent``."""

        def tap(rank: int, message: Message) -> None:
            sent[rank] += message.num_bytes
            if self._tap is not None:
                self._tap(rank, message)

        return simulate(group.compressor, group.buckets, group.states, tap=tap)


def _settle(
    group: Group, outcomes: Sequence[Exchanged], unused: frozenset[str], good: bool
) -> None:
    """Commit a good step and leave the means in the buckets; spoil what has a memory otherwise."""
    for bucket, outcome in zip(group.buckets, outcomes, strict=True):
        if good:
            outcome.commit(unused)
        if good or not group.compressor.capabilities.stateful:
            outcome.mean.store_(bucket)
        else:
            bucket.flat.fill_(float("nan"))
