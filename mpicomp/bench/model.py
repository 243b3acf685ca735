"""Where the time of a training step goes, phase by phase.

Every compressor trains a model of its own, in two ways that take turns. *In a row*: the exchange
begins when the backward pass is over, so that phases do not overlap and add up to the step; on a
GPU the device is synchronised at every border between phases. *Overlapped*: as in training; what
the step is then shorter by was hidden behind the backward pass.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpicomp import world as _world
from mpicomp.bench.workload import Workload, load
from mpicomp.optimizer import DistributedOptimizer
from mpicomp.predict.timeline import now

PHASES = (
    "data",
    "forward",
    "backward",
    "accumulate",
    "encode",
    "values",
    "indices",
    "decode",
    "waiting",
    "optimizer",
)
"""In the order in which they happen; `values` and `indices` are communication."""


@dataclass
class Side:
    """One compressor, and what was measured of it."""

    compression: str
    workload: Workload
    optimizer: DistributedOptimizer

    @classmethod
    def make(cls, model: str, compression: str) -> Side:
        workload = load(model)
        assert workload.optimizer is not None
        optimizer = DistributedOptimizer(
            workload.optimizer, compression=compression, model=workload.model
        )
        return cls(compression, workload, optimizer)

    def now(self) -> float:
        return now(self.workload.device)

    def step_in_a_row(self) -> dict[str, float]:
        """Seconds of each phase of one step."""
        before = _world.stats()
        marks = [self.now()]
        batch = self.workload.next_batch()
        marks.append(self.now())
        loss = self.workload.loss_of(batch)
        marks.append(self.now())
        with self.optimizer.no_sync():
            loss.backward()
        marks.append(self.now())
        self.optimizer.synchronize()
        marks.append(self.now())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(self.now())
        data, forward, backward, exchange, update = (
            end - start for start, end in itertools.pairwise(marks)
        )
        spent = _world.stats() - before
        known = spent.accumulate_seconds + spent.worked_seconds
        return {
            "data": data,
            "forward": forward,
            "backward": backward,
            "accumulate": spent.accumulate_seconds,
            "encode": spent.encode_seconds,
            "values": spent.communicate_seconds - spent.index_seconds,
            "indices": spent.index_seconds,
            "decode": spent.decode_seconds,
            "waiting": max(0.0, exchange - known),
            "optimizer": update,
        }

    def step_overlapped(self) -> float:
        """Seconds of one step as it is in training."""
        start = self.now()
        self.workload.next_loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.now() - start


def measure(model: str, compressions: Sequence[str], *, rounds: int, steps: int) -> list[Any]:
    """Collective: a row of medians for each compressor, all in turns.

    Args:
        model: ``MODULE:FACTORY``.
        compressions: specs.
        rounds: turns.
        steps: of each kind in a turn.
    """
    sides = [Side.make(model, compression) for compression in compressions]
    phases: list[list[dict[str, float]]] = [[] for _ in sides]
    overlapped: list[list[float]] = [[] for _ in sides]
    sent: list[float] = [0.0] * len(sides)
    for side in sides:
        for _ in range(2):  # buckets are rebuilt after the first step
            side.step_overlapped()
    for turn in range(rounds):
        for place in range(len(sides)):
            index = (place + turn) % len(sides)
            side, before = sides[index], _world.stats()
            _world.wait(_world.get().communicator.barrier(), "the start of a turn")
            phases[index] += [side.step_in_a_row() for _ in range(steps)]
            overlapped[index] += [side.step_overlapped() for _ in range(steps)]
            done = _world.stats() - before
            sent[index] = done.bytes_sent / max(done.steps, 1)
    rows = []
    for index, side in enumerate(sides):
        row = summarise(phases[index], overlapped[index])
        rows.append({"compression": side.compression, "bytes_sent": sent[index], **row})
    return rows


def summarise(phases: Sequence[dict[str, float]], overlapped: list[float]) -> dict[str, Any]:
    """Milliseconds: medians over steps, quartiles of the overlapped step, and what was hidden."""
    medians = {name: 1e3 * statistics.median(step[name] for step in phases) for name in PHASES}
    in_a_row = 1e3 * statistics.median(sum(step.values()) for step in phases)
    step = 1e3 * statistics.median(overlapped)
    low, _, high = statistics.quantiles(overlapped * 2, n=4)  # of a single step, too
    exchange = sum(medians[name] for name in PHASES[3:9])
    hidden = min(1.0, max(0.0, (in_a_row - step) / exchange)) if exchange else 0.0
    return {
        "phases_ms": medians,
        "in_a_row_ms": in_a_row,
        "step_ms": step,
        "quartiles_ms": [1e3 * low, 1e3 * high],
        "hidden": hidden,
    }
