"""A training step as events: gradients arrive, buckets leave one after another, the step ends.

The model of the engine (`mpicomp.engine`, `mpicomp.progress`): a bucket is handed over when its
last gradient has come; one thread encodes, sends and decodes bucket after bucket, while the
backward pass goes on; the step ends when both have. Where a rank has no core to spare for that
thread, the time in which it computes is missing from the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpicomp.fusion import Plan
from mpicomp.predict.methods import Cost
from mpicomp.predict.network import Network
from mpicomp.predict.timeline import Timeline

BALLOT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Load:
    """A bucket to exchange: when its last gradient comes, and what it costs.

    Attributes:
        ready_seconds: from the beginning of the backward pass.
        cost: of its compressor.
    """

    ready_seconds: float
    cost: Cost


@dataclass(frozen=True, slots=True)
class Step:
    """A predicted step.

    Attributes:
        seconds: all of it.
        compute_seconds: without any exchange.
        encode_seconds, communicate_seconds, decode_seconds: of all buckets, hidden or not.
        exposed_seconds: from the end of the backward pass until the last bucket is done.
    """

    seconds: float
    compute_seconds: float
    encode_seconds: float
    communicate_seconds: float
    decode_seconds: float
    exposed_seconds: float

    @property
    def overhead_seconds(self) -> float:
        return self.seconds - self.compute_seconds


def loads(timeline: Timeline, plans: Sequence[Plan], costs: Sequence[Cost]) -> list[Load]:
    """Each bucket of ``plans``, which are in the order in which they leave, with its cost."""
    return [
        Load(max(timeline.arrivals.get(entry.name, 0.0) for entry in plan.entries), cost)
        for plan, cost in zip(plans, costs, strict=True)
    ]


def run(
    timeline: Timeline, buckets: Sequence[Load], network: Network, *, contention: float
) -> Step:
    """The step that follows from the backward pass and the buckets.

    Args:
        timeline: of a step without exchange.
        buckets: in the order in which they leave.
        network: of the ranks that train.
        contention: the share of the exchange's computing that the backward pass loses: 0 where it
            has a core of its own, 1 where both share one.
    """
    late = free = encode = communicate = decode = 0.0
    for bucket in buckets:
        cost = bucket.cost
        late += cost.accumulate_seconds
        start = max(bucket.ready_seconds + late, free)
        on_wire = sum(network.seconds(c.kind, c.num_bytes) for c in cost.collectives)
        working = cost.encode_seconds + cost.decode_seconds
        free = start + working + on_wire
        left = max(0.0, timeline.backward_seconds + late - start)
        late += contention * min(working, left)
        encode += cost.encode_seconds
        communicate += on_wire
        decode += cost.decode_seconds
    end = timeline.backward_seconds + late
    ballot = network.seconds("all-reduce", BALLOT_BYTES)
    exposed = max(0.0, free - end) + ballot
    return Step(
        timeline.outside_seconds + end + exposed,
        timeline.step_seconds,
        encode,
        communicate,
        decode,
        exposed,
    )
