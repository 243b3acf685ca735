"""The sides of `overhead.py`: peers, and mpicomp."""

from __future__ import annotations

from collections.abc import Callable

import _ddp
import torch
from _models import Side, build_model, make_optimizer
from mpi4py import MPI
from torch import nn

import mpicomp

PEERS: dict[str, Callable[[nn.Module], Side]] = {
    "alone": lambda model: Side(model, make_optimizer(model), 0),
    "ddp": _ddp.plain,
    "ddp+fp16": _ddp.fp16,
    "ddp+powersgd": _ddp.powersgd,
    "mpi": lambda model: Side(
        model, make_optimizer(model), _ddp.dense_bytes(model), OneAllreduce(model)
    ),
}


def make_side(name: str, model_name: str) -> Side:
    """One of `PEERS`, or mpicomp with the compression that ``name`` says."""
    model = build_model(model_name)
    if name in PEERS:
        return PEERS[name](model)
    optimizer = mpicomp.DistributedOptimizer(make_optimizer(model), compression=name, model=model)
    return Side(model, optimizer, lambda: mpicomp.stats().bytes_sent)


def close(side: Side) -> None:
    """Let go of memory that ranks share; on all ranks alike."""
    if isinstance(side.optimizer, mpicomp.DistributedOptimizer):
        side.optimizer.close()


class OneAllreduce:
    """Bare MPI: one blocking call for all gradients, after backward."""

    def __init__(self, model: nn.Module) -> None:
        self._params = list(model.parameters())
        self._comm = MPI.COMM_WORLD.Dup()
        self._flat = torch.empty(sum(p.numel() for p in self._params))
        parts = self._flat.split([p.numel() for p in self._params])
        self._views = [part.view_as(p) for part, p in zip(parts, self._params, strict=True)]

    def __call__(self) -> None:
        grads = [p.grad.reshape(-1) for p in self._params if p.grad is not None]
        torch.cat(grads, out=self._flat)
        self._comm.Allreduce(MPI.IN_PLACE, [self._flat.numpy(), MPI.FLOAT], MPI.SUM)
        self._flat.div_(self._comm.size)
        for param, view in zip(self._params, self._views, strict=True):
            param.grad = view
