"""Numbers that belong to a whole bucket: step counts, thresholds, seeds.

They are kept once for each parameter, so that they survive when buckets are made anew; where a new
bucket brings together parameters with different pasts, the largest value counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Bucket, State


def scalars(bucket: Bucket, value: float, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A slot that holds ``value``, as a 0-d tensor on the host for each parameter of ``bucket``."""
    return {name: torch.tensor(value, dtype=dtype) for name in bucket}


def scalar(state: State, slot: str) -> float:
    """The value in ``slot``: the largest of its parameters', 0 without parameters."""
    return max((float(tensor) for tensor in state[slot].values()), default=0.0)


def set_scalar(state: State, slot: str, value: float, skip: frozenset[str] = frozenset()) -> None:
    """Put ``value`` into ``slot``, but for the parameters named in ``skip``."""
    for name, tensor in state[slot].items():
        if name not in skip:
            tensor.fill_(value)


def steps(bucket: Bucket) -> dict[str, Tensor]:
    """A slot that counts steps, at 0."""
    return {name: torch.zeros((), dtype=torch.int64) for name in bucket}


def step_of(state: State, slot: str = "step") -> int:
    """How many steps the bucket has taken."""
    return max((int(tensor) for tensor in state[slot].values()), default=0)


def count_step(state: State, skip: frozenset[str], slot: str = "step") -> None:
    """One step more, but for the parameters named in ``skip``."""
    set_scalar(state, slot, step_of(state, slot) + 1, skip)
