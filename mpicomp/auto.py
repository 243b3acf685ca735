"""``compression="auto"``: the ranks find out in training which compressors pay, if any.

The first steps go without compression and are timed. Then the network is measured, and every
candidate on real gradients; the model behind `mpicomp.advise` predicts the step for each, and for
the best mixture over buckets. Those that are predicted to come near the best are tried for a few
steps each, and the one that was really the fastest stays. Rank 0 decides for all. A step that later
takes 30 % more or less than it did means that something has changed: all begins anew.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from mpicomp import world as _world
from mpicomp.compress.rules import Compression, assign, resolve
from mpicomp.fusion import Plan, plan
from mpicomp.predict import measure
from mpicomp.predict.choose import DENSE, Model
from mpicomp.predict.events import Load, loads
from mpicomp.predict.methods import measure as measure_cost
from mpicomp.predict.timeline import Timeline

if TYPE_CHECKING:
    from mpicomp.engine import Engine
    from mpicomp.step import Slot, Step

T = TypeVar("T")
log = logging.getLogger("mpicomp")

CANDIDATES = ("bf16", "int8", "powersgd:rank=2", "topk:density=0.01", "onebit")
SETTLING_STEPS = 2  # after other buckets were made, before steps are timed
TIMED_STEPS = 5
STEADY_STEPS = 20  # between two looks at a choice that stays
DEVIATION = 0.3  # from what was expected, at which all begins anew if it is seen twice
DOUBT = 0.15  # of a prediction: what is predicted to be so much slower than dense may be faster
MOST_TRIALS = 3
LEAST_TRIED_GAIN = 0.05  # of a step, in a trial, for which gradients are compressed
PROBES = [1 << shift for shift in (10, 16, 20, 22)]  # bytes of the collectives that are timed

Methods = tuple[str, ...]  # of each bucket of the exchange without compression


@dataclass(frozen=True)
class Auto:
    """Whatever makes steps shortest: compressors are chosen per bucket, in training.

    Args:
        candidates: specs to choose from, besides ``"none"``; those that the model can bear.
    """

    candidates: tuple[str, ...] = CANDIDATES

    def __init__(self, *candidates: str) -> None:
        object.__setattr__(self, "candidates", candidates or CANDIDATES)
        for spec in self.candidates:
            for _, compressor in resolve(spec):
                if compressor.capabilities.momentum:
                    raise ValueError(
                        f"auto: candidates must not apply momentum themselves, got {spec!r}; the "
                        "optimizer's own could not be turned off and on with it"
                    )


def as_auto(compression: object) -> Auto | None:
    """`Auto` if that is what the argument of an optimizer asks for."""
    if isinstance(compression, str) and compression == "auto":
        return Auto()
    return compression if isinstance(compression, Auto) else None


def without_auto(compression: Compression | Auto) -> Compression:
    """What is exchanged until something is chosen: without compression, if anything is."""
    return DENSE if isinstance(compression, Auto) or compression == "auto" else compression


@dataclass(slots=True)
class Trial:
    """A choice, what a step was predicted to take, and what it took."""

    methods: Methods
    predicted: float
    measured: float | None = None

    @property
    def seconds(self) -> float:
        return self.predicted if self.measured is None else self.measured


class Autopilot:
    """Told after every exchange; all ranks count alike, and rank 0 decides.

    Args:
        engine: whose compressors to choose.
        auto: the candidates.
        bucket_bytes: size at which a bucket is full.
    """

    clock = staticmethod(time.perf_counter)

    def __init__(self, engine: Engine, auto: Auto, *, bucket_bytes: float) -> None:
        self._engine, self._auto, self._bucket_bytes = engine, auto, bucket_bytes
        self.restart()

    def restart(self) -> None:
        """Begin anew, without compression."""
        self._dense_plans: list[Plan] = []
        self._trials: list[Trial] = []
        self._current: Trial | None = None
        self._steady = self._deviates = False
        self._watch()

    def _watch(self, steps: int = TIMED_STEPS) -> None:
        self._periods: list[float] = []
        self._timelines: list[Timeline] = []
        self._to_skip, self._wanted = SETTLING_STEPS, steps
        self._ended_at = self.clock()

    def after_step(self, step: Step) -> None:
        """Collective at the same steps on all ranks."""
        now = self.clock()
        period, self._ended_at = now - self._ended_at, now
        filled = {name: slot for name, slot in self._engine.placed().items() if slot.filled}
        if self._engine.joining or not filled:  # no times to tell, or nothing to compress
            return
        if self._to_skip:
            self._to_skip -= 1
            return
        self._periods.append(period)
        if not self._trials:
            self._timelines.append(timeline_of(step, filled, now, period))
        if len(self._periods) == self._wanted:
            self._conclude(undisturbed(self._periods))

    # --------------------------------------------------------------------------- decisions

    def _conclude(self, seconds: float) -> None:
        """A window of steps is over."""
        seconds = self._from_rank_0(seconds)
        if not self._trials:
            self._plan_trials(seconds)
        elif self._steady:
            assert self._current is not None
            expected = self._current.seconds
            before, self._deviates = self._deviates, abs(seconds / expected - 1) > DEVIATION
            if before and self._deviates:  # twice: it is no disturbance that passes
                self._say(
                    f"a step takes {1e3 * seconds:.1f} ms, not {1e3 * expected:.1f} ms as before: "
                    "choosing anew"
                )
                self._engine.recompress({})
                self.restart()
                return
        else:
            assert self._current is not None
            self._current.measured = seconds
        self._go_on()

    def _go_on(self) -> None:
        """Try what is still to be tried, or stay with what was fastest."""
        untried = [trial for trial in self._trials if trial.measured is None]
        if untried and not self._steady:
            self._use(untried[0])
            self._watch()
            return
        if not self._steady:
            self._settle()
        self._watch(STEADY_STEPS)

    def _settle(self) -> None:
        dense = self._trials[0]
        best = min(self._trials, key=lambda trial: trial.seconds)
        if best.seconds > (1 - LEAST_TRIED_GAIN) * dense.seconds:
            best = dense
        self._use(best)
        self._steady = True
        tried = ", ".join(
            f"{describe(trial.methods)} {1e3 * trial.seconds:.1f} ms "
            f"(predicted {1e3 * trial.predicted:.1f})"
            for trial in self._trials
        )
        count = len(best.methods)
        buckets = f"{count} bucket{'s' if count > 1 else ''}"
        self._say(f"{describe(best.methods)} for {buckets}; a step took: {tried}")

    def _use(self, trial: Trial) -> None:
        if self._current is not trial:
            names = [[entry.name for entry in p.entries] for p in self._dense_plans]
            self._engine.recompress(
                {n: spec for of, spec in zip(names, trial.methods, strict=True) for n in of}
            )
        self._current = trial

    # -------------------------------------------------------------------------- predictions

    def _plan_trials(self, seconds: float) -> None:
        """List what is worth a trial: what is predicted to come near the best."""
        self._dense_plans = self._engine.plans
        dense = (DENSE,) * len(self._dense_plans)
        found = self.forecast(middle(self._timelines), self._dense_plans)
        limit = min((1 + DOUBT) * found[dense], (1 + DEVIATION) * min(found.values()))
        near = sorted((m for m in found if found[m] < limit and m != dense), key=found.__getitem__)
        trials = [Trial(methods, found[methods]) for methods in near[:MOST_TRIALS]]
        self._trials = self._from_rank_0([Trial(dense, found[dense], seconds), *trials])
        self._current = self._trials[0]

    def forecast(self, timeline: Timeline, plans: Sequence[Plan]) -> dict[Methods, float]:
        """Collective: seconds of a step with each candidate, and with the best mixture."""
        slots = self._engine.placed()
        grads = {
            name: torch.zeros_like(slot.param)
            if slot.param.grad is None
            else slot.param.grad.nan_to_num(0.0, 0.0, 0.0)  # a bad step's are of no use
            for name, slot in slots.items()
        }
        network = measure.measure(PROBES).network
        model = Model(timeline, network, measure.contention())
        options: list[dict[str, list[Load]]] = []
        for p in plans:
            options.append({})
            for spec in (DENSE, *self._auto.candidates):
                parts = self._plans_of(p, slots, spec)
                costs = [measure_cost(part, grads, _world.size(), repeats=2) for part in parts]
                options[-1][spec] = loads(timeline, parts, costs)
        choice = model.choose(options)
        found = {
            (name,) * len(plans): step.seconds for name, step in model.uniform(options).items()
        }
        return {**found, choice.methods: choice.step.seconds}

    def _plans_of(self, dense: Plan, slots: Mapping[str, Slot], spec: str) -> list[Plan]:
        """The buckets that one bucket becomes with another compressor."""
        params = [(entry.name, slots[entry.name].param.detach()) for entry in dense.entries]
        methods = assign(spec, [(name, tuple(p.shape), p.dtype) for name, p in params])
        return plan(params, methods, self._bucket_bytes)

    @staticmethod
    def _from_rank_0(value: T) -> T:
        result: T = _world.get().communicator.comm.bcast(value)
        return result

    @staticmethod
    def _say(text: str) -> None:
        if _world.rank() == 0:
            log.warning("compression auto: %s", text)


def undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile: what else happens on a machine only adds to a step."""
    return sorted(seconds)[len(seconds) // 4]


def timeline_of(step: Step, slots: Mapping[str, Slot], now: float, period: float) -> Timeline:
    """What a step that took ``period`` seconds until ``now`` would be without its exchange.

    The backward pass begins with the first gradient: what it does before belongs to the rest.
    """
    first = min(slot.arrived_at for slot in slots.values())
    backward = step.closed_at - first
    outside = period - (now - first)
    arrivals = {name: slot.arrived_at - first for name, slot in slots.items()}
    return Timeline(max(0.0, outside), backward, arrivals)


def middle(timelines: Sequence[Timeline]) -> Timeline:
    """Medians of each time."""
    names = timelines[-1].arrivals
    return Timeline(
        statistics.median(t.outside_seconds for t in timelines),
        statistics.median(t.backward_seconds for t in timelines),
        {name: statistics.median(t.arrivals.get(name, 0.0) for t in timelines) for name in names},
    )


def describe(methods: Methods) -> str:
    """``topk`` if all are alike, else how many buckets have which."""
    counts = {name: methods.count(name) for name in methods}
    if len(counts) == 1:
        return methods[0]
    return " + ".join(f"{count} x {name}" for name, count in counts.items())
