"""Density warm-up: send more in the first epochs, by an explicit list.

Reference: Y. Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for
Distributed Training", ICLR 2018, section 3.3, with densities 0.25, 0.0625, 0.015625, 0.004, 0.001.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from .base import Bucket, Capabilities, Compressor, Exchange, Exchanged, State
from .scalars import count_step, step_of, steps
from .wrapper import Wrapper


@dataclass(frozen=True)
class Warmup(Wrapper):
    """Does what ``inner`` does, with another density at first.

    State: slot ``warmup_step``, per parameter the number of steps taken.

    Args:
        inner: a compressor with an option ``density``, which counts when the list is over.
        densities: one for each epoch of the warm-up, each in (0, 1].
        steps: how many optimizer steps an epoch has.
    """

    inner: Compressor
    densities: tuple[float, ...]
    steps: int

    spec_options: ClassVar = {"densities": "warmup", "steps": "warmup_steps"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not hasattr(self.inner, "density"):
            raise ValueError(
                f"warmup: inner must have an option density, got {self.inner!r}; put Warmup around "
                "the method itself, and other wrappers around Warmup"
            )
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"warmup: steps must be an integer from 1 up, got {self.steps!r}")
        if not isinstance(self.densities, tuple) or not self.densities:
            raise ValueError(
                f"warmup: densities must be a tuple of at least one number, got {self.densities!r}"
            )
        for density in self.densities:
            self._with(density)  # raises if it is not valid

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(self.inner.capabilities, stateful=True)

    def init(self, bucket: Bucket) -> State:
        return {**self.inner.init(bucket), "warmup_step": steps(bucket)}

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        step = step_of(state, "warmup_step")
        epoch = step // self.steps
        inner = self._with(self.densities[epoch]) if epoch < len(self.densities) else self.inner
        outcome = yield from inner.exchange(bucket, state)

        def commit(skip: frozenset[str]) -> None:
            outcome.commit(skip)
            count_step(state, skip, "warmup_step")

        return Exchanged(mean=outcome.mean, sent=outcome.sent, commit=commit)

    def _with(self, density: float) -> Compressor:
        inner: Any = self.inner
        changed: Compressor = dataclasses.replace(inner, density=density)
        return changed
