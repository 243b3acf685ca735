"""Which compressor for which bucket, by predicted steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpicomp.predict.events import Load, Step, run
from mpicomp.predict.network import Network
from mpicomp.predict.timeline import Timeline

DENSE = "none"
LEAST_GAIN = 0.03  # of a step; for less nobody should give up exact gradients
LEAST_CHANGE = 0.002  # for which one bucket is treated otherwise than the rest

Options = Sequence[Mapping[str, Sequence[Load]]]
"""For each bucket of the exchange without compression, what each compressor makes of it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A compressor for each bucket, and the step that follows."""

    methods: tuple[str, ...]
    step: Step


@dataclass(frozen=True, slots=True)
class Model:
    """What a prediction needs besides the buckets."""

    timeline: Timeline
    network: Network
    contention: float

    def predict(self, options: Options, methods: Sequence[str]) -> Step:
        """The step with ``methods``, one for each bucket."""
        buckets = [load for of, name in zip(options, methods, strict=True) for load in of[name]]
        return run(self.timeline, buckets, self.network, contention=self.contention)

    def uniform(self, options: Options) -> dict[str, Step]:
        """The step with each compressor for all buckets."""
        names = list(options[0]) if options else [DENSE]
        return {name: self.predict(options, [name] * len(options)) for name in names}

    def choose(self, options: Options) -> Choice:
        """The methods of the shortest step; without compression unless that gains enough.

        The best of those that treat all buckets alike is the start; then each bucket in turn, the
        last to leave first, may go another way if the step gets shorter: one that is hidden behind
        the backward pass need not be compressed.
        """
        uniform = self.uniform(options)
        dense = uniform[DENSE]
        start = min(uniform, key=lambda name: uniform[name].seconds)
        methods, best = [start] * len(options), uniform[start]
        for index in reversed(range(len(options))):
            for name in options[index]:
                trial = [*methods[:index], name, *methods[index + 1 :]]
                step = self.predict(options, trial)
                margin = -LEAST_CHANGE if name == DENSE else LEAST_CHANGE
                if step.seconds < best.seconds - margin * dense.seconds:
                    methods, best = trial, step
        if best.seconds > (1 - LEAST_GAIN) * dense.seconds:
            return Choice((DENSE,) * len(options), dense)
        return Choice(tuple(methods), best)
