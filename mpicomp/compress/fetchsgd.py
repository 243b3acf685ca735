"""FetchSGD: momentum and error feedback inside the sketch, so a rank keeps nothing of its own.

Reference: D. Rothchild, A. Panda, E. Ullah, N. Ivkin, I. Stoica, V. Braverman, J. Gonzalez and
R. Arora, "FetchSGD: Communication-Efficient Federated Learning with Sketching", ICML 2020,
algorithm 1, with momentum factor masking and the learning rate left outside the memory. What was
applied is not subtracted from the error, as the paper has it: its columns are set to zero, as in
the authors' experiments. An estimate that is mostly noise of its columns would otherwise leave
more behind than there was, and training diverges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Bucket, Capabilities, Dense, Exchange, Exchanged, Mean, State
from .count_sketch import MIN_COLUMNS, CountSketch, check_table, heaviest
from .draws import agreed_seed, generator, no_seed
from .registry import register
from .scalars import set_scalar
from .velocity import MomentumSparsifier


@register("fetchsgd")
@dataclass(frozen=True)
class FetchSGD(MomentumSparsifier):
    """The ``int(density * n)`` = k largest of all elements, as the tables of all ranks show them.

    The ranks add up a Count-Sketch of each parameter's gradient. Momentum and what has not been
    applied yet are tables too, equal on all ranks; the k largest estimates over all parameters
    are the mean, and are taken out of the tables again. Vectors (biases, norms), and parameters
    whose tables would be no smaller, travel uncompressed with ordinary momentum.

    State: slot ``sketch_momentum``, per parameter a table (rows, columns), or of the parameter's
    own length if it is uncompressed; slot ``sketch_error``, a table for the others; slot
    ``seed``. All are equal on all ranks.

    Args:
        density: fraction of elements kept, in (0, 1].
        rows: of the tables, odd.
        width: columns of a table, as a fraction of the parameter's elements, in (0, 1]; at least
            32 columns.
        momentum: in [0, 1); applied to the tables, so the optimizer must not apply its own.
        seed: of places and signs, which stay; that of rank 0 counts.
    """

    density: float = 0.01
    rows: int = 5
    width: float = 0.1
    momentum: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_table("fetchsgd", rows=self.rows, momentum=self.momentum)
        if not 0.0 < self.width <= 1.0:
            raise ValueError(f"fetchsgd: width must be in (0, 1], got {self.width!r}")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            biased=True,
            stateful=True,
            linear=True,
            rounds=1,  # and the seed, once
            conserves=False,
            own_feedback=True,
            momentum=self.momentum > 0,
        )

    def uncompressed(self) -> FetchSGD:
        return dataclasses.replace(self, width=1.0)

    def init(self, bucket: Bucket) -> State:
        dtype = self.bucket_dtype(bucket.flat.dtype)
        momentum, error = {}, {}
        for entry in bucket.entries:
            if self.goes_dense(entry.shape):
                momentum[entry.name] = bucket.flat.new_zeros(entry.numel, dtype=dtype)
            else:
                shape = (self.rows, self._num_columns(entry.numel))
                momentum[entry.name] = bucket.flat.new_zeros(shape, dtype=dtype)
                error[entry.name] = bucket.flat.new_zeros(shape, dtype=dtype)
        return {"sketch_momentum": momentum, "sketch_error": error, "seed": no_seed(bucket)}

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        seed = yield from agreed_seed(self.seed, state)
        sketches = self._sketches(bucket, seed)
        answers = yield Mean(
            tuple(
                sketches[name].encode(part) if name in sketches else part.clone()
                for name, part in parts_of(bucket).items()
            )
        )
        momentum = {
            name: torch.add(answer, state["sketch_momentum"][name], alpha=self.momentum)
            for name, answer in zip(bucket, answers, strict=True)
        }
        error = {name: state["sketch_error"][name] + momentum[name] for name in sketches}
        mean = self._unsketch(bucket, sketches, momentum, error)

        def commit(skip: frozenset[str]) -> None:
            parts = parts_of(mean)
            for name, sketch in sketches.items():
                touched = sketch.encode(parts[name]) != 0
                error[name][touched] = 0.0
                momentum[name][touched] = 0.0
            for slot, tables in (("sketch_momentum", momentum), ("sketch_error", error)):
                for name in tables.keys() - skip:
                    state[slot][name].copy_(tables[name])
            set_scalar(state, "seed", seed, skip)

        outcome = Dense(mean.flat)
        return Exchanged(mean=outcome, sent=outcome, commit=commit)

    def dense_is_cheaper(self, numel: int, element_bytes: int, *, size: int) -> bool:
        return self.rows * self._num_columns(numel) >= numel

    def _num_columns(self, numel: int) -> int:
        return max(round(self.width * numel), MIN_COLUMNS)

    def _sketches(self, bucket: Bucket, seed: int) -> dict[str, CountSketch]:
        """For each parameter that has tables, its places and signs: the same in every step."""
        return {
            entry.name: CountSketch.draw(
                entry.numel,
                rows=self.rows,
                columns=self._num_columns(entry.numel),
                generator=generator("fetchsgd", seed, entry.name),
            )
            for entry in bucket.entries
            if not self.goes_dense(entry.shape)
        }

    def _unsketch(
        self,
        bucket: Bucket,
        sketches: Mapping[str, CountSketch],
        momentum: Mapping[str, Tensor],
        error: Mapping[str, Tensor],
    ) -> Bucket:
        """The momentum where it is no table; elsewhere the k largest estimates of the error."""
        mean = bucket.like(self.bucket_dtype(bucket.flat.dtype))
        parts = parts_of(mean)
        for name, sketch in sketches.items():
            parts[name].copy_(sketch.query(error[name]))
        best = heaviest(mean.flat, self.num_kept(sum(s.numel for s in sketches.values())))
        estimates = mean.flat[best]
        mean.flat.zero_()[best] = estimates
        for name in momentum.keys() - sketches.keys():
            parts[name].copy_(momentum[name])
        return mean


def parts_of(bucket: Bucket) -> dict[str, Tensor]:
    """The parameters as 1-d views, in the order of memory."""
    parts = bucket.flat.split([entry.numel for entry in bucket.entries])
    return dict(zip(bucket, parts, strict=True))
