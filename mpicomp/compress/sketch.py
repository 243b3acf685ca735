"""Sketched-SGD: a small table shows all ranks where the mean is large; its exact values follow.

Reference: N. Ivkin, D. Rothchild, E. Ullah, V. Braverman, I. Stoica and R. Arora,
"Communication-efficient Distributed SGD with Sketching", NeurIPS 2019, algorithm 3.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from torch import Tensor

from .base import Bucket, Capabilities, Exchange, Exchanged, Mean, State
from .count_sketch import MIN_COLUMNS, CountSketch, check_table, heaviest
from .draws import agreed_seed, generator, no_seed
from .registry import register
from .scalars import count_step, set_scalar, step_of, steps
from .sparse import Sparse
from .velocity import MomentumSparsifier, Ranges, exchange_velocity, init_velocity, load_velocity_


@register("sketch")
@dataclass(frozen=True)
class Sketch(MomentumSparsifier):
    """The ``int(density * n)`` = k largest elements of the mean of all ranks' velocities.

    The ranks add up a Count-Sketch of what they have; its ``candidates * k`` largest estimates
    say where to add up exact values, and the k largest of these are the mean. No indices travel:
    equal tables give equal candidates. Places and signs are drawn anew in each step, so that no
    element has bad luck for long. Vectors (biases, norms), and all of a bucket where this is no
    smaller, travel uncompressed with ordinary momentum.

    State: slots ``momentum`` and ``velocity``, the rank's own; slots ``seed`` and ``step``.

    Args:
        density: fraction of elements kept, in (0, 1].
        rows: of the table, odd.
        columns: of the table, per kept element; at least 32 altogether.
        candidates: how many exact values are compared, per kept element, at least 1.
        momentum: in [0, 1); applied before sketching, so the optimizer must not apply its own.
        seed: of places and signs; that of rank 0 counts.
    """

    density: float = 0.01
    rows: int = 5
    columns: float = 2.0
    candidates: int = 4
    momentum: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_table("sketch", rows=self.rows, momentum=self.momentum)
        if not 0.0 < self.columns < math.inf:
            raise ValueError(f"sketch: columns must be finite and above 0, got {self.columns!r}")
        if not isinstance(self.candidates, int) or self.candidates < 1:
            raise ValueError(
                f"sketch: candidates must be an integer from 1 up, got {self.candidates!r}"
            )

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            biased=True,
            stateful=True,
            linear=True,
            rounds=3,  # vectors, table, exact values; and the seed, once
            conserves=self.momentum == 0.0,
            own_feedback=True,
            momentum=self.momentum > 0,
        )

    def uncompressed(self) -> Sketch:
        return dataclasses.replace(self, density=1.0)

    def init(self, bucket: Bucket) -> State:
        return {**init_velocity(bucket), "seed": no_seed(bucket), "step": steps(bucket)}

    def load_(
        self, bucket: Bucket, state: State, name: str, grad: Tensor | None, *, scale: float = 1.0
    ) -> None:
        load_velocity_(bucket, state, name, grad, scale=scale, momentum=self.momentum)

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        dense, rest = self.parts(bucket)
        return (
            yield from exchange_velocity(
                bucket,
                state,
                dense,
                lambda: self._send_heaviest(bucket, state, rest),
                momentum=self.momentum,
            )
        )

    def _send_heaviest(self, bucket: Bucket, state: State, rest: Ranges) -> Exchange:
        flat, kept = rest.take(bucket.flat), self.num_kept(rest.numel)
        seed = yield from agreed_seed(self.seed, state)
        sketch = CountSketch.draw(
            rest.numel,
            rows=self.rows,
            columns=self._num_columns(rest.numel),
            generator=generator("sketch", seed, step_of(state), bucket.entries[0].name),
        )
        (table,) = yield Mean((sketch.encode(flat),))  # (rows, columns)
        candidates = heaviest(sketch.query(table), min(self.candidates * kept, rest.numel))
        (exact,) = yield Mean((flat[candidates],))
        best = heaviest(exact, kept)
        indices = rest.positions(candidates[best])

        def commit(skip: frozenset[str]) -> None:
            set_scalar(state, "seed", seed, skip)
            count_step(state, skip)

        sent = Sparse(indices, bucket.flat[indices])
        return Exchanged(mean=Sparse(indices, exact[best]), sent=sent, commit=commit)

    def dense_is_cheaper(self, numel: int, element_bytes: int, *, size: int) -> bool:
        candidates = min(self.candidates * self.num_kept(numel), numel)
        return self.rows * self._num_columns(numel) + candidates >= numel

    def _num_columns(self, numel: int) -> int:
        return max(round(self.columns * self.num_kept(numel)), MIN_COLUMNS)
