"""Gradients that fit in no bucket: sparse ones, and those that come after their bucket has gone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpicomp.comm.waiting import Task
from mpicomp.compress.base import GatherV, Mean
from mpicomp.exchange import Group, carry
from mpicomp.profile import Profile


def exchange_dense(
    params: Sequence[Tensor], grads: Sequence[Tensor | None], group: Group, profile: Profile
) -> Task[list[Tensor]]:
    """The mean over ranks of ``grads``, None standing for zeros; all in one message a dtype."""
    tensors = tuple(
        torch.zeros_like(p) if grad is None else grad.contiguous()
        for p, grad in zip(params, grads, strict=True)
    )
    means = yield from carry(Mean(tensors), group, profile)
    return list(means)


def exchange_sparse(
    param: Tensor, grad: Tensor | None, group: Group, profile: Profile
) -> Task[Tensor]:
    """The mean over ranks of sparse gradients of ``param``: coalesced, equal on all ranks.

    Rows travel as they are. Where together they are more than ``param`` has, an ordinary
    reduction is cheaper and is used instead.
    """
    if grad is None:
        grad = torch.sparse_coo_tensor(
            torch.zeros(1, 0, dtype=torch.int64, device=param.device),
            param.new_zeros(0, *param.shape[1:]),
            param.shape,
            check_invariants=False,
        )
    grad = grad.coalesce()
    dims = grad.sparse_dim()
    # Which form is cheaper must be known alike everywhere, so the numbers of rows go first.
    counts = yield from group.communicator.lengths(grad._nnz())
    if sum(counts) >= param.shape[:dims].numel():
        (mean,) = yield from carry(Mean((grad.to_dense().contiguous(),)), group, profile)
        dense: Tensor = mean
        return dense.to_sparse(dims).coalesce()
    message = GatherV((grad.indices().t().contiguous(), grad.values()))
    answers = yield from carry(message, group, profile)
    indices = torch.cat([index for index, _ in answers]).t()
    values = torch.cat([value for _, value in answers]) / len(answers)
    mean = torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False)
    return mean.coalesce()
