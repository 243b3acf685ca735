"""Random-k sparsification: all ranks average the same elements, drawn anew in every step.

References: S. U. Stich, J.-B. Cordonnier and M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018,
definition 2.1 (with error feedback); J. Wangni et al., "Gradient Sparsification for
Communication-Efficient Distributed Optimization", NeurIPS 2018 (unbiased, by scaling up).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Bucket, Capabilities, Exchange, Exchanged, Mean, State, wide
from .draws import agreed_seed, generator, no_seed
from .registry import register
from .scalars import count_step, set_scalar, step_of, steps
from .sparse import Sparse, Sparsifier, average_all


@register("randomk")
@dataclass(frozen=True)
class RandomK(Sparsifier):
    """``int(density * n)`` of the n elements of a bucket, at least one, the same on all ranks.

    No position travels: the ranks draw the same ones from a seed that rank 0 broadcasts once.

    State: slot ``seed``, per parameter that seed; slot ``step``, per parameter the number of steps
    taken. Both are equal on all ranks.

    Args:
        density: fraction of elements sent, in (0, 1].
        error_feedback: whether what was not sent is carried to the next step.
        rescale: multiply what was sent by n / k, so that the expectation of the mean is the mean
            gradient; without error feedback only.
        seed: of the draws; that of rank 0 counts.
    """

    density: float = 0.01
    error_feedback: bool = True
    rescale: bool = False
    seed: int = 0

    @property
    def capabilities(self) -> Capabilities:
        biased = not self.rescale
        return Capabilities(biased=biased, stateful=True, linear=True, rounds=1, min_ndim=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rescale and self.error_feedback:
            raise ValueError(
                "randomk: rescale must be false with error feedback, got true; feedback makes "
                "up for what is not sent, and both together diverge, so set error_feedback=false"
            )

    def init(self, bucket: Bucket) -> State:
        return {"seed": no_seed(bucket), "step": steps(bucket)}

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        flat = bucket.flat
        if self.dense_is_cheaper(flat.numel(), flat.element_size(), size=bucket.size):
            return (yield from average_all(bucket))
        seed = yield from agreed_seed(self.seed, state)
        draw = generator("randomk", seed, step_of(state), bucket.entries[0].name)
        indices = distinct(flat.numel(), self.num_kept(flat.numel()), draw).to(flat.device)
        (mean,) = yield Mean((flat[indices],))

        def commit(skip: frozenset[str]) -> None:
            set_scalar(state, "seed", seed, skip)
            count_step(state, skip)

        sent = Sparse(indices, self._scaled(flat[indices], flat.numel()))
        return Exchanged(Sparse(indices, self._scaled(mean, flat.numel())), sent, commit)

    def dense_is_cheaper(self, numel: int, element_bytes: int, *, size: int) -> bool:
        return self.num_kept(numel) == numel

    def _scaled(self, values: Tensor, numel: int) -> Tensor:
        if not self.rescale:
            return values
        return (values.to(wide(values.dtype)) * (numel / values.numel())).to(values.dtype)


def distinct(numel: int, k: int, draw: torch.Generator) -> Tensor:
    """A set (k,) of indices below ``numel``, ascending; each of all such sets is as likely.

    Few of many are drawn one by one, until k different ones are there, and any above k are
    dropped at random: no number is treated unlike another, so neither is any set. The time depends
    on k, not on ``numel``.
    """
    if 4 * k > numel:
        return torch.randperm(numel, generator=draw)[:k].sort().values
    drawn = torch.empty(0, dtype=torch.int64)
    while drawn.numel() < k:
        more = k - drawn.numel()
        # 53 random bits: a remainder of 32 would favour small indices
        fresh = torch.rand(more + more // 4 + 8, generator=draw, dtype=torch.float64).mul_(numel)
        drawn = torch.cat((drawn, fresh.long())).unique()  # sorted
    spare = torch.randperm(drawn.numel(), generator=draw)[k:]
    keep = torch.ones(drawn.numel(), dtype=torch.bool)
    keep[spare] = False
    return drawn[keep]
