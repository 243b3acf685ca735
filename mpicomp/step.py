"""One exchange of all gradients: buckets fill and leave, a ballot is held, means come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from mpicomp.ballot import Ballot, Mark
from mpicomp.comm.waiting import Task
from mpicomp.compress.base import PRIVATE_SLOTS, Compressor, State, all_finite
from mpicomp.errors import MpicompError
from mpicomp.exchange import Group, Outcome, exchange
from mpicomp.fusion import Buckets
from mpicomp.leftovers import exchange_dense, exchange_sparse
from mpicomp.profile import Profile
from mpicomp.progress import Lane, Progress


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter, the bucket its gradient goes to, and whether it is there."""

    index: int
    name: str
    param: Parameter
    bucket: int | None = None  # None: frozen, or with sparse gradients
    filled: bool = False
    gone: bool = False  # another optimizer has taken the parameter over
    arrived_at: float = 0.0  # by time.perf_counter, in the last step


@dataclass(frozen=True, slots=True)
class Conclusion:
    """How a step ended, alike on all ranks.

    Attributes:
        ballot: the marks of all parameters.
        leftovers: means of gradients that fitted in no bucket, by parameter.
        buckets: to be used from now on, if others are wanted than before.
    """

    ballot: Ballot
    leftovers: dict[int, Tensor]
    buckets: Buckets | None


Rebuild: TypeAlias = Callable[[Ballot, list[int]], Task["Buckets | None"]]
Around: TypeAlias = Callable[[Compressor, float], Compressor]
"""Puts something that measures around a compressor, told the unit of gradients in its bucket."""


class Observer(Protocol):
    """Looks at every exchange of one optimizer, on the training thread."""

    def begins(self) -> Around | None:
        """A step begins; None leaves its compressors as they are."""

    def ended(self, buckets: Buckets) -> None:
        """Its means are in place, and what compressors remember is in ``buckets``."""


