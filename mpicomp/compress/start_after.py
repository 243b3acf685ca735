"""Plain means for the first steps, while gradients change too fast to be compressed well.

Reference: T. Vogels et al., "PowerSGD", NeurIPS 2019, whose implementations begin to compress after
a number of steps.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from .base import Bucket, Capabilities, Compressor, Exchange, Exchanged, State
from .scalars import count_step, step_of, steps
from .sparse import average_all
from .wrapper import Wrapper


@dataclass(frozen=True)
class StartAfter(Wrapper):
    """Exchanges plain means for the first ``steps`` steps, then does what ``inner`` does.

    State: slot ``dense_steps``, per parameter the number of steps taken.

    Args:
        inner: any compressor that does not apply momentum itself.
        steps: how many steps go without compression, at least 1.
    """

    inner: Compressor
    steps: int

    spec_options: ClassVar = {"steps": "start_after"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"start_after: steps must be an integer from 1 up, got {self.steps!r}")
        if self.inner.capabilities.own_feedback:
            raise ValueError(
                "start_after: inner must leave memory and momentum to others, got "
                f"{self.inner!r}; use its density warm-up (warmup=1,warmup_steps={self.steps})"
            )

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(self.inner.capabilities, stateful=True)

    def init(self, bucket: Bucket) -> State:
        return {**self.inner.init(bucket), "dense_steps": steps(bucket)}

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        if step_of(state, "dense_steps") >= self.steps:
            return (yield from self.inner.exchange(bucket, state))
        outcome = yield from average_all(bucket)
        return Exchanged(
            mean=outcome.mean,
            sent=outcome.sent,
            commit=lambda skip: count_step(state, skip, "dense_steps"),
        )
