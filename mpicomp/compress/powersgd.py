"""PowerSGD: every gradient matrix as a product of two thin ones, by steps of power iteration.

Reference: T. Vogels, S. P. Karimireddy and M. Jaggi, "PowerSGD: Practical Low-Rank Gradient
Compression for Distributed Optimization", NeurIPS 2019, algorithm 1 (algorithm 2 is the error
feedback around it; the residual is taken against the mean, as in the authors' experiments).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import Bucket, Capabilities, Exchange, Exchanged, Mean, State
from .draws import agreed_seed, no_seed
from .lowrank import (
    LowRank,
    LowRankMethod,
    drawn,
    matrices,
    orthonormal,
    product,
    renewed,
    scaled,
    widened,
)
from .registry import register
from .scalars import set_scalar, steps


@register("powersgd")
@dataclass(frozen=True)
class PowerSGD(LowRankMethod):
    """A rank-``rank`` approximation of the mean of each matrix, in two rounds per iteration.

    State: slot ``q``, per parameter the right factor (m, r) of an (n, m) matrix, equal on all
    ranks; slot ``step``, per parameter the number of steps taken; slot ``seed``.

    Args:
        rank: rank of the approximation, at least 1; clipped to the sides of each matrix.
        error_feedback: whether what was not sent is carried to the next step.
        seed: of the first right factors; that of rank 0 counts.
        warm_start: begin each step with the last right factor, not with a random one.
        iterations: of the power method in each step, at least 1.
        local_residual: carry what the own projection lacks, not what the mean lacks.
        min_compression_rate: matrices go dense where this many times what is sent is no less
            than the matrix; 0 compresses all.
    """

    rank: int = 2
    error_feedback: bool = True
    seed: int = 0
    warm_start: bool = True
    iterations: int = 1
    local_residual: bool = False
    min_compression_rate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.iterations, int) or self.iterations < 1:
            raise ValueError(
                f"powersgd: iterations must be an integer from 1 up, got {self.iterations!r}"
            )

    @property
    def capabilities(self) -> Capabilities:
        rounds = 2 * self.iterations  # and one in a bucket's first step, for the seed
        return Capabilities(biased=True, stateful=True, linear=True, rounds=rounds, min_ndim=2)

    def num_sent(self, n: int, m: int) -> int:
        return self.iterations * min(n, m, self.rank) * (n + m)

    def init(self, bucket: Bucket) -> State:
        right = self.factors(bucket, side=1)
        return {"q": right, "step": steps(bucket), "seed": no_seed(bucket)}

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        seed = yield from agreed_seed(self.seed, state)
        names, wide = matrices(bucket), widened(bucket)
        grads = [wide.matrix(name) for name in names]  # (n, m)
        qs = [self._first(name, state, seed) for name in names]  # (m, r)
        for iteration in range(self.iterations):
            if iteration > 0:
                qs = [scaled(q)[0] for q in qs]
            ps = yield Mean(tuple(map(product, grads, qs)))
            ps = orthonormal(ps)  # (n, r)
            own = [product(grad.mT, p) for grad, p in zip(grads, ps, strict=True)]
            qs = yield Mean(tuple(q.clone() for q in own))
        mean = LowRank(tuple(zip(names, ps, qs, strict=True)))
        sent = LowRank(tuple(zip(names, ps, own, strict=True))) if self.local_residual else mean

        def commit(skip: frozenset[str]) -> None:
            set_scalar(state, "seed", seed, skip)
            self._advance({name: q for name, _, q in mean.factors if name not in skip}, state, seed)

        return Exchanged(mean=mean, sent=sent, commit=commit)

    def _first(self, name: str, state: State, seed: int) -> Tensor:
        """The right factor that a step begins with."""
        q, step = state["q"][name], int(state["step"][name])
        return q if self.warm_start and step > 0 else drawn("powersgd", seed, step, name, q)

    def _advance(self, qs: dict[str, Tensor], state: State, seed: int) -> None:
        for name in qs:
            state["step"][name] += 1
        if not self.warm_start:
            return
        step = state["step"]
        fresh = renewed(qs, lambda name, q: drawn("powersgd", seed, int(step[name]), name, q))
        for name, q in fresh.items():
            state["q"][name].copy_(q)
