"""From local gradients to their mean, while backward still runs.

Every parameter has a hook that autograd calls when its gradient is complete. The hook copies the
gradient into its bucket (adding the residual in the same pass) and a full bucket goes to the
communication thread, in bucket order. When backward ends, the parameters that got no gradient are
filled in, and the *ballot*, one small reduction, tells every rank what all of them must know alike:
which parameters were used anywhere, and whether all gradients were finite. Only then do the
compressors commit what they remember, and the means become the gradients.

The rule behind it: an exchange replaces the accumulated ``p.grad`` of every rank by its mean, with
zeros for a rank that has none. Accumulation, several backward passes before a step and parameters
that come and go all follow from it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

from mpicomp import world as _world
from mpicomp.ballot import Ballot, Mark, agree_on_models
from mpicomp.comm.communicator import Communicator, Op
from mpicomp.comm.waiting import Task
from mpicomp.compress.rules import Compression, assign
from mpicomp.exchange import Group
from mpicomp.fusion import Buckets, Plan, memory_strides, plan
from mpicomp.progress import Lane
from mpicomp.step import Observer, Slot, Step

if TYPE_CHECKING:
    from mpicomp.auto import Autopilot

_CUSTOM_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__
_NUMBERS = itertools.count()  # of engines, in the order in which all ranks build them
Memory = Mapping[str, Mapping[str, Tensor]]  # slot -> parameter name -> tensor


class Engine:
    """Exchanges the gradients of one set of parameters.

    Building one is local; ranks first meet in `agree`, or in the first exchange.

    Args:
        params: name and parameter, in registration order, equal on all ranks.
        compression: as for `DistributedOptimizer`.
        bucket_bytes: size at which a bucket is full.
        loss_scale: the factor in this step's gradients; asked once per exchange.
        holding: told how many backward passes have only accumulated since the last exchange, says
            whether this one is to do the same.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, Parameter]],
        compression: Compression,
        *,
        bucket_bytes: float,
        loss_scale: Callable[[], float],
        holding: Callable[[int], bool],
    ) -> None:
        world = _world.get()
        self._progress, self._profile = world.progress, world.profile
        self._number = next(_NUMBERS)
        self._compression = compression
        self._bucket_bytes = bucket_bytes
        self._loss_scale, self._holding = loss_scale, holding
        self._slots: list[Slot] = []
        self._lane = Lane()
        self._buckets: Buckets | None = None
        self._memory: Memory = {}  # of parameters that are in no bucket now
        self._sparse: set[int] = set()
        self._order: list[int] = []  # in which gradients arrive: a guess until they have
        self._ordered = False
        self._step: Step | None = None
        self._graphs: set[int] = set()  # autograd runs that will tell us when they end
        self._root: int | None = None  # the outermost of them
        self._held = False  # gradients were accumulated since the last exchange
        self._held_passes = 0
        self._held_graph = -1
        self.autopilot: Autopilot | None = None  # chooses compressors in training
        self.joining = False  # ranks may run out of data; every exchange asks who has some
        self.exhausted = False  # this rank has
        self.observer: Observer | None = None
        self.last_active: tuple[int, ...] = ()  # the ranks that had data in the last exchange
        self.add(params)

    # ------------------------------------------------------------------------ parameters

    def add(self, params: Sequence[tuple[str, Parameter]]) -> None:
        """Take on more parameters; the buckets are made anew before the next exchange."""
        for name, param in params:
            slot = Slot(len(self._slots), name, param)
            self._slots.append(slot)
            if param.is_floating_point() or param.is_complex():
                self._hook(slot)
            if param.device.type == "cuda" and self._lane.stream is None:
                self._lane.stream = torch.cuda.Stream(param.device)
        self._compressors = assign(
            self._compression,
            [(slot.name, tuple(slot.param.shape), slot.param.dtype) for slot in self._slots],
        )
        self._drop_buckets()
        self._ordered = False
        if self.autopilot is not None:
            self.autopilot.restart()

    def memory(self) -> dict[str, dict[str, Tensor]]:
        """What the compressors remember, by slot and parameter name (not a copy)."""
        memory = {slot: dict(tensors) for slot, tensors in self._memory.items()}
        for slot, tensors in (self._buckets.memory() if self._buckets else {}).items():
            memory.setdefault(slot, {}).update(tensors)
        return memory

    def close(self) -> None:
        """Let go of the parameters, on all ranks alike; the communicator serves the next engine."""
        hooks = _world.get().hooks
        for slot in self._slots:
            handle, owner = hooks.get(slot.param, (None, None))
            if owner is slot and handle is not None:
                handle.remove()
                del hooks[slot.param]
        self._drop_buckets()
        _world.get().idle_communicators.append(self._communicator)

    def forget_held(self) -> None:
        """Begin a new window of accumulation; on all ranks alike."""
        self._held, self._held_passes = False, 0

    def restore(self, memory: Memory) -> None:
        """Let the compressors remember ``memory``, by parameter name, and nothing else."""
        self._memory = memory
        if self._buckets is not None:
            self._buckets.reset()
            self._buckets.restore(memory)

    def _hook(self, slot: Slot) -> None:
        """Have autograd call `_arrived`; also for a frozen parameter, should it be unfrozen."""
        hooks = _world.get().hooks
        if slot.param in hooks:  # a parameter listens to the optimizer that came last
            handle, other = hooks[slot.param]
            handle.remove()
            other.gone = True
        frozen = not slot.param.requires_grad
        slot.param.requires_grad_(True)
        handle = slot.param.register_post_accumulate_grad_hook(lambda param: self._arrived(slot))
        hooks[slot.param] = handle, slot
        slot.param.requires_grad_(not frozen)

    @cached_property
    def _communicator(self) -> Communicator:
        """Collective when first asked for."""
        communicator = _world.get().new_communicator()
        self._lane.spins = communicator.hosts == 1
        return communicator

    def agree(self) -> None:
        """Collective: `MismatchError` on every rank unless all hold the same parameters."""
        if self._buckets is not None:
            return
        lines = {
            slot.name: f"{tuple(slot.param.shape)}, strides {memory_strides(slot.param)}, "
            f"{slot.param.dtype}, {self._compressors[slot.name]}"
            for slot in self._slots
        }
        _world.wait(agree_on_models(self._communicator, lines), "the comparison of models")
        task = self._first_buckets()
        self._use(_world.wait(task, "the division of the parameters into buckets"))

    # --------------------------------------------------------------------- for the autopilot

    @property
    def plans(self) -> list[Plan]:
        """The buckets in use, in the order in which they leave."""
        assert self._buckets is not None
        return self._buckets.plans

    def placed(self) -> dict[str, Slot]:
        """What is in a bucket, by name."""
        return {slot.name: slot for slot in self._slots if slot.bucket is not None}

    def recompress(self, compression: Mapping[str, str]) -> None:
        """Collective: go on with other compressors, by parameter name, and what they remember.

        What has no name in ``compression`` is not compressed, should it be frozen now or not.
        """
        for slot in self._slots:
            entry = (slot.name, tuple(slot.param.shape), slot.param.dtype)
            self._compressors |= assign(compression.get(slot.name), [entry])
        task = self._make_buckets({slot.index for slot in self.placed().values()})
        self._use(_world.wait(task, "the division of the parameters into buckets"))

    # --------------------------------------------------------------------------- buckets

    def _first_buckets(self) -> Task[Buckets]:
        trained = torch.tensor([slot.param.requires_grad for slot in self._slots])
        yield from self._communicator.reduce_(trained, Op.MAX)
        self._order = [slot.index for slot in reversed(self._slots)]
        return (yield from self._make_buckets({int(i) for i in trained.nonzero()}))

    def _make_buckets(self, members: set[int]) -> Task[Buckets]:
        """Buckets for ``members``, in the order in which gradients arrive."""
        chosen = [self._slots[i] for i in self._order if i in members]
        plans = plan(
            [(slot.name, slot.param.data) for slot in chosen], self._compressors, self._bucket_bytes
        )
        return (yield from Buckets.make(plans, self._communicator))

    def _rebuild(self, ballot: Ballot, arrived: list[int]) -> Task[Buckets | None]:
        """Other buckets if other parameters are trained, or once in the order of arrival."""
        self._sparse |= set(ballot.marked(Mark.SPARSE))
        members = set(ballot.marked(Mark.TRAINED)) - self._sparse
        placed = {slot.index for slot in self._slots if slot.bucket is not None}
        if self._ordered and members == placed:
            return None
        if not self._ordered:
            rest = [index for index in self._order if index not in set(arrived)]
            order = torch.tensor(arrived + rest)
            yield from self._communicator.broadcast_(order, 0)
            self._order, self._ordered = [int(index) for index in order], True
        return (yield from self._make_buckets(members))

    def _use(self, buckets: Buckets) -> None:
        """Go on with ``buckets``, and with what the compressors remember."""
        self._drop_buckets()
        buckets.restore(self._memory)
        kept = buckets.memory()
        self._memory = {
            slot: {n: t.clone() for n, t in tensors.items() if n not in kept.get(slot, {})}
            for slot, tensors in self._memory.items()
        }
        position = {e.name: b for b, p in enumerate(buckets.plans) for e in p.entries}
        for slot in self._slots:
            slot.bucket = position.get(slot.name)
        self._buckets = buckets

    def _drop_buckets(self) -> None:
        if self._buckets is not None:
            self._memory = self.memory()
            self._buckets.release()
            self._buckets = None

    # ---------------------------------------------------------------------- backward runs

    @torch.no_grad()
    def _arrived(self, slot: Slot) -> None:
        """Autograd has accumulated a gradient into ``slot.param.grad``."""
        if self._progress.stopped:  # after `shutdown` a rank trains by itself
            return
        graph = torch._C._current_graph_task_id()
        if self._step is None and self._holds(graph):
            return
        if self._step is None or graph not in self._graphs:
            nested = _inside_custom_backward()
            if self._step is not None and not nested and self._root is not None:
                self.finish(discard=True)  # that backward pass ended with an exception
            if self._step is None:
                self._begin(self._active())
            self._graphs.add(graph)
            if not nested:
                self._root = graph
            Variable._execution_engine.queue_callback(lambda: self._ended(graph, nested=nested))
        assert self._step is not None
        self._step.take(slot)

    def _holds(self, graph: int) -> bool:
        """Whether this autograd run only accumulates; asked and told once per run."""
        if graph != self._held_graph:
            if not self._holding(self._held_passes):
                return False
            self._held, self._held_graph = True, graph
            if not _inside_custom_backward():
                Variable._execution_engine.queue_callback(self._count_held)
        return True

    def _count_held(self) -> None:
        self._held_passes += 1

    @torch.no_grad()
    def _ended(self, graph: int, *, nested: bool) -> None:
        """An autograd run is over. One inside another ends the step only if nothing is missing."""
        if self._step is None or (nested and not self._step.complete):
            return
        # Several optimizers may share a backward pass, and end it in another order elsewhere: all
        # of them send what they have before any of them waits.
        # And all of them wait in one order, as the autopilots of some may then have to talk.
        ending = [engine for engine in _world.get().open_engines if engine._root == graph]
        for engine in ending:
            engine.close_step()
        for engine in sorted({*ending, self}, key=lambda engine: engine._number):
            engine.finish()

    def synchronize(self) -> None:
        """Exchange what has been accumulated and not exchanged; nothing otherwise."""
        if self._progress.stopped:
            return
        if self._step is None and self._held:
            self._begin(self._active())
        self.finish()

    def shadow(self) -> bool:
        """Take part in an exchange without data of one's own; False once no rank has any."""
        active = self._active()
        if active:
            self._begin(active)
            self.finish()
        return bool(active)

    def _active(self) -> tuple[int, ...]:
        """Collective while ranks may run out of data: those that have some."""
        self.agree()
        size = self._communicator.size
        if not self.joining:
            return tuple(range(size))
        task = self._communicator.gather(torch.tensor([not self.exhausted]), [1] * size)
        flags = _world.wait(task, "the count of ranks that still have data")
        active = tuple(rank for rank, has_data in enumerate(flags) if has_data)
        self.last_active = active or self.last_active
        return active

    def _begin(self, active: tuple[int, ...]) -> None:
        """Collective: start a step of the ``active`` ranks."""
        assert self._buckets is not None
        self._graphs, self._root = set(), None
        self._step = Step(
            self._slots,
            self._buckets,
            Group(self._communicator, active),
            scale=self._loss_scale(),
            lane=self._lane,
            progress=self._progress,
            profile=self._profile,
            around=None if self.observer is None else self.observer.begins(),
        )
        _world.get().open_engines.append(self)

    def close_step(self, *, discard: bool = False) -> None:
        """End the step that is under way on this side, without waiting for other ranks."""
        if self._step is not None:
            self._step.close(self._rebuild, discard=discard)

    @torch.no_grad()
    def finish(self, *, discard: bool = False) -> None:
        """End the step that is under way, if any: afterwards all gradients are means."""
        if self._step is None:
            return
        self.close_step(discard=discard)
        step, self._step = self._step, None
        _world.get().open_engines.remove(self)
        self._held, self._held_passes = False, 0
        conclusion = step.finish()
        if conclusion.buckets is not None:
            self._use(conclusion.buckets)
        if self.observer is not None and self._buckets is not None:
            self.observer.ended(self._buckets)
        step.check(conclusion)
        if self.autopilot is not None and not conclusion.ballot.failed:
            self.autopilot.after_step(step)


def _inside_custom_backward() -> bool:
    """Whether this backward run was started by another one (reentrant checkpointing)."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CUSTOM_BACKWARD:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
