"""Deep Gradient Compression: top-k of velocities, with the momentum on the ranks' own side.

Reference: Y. Lin, S. Han, H. Mao, Y. Wang and W. J. Dally, "Deep Gradient Compression: Reducing
the Communication Bandwidth for Distributed Training", ICLR 2018, algorithm 4. The paper estimates
the threshold from a sample, because exact selection was slow; here the selection is exact.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Bucket, Capabilities, Exchange, State, wide
from .registry import register
from .select import largest
from .sparse import gather_pairs, pairs_cost_more
from .velocity import MomentumSparsifier, Ranges, exchange_velocity, init_velocity, load_velocity_


@register("dgc")
@dataclass(frozen=True)
class DGC(MomentumSparsifier):
    """The ``int(density * n)`` largest of n velocities that have added up, at least one.

    Where a velocity is sent, both its sums begin anew at zero. Vectors (biases, norms), and all
    of a bucket where pairs would cost as much, travel uncompressed with ordinary momentum.

    Args:
        density: fraction of elements kept, in (0, 1].
        momentum: in [0, 1); the optimizer's own must be 0.
        nesterov: send a step ahead, as ``torch.optim.SGD(nesterov=True)`` does.
        clip: each of n ranks makes its own gradient of a parameter shorter if its L2 norm, in
            unscaled units, is above ``clip * sqrt(n)``, which is about what independent gradients
            have whose mean has the norm ``clip``; 0 for none. (The paper divides by ``sqrt(n)``,
            as its gradients are divided by n before.)
    """

    density: float = 0.001
    momentum: float = 0.9
    nesterov: bool = False
    clip: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"dgc: momentum must be in [0, 1), got {self.momentum!r}")
        if self.nesterov and not self.momentum:
            raise ValueError("dgc: nesterov must be false without momentum, got True")
        if not 0.0 <= self.clip < float("inf"):
            raise ValueError(f"dgc: clip must be finite and at least 0, got {self.clip!r}")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            biased=True,
            stateful=True,
            linear=False,
            rounds=2,
            conserves=self.momentum == 0.0,
            own_feedback=True,
            momentum=self.momentum > 0.0,
            gathers_values=True,
        )

    def uncompressed(self) -> DGC:
        return dataclasses.replace(self, density=1.0)

    def init(self, bucket: Bucket) -> State:
        return init_velocity(bucket)

    def load_(
        self, bucket: Bucket, state: State, name: str, grad: Tensor | None, *, scale: float = 1.0
    ) -> None:
        if grad is not None and self.clip:
            grad = clipped(grad, self.clip * scale * bucket.size**0.5)
        load_velocity_(
            bucket,
            state,
            name,
            grad,
            scale=scale,
            momentum=self.momentum,
            nesterov=self.nesterov,
        )

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        dense, rest = self.parts(bucket)
        return (
            yield from exchange_velocity(
                bucket,
                state,
                dense,
                lambda: self._send_largest(bucket, rest),
                momentum=self.momentum,
                nesterov=self.nesterov,
            )
        )

    def _send_largest(self, bucket: Bucket, rest: Ranges) -> Exchange:
        indices = largest(rest.take(bucket.flat), self.num_kept(rest.numel))
        return (yield from gather_pairs(bucket, rest.positions(indices), equal_counts=True))

    def dense_is_cheaper(self, numel: int, element_bytes: int, *, size: int) -> bool:
        return pairs_cost_more(numel, self.num_kept(numel), element_bytes, size=size)


def clipped(grad: Tensor, limit: float) -> Tensor:
    """``grad``, made shorter if its L2 norm is above ``limit``; not finite if it was not."""
    norm = torch.linalg.vector_norm(grad, dtype=torch.float64)  # squares overflow in fp32
    factor = torch.clamp(limit / norm, max=1.0)
    return grad.to(wide(grad.dtype)) * factor
