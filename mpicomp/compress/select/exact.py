"""Exact selection of the k elements of largest magnitude."""

from __future__ import annotations

import torch
from torch import Tensor


def largest(flat: Tensor, k: int) -> Tensor:
    """Indices (k,), int64, in no particular order, of the k elements of largest magnitude.

    Exactly k distinct indices, whatever ties there are; among equals any may be taken. This is
    the plain selection of PyTorch: it reads ``flat`` twice and holds its magnitudes meanwhile.

    Args:
        flat: 1-d tensor of finite numbers; NaN would count as the largest of all.
        k: how many, between 0 and ``flat.numel()``.
    """
    return torch.topk(flat.abs(), k, sorted=False).indices
