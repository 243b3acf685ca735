"""Momentum before compression: each rank adds up velocities, not gradients, until they are sent.

References: Y. Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for
Distributed Training", ICLR 2018, section 3 (momentum correction and momentum factor masking);
N. Ivkin et al., "Communication-efficient Distributed SGD with Sketching", NeurIPS 2019, alg. 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Bucket, State
from .sparse import Sparse


def init_velocity(bucket: Bucket) -> State:
    """Slots ``momentum`` (u) and ``velocity`` (v, the velocities not sent yet), both zero."""
    return {"momentum": bucket.like(), "velocity": bucket.like()}


def load_velocity_(
    bucket: Bucket, state: State, name: str, grad: Tensor | None, *, scale: float, momentum: float
) -> None:
    """Put v + u into ``bucket[name]``, where u is now ``momentum`` u + ``grad / scale``."""
    view = bucket[name]
    torch.add(state["velocity"][name], state["momentum"][name], alpha=momentum, out=view)
    if grad is not None:
        view.add_(grad, alpha=1.0 / scale)


def commit_velocity(bucket: Bucket, state: State, sent: Sparse, skip: frozenset[str]) -> None:
    """Keep both sums, take away from v what was ``sent``, and stop u there (masking).

    ``bucket`` holds v + u, as `load_velocity_` left it. Parameters in ``skip`` keep what they had.
    """
    u, v = state["momentum"], state["velocity"]
    assert isinstance(u, Bucket)
    assert isinstance(v, Bucket)
    before = {name: (u[name].clone(), v[name].clone()) for name in skip & v.keys()}
    torch.sub(bucket.flat, v.flat, out=u.flat)
    v.flat.copy_(bucket.flat)
    sent.subtract_(v)
    u.flat[sent.indices] = 0.0
    for name, (old_u, old_v) in before.items():
        u[name].copy_(old_u)
        v[name].copy_(old_v)