class Step:
    """From the first gradient of a backward pass to the means of all.

    Args:
        slots: all parameters, whether they lie in a bucket or not.
        buckets: memory and compressors.
        group: the ranks that have data.
        scale: the loss scale in the gradients; compressors with memory work in unscaled units.
        lane: where the tasks of this optimizer queue.
        progress: the communication thread.
        profile: counters.
        around: see `Observer`.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        buckets: Buckets,
        group: Group,
        *,
        scale: float,
        lane: Lane,
        progress: Progress,
        profile: Profile,
        around: Around | None,
    ) -> None:
        self._slots, self._buckets, self.group, self._scale = slots, buckets, group, scale
        self._lane, self._progress, self._profile = lane, progress, profile
        self._around = around
        self._missing = [len(plan.entries) for plan in buckets.plans]
        self._streams: list[set[torch.cuda.Stream]] = [set() for _ in buckets.plans]
        self._outcomes: list[Future[Outcome]] = []  # of the buckets that have left
        self._watched = any(p.compressor.capabilities.stateful for p in buckets.plans)
        self._conclusion: Future[Conclusion] | None = None
        self._keep = False  # whether this rank uses the means
        self._active = group.communicator.rank in group.active
        self._leftovers: dict[int, Tensor] = {}  # gradients that fit in no bucket
        self._worked_before = profile.stats.worked_seconds
        self.arrived: list[int] = []  # parameters, in the order of their gradients
        self.closed_at = 0.0  # by time.perf_counter: the end of the backward pass
        for slot in slots:
            slot.filled = False
        for bucket in buckets.buckets:
            bucket.size = len(group.active)
            bucket.rank = group.active.index(group.communicator.rank) if self._active else 0

    @property
    def complete(self) -> bool:
        """Whether every bucket is full."""
        return not any(self._missing)

    def take(self, slot: Slot) -> None:
        """Take ``slot``'s gradient, if its bucket is still here; until the end it then has none."""
        grad = slot.param.grad
        if grad is None or slot.bucket is None or grad.is_sparse:
            return
        if not slot.filled:
            self._fill(slot, grad)
            self.arrived.append(slot.index)
            self._launch()
        elif slot.bucket >= len(self._outcomes):  # a second part, from a backward inside another
            bucket = self._buckets.buckets[slot.bucket]
            bucket[slot.name].add_(grad.detach(), alpha=1.0 / self._scale_of(slot.bucket))
            slot.param.grad = None

    def close(self, rebuild: Rebuild, *, discard: bool = False) -> None:
        """Backward is over: send what is left and open the ballot. Returns without waiting.

        Args:
            rebuild: makes other buckets, if the ballot and the order of arrival want it.
            discard: the backward pass failed; take part to the end, but set nothing.
        """
        if self._conclusion is not None:
            return
        self._profile.mark("backward is over")
        self.closed_at = time.perf_counter()
        own = Ballot.blank(len(self._slots))
        own.bad = own.failed = discard
        self._keep = self._active and not discard
        for slot in self._slots:
            self._close_slot(slot, own)
        self._launch()
        task = self._conclude(own, rebuild)
        self._conclusion = self._progress.submit(self._lane, task, "the ballot")

    def finish(self) -> Conclusion:
        """Wait for the others and set all gradients. Returns what was agreed."""
        assert self._conclusion is not None
        start = time.perf_counter()
        with self._profile.span("wait"):
            conclusion = self._progress.wait(self._conclusion)
        now = time.perf_counter()
        self._count(conclusion.ballot, waited=now - start)
        self._settle(conclusion.ballot)
        if self._keep:
            self._give(conclusion)
        self._profile.stats.decode_seconds += time.perf_counter() - now
        return conclusion

    def check(self, conclusion: Conclusion) -> None:
        """Raise `MpicompError` if another rank's gradients are missing."""
        if self._keep and conclusion.ballot.failed:
            raise MpicompError(
                "backward: another rank's backward pass ended with an exception that it caught; "
                "gradients of this step are not complete"
            )

    # ---------------------------------------------------------------------------- filling

    def _close_slot(self, slot: Slot, own: Ballot) -> None:
        """Fill ``slot`` if it is not, and say on the ballot what became of it."""
        grad, placed = slot.param.grad, slot.bucket is not None
        if self._active and slot.param.requires_grad and not slot.gone:
            own.set(Mark.TRAINED, slot.index)
        if slot.gone or not self._keep:
            if grad is not None and placed and not slot.filled:
                slot.param.grad = grad.clone()  # it may lie in the bucket, which is used now
            self._fill(slot, None)
            return
        if slot.filled or (placed and grad is not None and not grad.is_sparse):
            own.set(Mark.USED, slot.index)
        if grad is not None and (slot.filled or not placed or grad.is_sparse):
            own.set(Mark.SPARSE if grad.is_sparse else Mark.LATE, slot.index)
            self._leftovers[slot.index] = grad.detach()
            slot.param.grad = grad = None
        self._fill(slot, grad)

    def _fill(self, slot: Slot, grad: Tensor | None) -> None:
        if slot.bucket is None or slot.filled:
            return
        slot.arrived_at = start = time.perf_counter()
        bucket = self._buckets.buckets[slot.bucket]
        if self._active:
            self._buckets.plans[slot.bucket].compressor.load_(
                bucket,
                self._buckets.states[slot.bucket],
                slot.name,
                None if grad is None else grad.detach(),
                scale=self._scale_of(slot.bucket),
            )
        else:
            bucket[slot.name].zero_()
        if bucket.flat.is_cuda:
            self._streams[slot.bucket].add(torch.cuda.current_stream(bucket.flat.device))
        if grad is not None:
            slot.param.grad = None
        slot.filled = True
        self._missing[slot.bucket] -= 1
        self._profile.stats.accumulate_seconds += time.perf_counter() - start

    def _scale_of(self, index: int) -> float:
        stateful = self._buckets.plans[index].compressor.capabilities.stateful
        return self._scale if stateful else 1.0

    def _launch(self) -> None:
        """Hand over the buckets that are full, in order."""
        while (index := len(self._outcomes)) < len(self._missing) and not self._missing[index]:
            plan = self._buckets.plans[index]
            name = f"bucket {index} ({plan.entries[0].name} .. {plan.entries[-1].name})"
            self._profile.mark(f"bucket {index} is full")
            for stream in self._streams[index]:
                assert self._lane.stream is not None
                self._lane.stream.wait_stream(stream)
            compressor = plan.compressor
            if self._around is not None:
                compressor = self._around(compressor, self._scale_of(index) / self._scale)
            task = exchange(
                compressor,
                self._buckets.buckets[index],
                self._buckets.states[index],
                self.group,
                self._profile,
                name,
                watched=self._watched,
            )
            self._outcomes.append(self._progress.submit(self._lane, task, name))
            self._profile.stats.dense_bytes += plan.dense_bytes

    # ----------------------------------------------------------------------------- ending

    def _conclude(self, own: Ballot, rebuild: Rebuild) -> Task[Conclusion]:
        """The last task of a step: the ballot, and what it shows to be left over."""
        # Tasks of a lane run in order: all outcomes are there when this one starts.
        own.bad |= not all(outcome.result().finite for outcome in self._outcomes)
        ballot = yield from own.cast(self.group.communicator)
        means: dict[int, Tensor] = {}
        late = ballot.marked(Mark.LATE)
        if late:
            params = [self._slots[i].param.detach() for i in late]
            grads = [self._leftovers.get(i) for i in late]
            dense = yield from exchange_dense(params, grads, self.group, self._profile)
            means.update(zip(late, dense, strict=True))
        for i in ballot.marked(Mark.SPARSE):
            param = self._slots[i].param.detach()
            mean = yield from exchange_sparse(
                param, self._leftovers.get(i), self.group, self._profile
            )
            means[i] = means[i] + mean if i in means else mean
        if self._watched and not all(all_finite(_values(mean)) for mean in means.values()):
            ballot.bad = True  # these are equal on all ranks, so all say the same
        buckets = yield from rebuild(ballot, self.arrived)
        return Conclusion(ballot, means, buckets)

    def _settle(self, agreed: Ballot) -> None:
        """Let the compressors commit a good step and write the means; spoil those of a bad one."""
        if self._lane.stream is not None:
            torch.cuda.current_stream(self._lane.stream.device).wait_stream(self._lane.stream)
        used = set(agreed.marked(Mark.USED))
        unused = frozenset(slot.name for slot in self._slots if slot.index not in used)
        for index, outcome in enumerate(self._outcomes):
            if not self._buckets.plans[index].compressor.capabilities.stateful:
                continue
            bucket, exchanged = self._buckets.buckets[index], outcome.result().exchanged
            with self._profile.span(f"settle bucket {index}"):
                if agreed.bad:
                    bucket.flat.fill_(float("nan"))
                    continue
                state = self._buckets.states[index]
                with nullcontext() if self._active else _kept_private(state):
                    exchanged.commit(unused)
                exchanged.mean.store_(bucket)
                if self._scale != 1.0:
                    bucket.flat.mul_(self._scale)

    def _give(self, conclusion: Conclusion) -> None:
        """The means become the gradients: views of the buckets where the type allows it."""
        for index in conclusion.ballot.marked(Mark.USED):
            slot = self._slots[index]
            if slot.bucket is not None:
                mean = self._buckets.buckets[slot.bucket][slot.name]
                # An alias: users may set ``p.grad.data``, and must not move the bucket's own view.
                slot.param.grad = mean.detach().to(slot.param.dtype)
        for index, mean in conclusion.leftovers.items():
            param = self._slots[index].param
            param.grad = mean if param.grad is None else param.grad + mean

    def _count(self, agreed: Ballot, *, waited: float) -> None:
        stats = self._profile.stats
        stats.steps += 1
        stats.bad_steps += agreed.bad
        stats.wait_seconds += waited
        worked = stats.worked_seconds - self._worked_before
        stats.hidden_seconds += max(0.0, worked - waited)


@contextmanager
def _kept_private(state: State) -> Iterator[None]:
    """A rank without data follows what all ranks share, and keeps what is its own."""
    own = [tensor for slot in PRIVATE_SLOTS & state.keys() for tensor in state[slot].values()]
    before = [tensor.clone() for tensor in own]
    yield
    for tensor, old in zip(own, before, strict=True):
        tensor.copy_(old)


def _values(grad: Tensor) -> Tensor:
    return grad.values() if grad.is_sparse else grad
