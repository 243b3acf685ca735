"""Predicted steps of one model, by compressor, number of ranks and bandwidth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mpicomp.bench.workload import Workload
from mpicomp.compress.rules import assign
from mpicomp.fusion import Plan, plan
from mpicomp.predict.choose import DENSE
from mpicomp.predict.events import Step, loads, run
from mpicomp.predict.methods import Cost, measure
from mpicomp.predict.network import Network
from mpicomp.predict.timeline import Timeline, record

NARROWEST, WIDEST = 0.1, 400.0  # Gb/s
HALVINGS = 40


def record_workload(workload: Workload, steps: int) -> tuple[Timeline, dict[str, Tensor]]:
    """The timeline of training steps without exchange, and its gradients but sparse ones."""
    grads: dict[str, Tensor] = {}
    named = [(n, p) for n, p in workload.model.named_parameters() if p.requires_grad]

    def update() -> None:
        grads.update({name: p.grad.clone() for name, p in named if p.grad is not None})
        workload.update()

    timeline = record(named, workload.next_loss, update, steps=steps)
    missing = {name: torch.zeros_like(p) for name, p in named if name not in grads}
    placed = {name: g for name, g in {**grads, **missing}.items() if not g.is_sparse}
    return timeline, placed


@dataclass
class Forecast:
    """Predicts; costs of compressors are measured when they are first asked for.

    Attributes:
        timeline: of a step without exchange.
        grads: real gradients to measure compressors on, by name.
        params: names and parameters, in order of registration.
        bucket_bytes: size at which a bucket is full.
        contention: see `predict.events.run`.
    """

    timeline: Timeline
    grads: Mapping[str, Tensor]
    params: Sequence[tuple[str, nn.Parameter]]
    bucket_bytes: float
    contention: float
    _plans: dict[str, list[Plan]] = field(default_factory=dict)
    _costs: dict[tuple[str, int], list[Cost]] = field(default_factory=dict)

    def plans(self, compression: str) -> list[Plan]:
        """The buckets that the engine would make, in the order in which gradients arrive."""
        if compression not in self._plans:
            by_name = {name: param.data for name, param in self.params if name in self.grads}
            methods = assign(
                compression, [(n, tuple(p.shape), p.dtype) for n, p in by_name.items()]
            )
            ordered = [
                (name, by_name[name]) for name in self.timeline.arrivals if name in self.grads
            ]
            self._plans[compression] = plan(ordered, methods, self.bucket_bytes)
        return self._plans[compression]

    def costs(self, compression: str, ranks: int) -> list[Cost]:
        """Of each bucket."""
        key = compression, ranks
        if key not in self._costs:
            plans = self.plans(compression)
            self._costs[key] = [measure(p, self.grads, ranks) for p in plans]
        return self._costs[key]

    def step(self, compression: str, network: Network) -> Step:
        """The step of all ranks of ``network``."""
        plans, costs = self.plans(compression), self.costs(compression, network.ranks)
        buckets = loads(self.timeline, plans, costs)
        return run(self.timeline, buckets, network, contention=self.contention)

    def speedup(self, compression: str, network: Network) -> float:
        """How many times shorter the step is than without compression."""
        return self.step(DENSE, network).seconds / self.step(compression, network).seconds

    def break_even(self, compression: str, network: Network) -> float | None:
        """The bandwidth in Gb/s up to which it pays; None if it does not at the lowest of all.

        Infinite if it pays at the highest; between `NARROWEST` and `WIDEST`, by bisection.
        """

        def pays(gigabits: float) -> bool:
            return self.speedup(compression, network.with_link(gigabits=gigabits)) > 1.0

        if not pays(NARROWEST):
            return None
        if pays(WIDEST):
            return math.inf
        low, high = math.log(NARROWEST), math.log(WIDEST)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if pays(math.exp(middle)) else (low, middle)
        return math.exp(low)
