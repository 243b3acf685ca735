"""ACP-SGD: PowerSGD that sends one factor per step, the left and the right one by turns.

Reference: L. Zhang, L. Zhang, S. Shi, X. Chu and B. Li, "Evaluation and Optimization of Gradient
Compression for Distributed Deep Learning", ICDCS 2023 (alternate compressed Power-SGD). As there,
the residual is what the own projection lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import Bucket, Capabilities, Exchange, Exchanged, Mean, State
from .draws import agreed_seed, no_seed
from .lowrank import LowRank, LowRankMethod, drawn, matrices, orthonormal, product, renewed, widened
from .registry import register
from .scalars import set_scalar, steps


@register("acpsgd")
@dataclass(frozen=True)
class ACPSGD(LowRankMethod):
    """A rank-``rank`` approximation of the mean of each matrix, in one round.

    In even steps (0, 2, ...) the right factor of the last step is fixed and the left one is sent,
    in odd steps it is the other way round.

    State: slots ``p`` and ``q``, per parameter the left (n, r) and the right factor (m, r) of an
    (n, m) matrix, equal on all ranks; slot ``step``, per parameter the number of steps taken, so
    that a parameter's turn does not depend on its bucket; slot ``seed``.

    Args:
        rank: rank of the approximation, at least 1; clipped to the sides of each matrix. The
            default makes the messages as large as PowerSGD's with its own default.
        error_feedback: whether what was not sent is carried to the next step.
        seed: of the first right factors; that of rank 0 counts.
        min_compression_rate: matrices go dense where this many times the larger factor is no
            less than the matrix; 0 compresses all.
    """

    rank: int = 4
    error_feedback: bool = True
    seed: int = 0
    min_compression_rate: float = 1.0

    capabilities: ClassVar[Capabilities] = Capabilities(
        biased=True, stateful=True, linear=True, rounds=1, min_ndim=2
    )

    def num_sent(self, n: int, m: int) -> int:
        return min(n, m, self.rank) * max(n, m)

    def init(self, bucket: Bucket) -> State:
        left, right = self.factors(bucket, side=0), self.factors(bucket, side=1)
        return {"p": left, "q": right, "step": steps(bucket), "seed": no_seed(bucket)}

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        seed = yield from agreed_seed(self.seed, state)
        names, wide = matrices(bucket), widened(bucket)
        even = [int(state["step"][name]) % 2 == 0 for name in names]
        grads = [wide.matrix(name) for name in names]  # (n, m)
        grads = [grad if e else grad.mT for grad, e in zip(grads, even, strict=True)]
        bases = orthonormal(
            [_fixed(name, state, seed) for name in names]
        )  # even (m, r), odd (n, r)
        own = list(map(product, grads, bases))
        means = yield Mean(tuple(factor.clone() for factor in own))

        def pairs(factors: list[Tensor] | tuple[Tensor, ...]) -> LowRank:
            both = zip(names, even, factors, bases, strict=True)
            return LowRank(tuple((n, f, b) if e else (n, b, f) for n, e, f, b in both))

        def commit(skip: frozenset[str]) -> None:
            set_scalar(state, "seed", seed, skip)
            used = {n: f for n, f in zip(names, means, strict=True) if n not in skip}
            _advance(used, state, seed)

        return Exchanged(mean=pairs(means), sent=pairs(own), commit=commit)


def _fixed(name: str, state: State, seed: int) -> Tensor:
    """The factor of the last step, which spans what this step projects on."""
    step = int(state["step"][name])
    if step == 0:
        return drawn("acpsgd", seed, step, name, state["q"][name])
    return state["q" if step % 2 == 0 else "p"][name]


def _advance(factors: dict[str, Tensor], state: State, seed: int) -> None:
    """Keep what was sent in this step, to project on in the next one."""
    step = state["step"]
    for name in factors:
        step[name] += 1
    fresh = renewed(factors, lambda name, f: drawn("acpsgd", seed, int(step[name]), name, f))
    for name, factor in fresh.items():
        state["q" if int(step[name]) % 2 == 0 else "p"][name].copy_(factor)
