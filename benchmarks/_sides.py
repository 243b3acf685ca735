"""A training step with each way to exchange gradients, and with none at all.

All sides train with SGD without momentum, which leaves the most memory and time to what differs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from _resnet import ResNet18, images
from language_model import SIZES, Transformer
from mpi4py import MPI
from step import CONTEXT, sample_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import mpicomp

PEERS = ("alone", "ddp", "ddp+fp16", "ddp+powersgd", "mpi")
RESNET = "resnet18"
MODELS = (*SIZES, RESNET)
LEARNING_RATE = 1e-3
BUCKET_MB = 25  # DDP's default
ONE_BUCKET_MB = 4096


def build_model(name: str) -> nn.Module:
    """The same weights on all ranks and for all sides."""
    torch.manual_seed(0)
    return ResNet18() if name == RESNET else Transformer(SIZES[name], CONTEXT)


def sample(model: str, batch: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, others on each rank: bytes for a transformer, handwritten digits."""
    if model == RESNET:
        return images(batch, torch.Generator().manual_seed(mpicomp.rank()))
    return sample_of(batch)


@dataclass
class Side:
    """A model and how it trains.

    Attributes:
        exchange: what is to be done after backward.
        sent: bytes that a rank hands over in a step, or a counter of those so far.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sent: int | Callable[[], int]
    exchange: Callable[[], None] | None = None

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        logits = self.model(x)  # (n, classes), or (n, context, 256)
        F.cross_entropy(logits.flatten(0, -2), y.flatten()).backward()
        if self.exchange is not None:
            self.exchange()
        self.optimizer.step()

    def bytes_of(self, run: Callable[[], object], steps: int) -> int:
        """Bytes handed over in a step while ``run`` takes so many."""
        before = self._total()
        run()
        return self.sent if isinstance(self.sent, int) else (self._total() - before) // steps

    def close(self) -> None:
        """Let go of memory that ranks share, on all ranks alike."""
        if isinstance(self.optimizer, mpicomp.DistributedOptimizer):
            self.optimizer.close()

    def _total(self) -> int:
        return self.sent if isinstance(self.sent, int) else self.sent()


def make_side(name: str, model_name: str) -> Side:
    """One of `PEERS`, or mpicomp with the compression that ``name`` says."""
    model = build_model(model_name)
    params = list(model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(params, lr=LEARNING_RATE)
    dense_bytes = sum(p.numel() * p.element_size() for p in params)
    if name == "alone":
        return Side(model, optimizer, 0)
    if name == "mpi":
        return Side(model, optimizer, dense_bytes, OneAllreduce(params))
    if name == "ddp":
        return Side(wrapped(model, BUCKET_MB), optimizer, dense_bytes)
    if name == "ddp+fp16":
        replica = wrapped(model, BUCKET_MB)
        replica.register_comm_hook(None, fp16_compress_hook)
        return Side(replica, optimizer, dense_bytes // 2)
    if name == "ddp+powersgd":
        return powersgd_side(model, optimizer, ONE_BUCKET_MB)
    optimizer = mpicomp.DistributedOptimizer(optimizer, compression=name, model=model)
    return Side(model, optimizer, lambda: mpicomp.stats().bytes_sent)


def powersgd_side(model: nn.Module, optimizer: torch.optim.Optimizer, bucket_mb: float) -> Side:
    """DDP with the PowerSGD hook, which compresses from the third step on."""
    replica = wrapped(model, bucket_mb)
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    replica.register_comm_hook(state, powerSGD_hook)
    return Side(replica, optimizer, lambda: 4 * state.total_numel_after_compression)


def wrapped(model: nn.Module, bucket_mb: float) -> DistributedDataParallel:
    """DDP as its documentation advises: overlap, gradients that lie in the buckets, a fixed graph.

    Buffers stay as they are, as in mpicomp.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions have another name for it
        return DistributedDataParallel(
            model,
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
            static_graph=True,
            broadcast_buffers=False,
        )


class OneAllreduce:
    """Bare MPI: one blocking call for all gradients, after backward."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._params = list(params)
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
