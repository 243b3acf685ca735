"""The user's training step, from a name on the command line."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpicomp import world as _world
from mpicomp.errors import MpicompError


@dataclass
class Workload:
    """What a factory for ``--model MODULE:FACTORY`` returns.

    Attributes:
        model: on the device that it trains on.
        batches: this rank's data; begun anew when it is used up.
        loss: of model and batch, a tensor to call `backward` on.
        optimizer: of the model's parameters; SGD by default.
    """

    model: nn.Module
    batches: Iterable[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: torch.optim.Optimizer | None = None
    _running: Iterator[Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"workload: model must be a torch.nn.Module, got {self.model!r}")
        if next(self.model.parameters(), None) is None:
            raise TypeError(f"workload: model must have parameters, got {self.model!r}")
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def next_batch(self) -> Any:
        for _ in range(2):
            if self._running is None:
                self._running = iter(self.batches)
            for batch in self._running:
                return batch
            self._running = None
        raise RuntimeError(  # no ValueError, which all ranks would have: the job is to be aborted
            "workload: batches must be such that one can begin anew, as a list or a DataLoader "
            f"is, got {self.batches!r}, in which nothing is left"
        )

    def next_loss(self) -> Tensor:
        """Draw a batch and run forward."""
        return self.loss_of(self.next_batch())

    def loss_of(self, batch: Any) -> Tensor:
        """Run forward."""
        try:
            loss = self.loss(self.model, batch)
        except ValueError as error:  # of this rank only, perhaps: it has to abort the job
            raise RuntimeError(f"workload: loss fails: {error}") from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise RuntimeError(
                f"workload: loss must be a tensor of one element to call backward on, got {loss!r}"
            )
        return loss

    def update(self) -> None:
        """Step and clear gradients, without any exchange."""
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()


def load(name: str) -> Workload:
    """Collective: call the factory ``MODULE:FACTORY`` or ``FILE.py:FACTORY`` on every rank.

    The working directory is looked in first, as by ``python -m``, or the file's directory.

    Raises:
        MpicompError: on every rank, if the factory of any rank fails or returns something else.
    """
    error = ""
    workload = None
    try:
        workload = _call(name)
    except (Exception, SystemExit) as failure:
        error = f"{type(failure).__name__}: {failure}"
        cause: BaseException | None = failure
    else:
        cause = None
    errors = _world.get().communicator.comm.allgather(error)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
    if failed or workload is None:
        raise MpicompError(
            "workload: --model must be MODULE:FACTORY or FILE.py:FACTORY that returns a Workload "
            f"on every rank, got {name!r}, which fails on {'; '.join(failed)}"
        ) from cause
    return workload


def _call(name: str) -> Workload:
    module, colon, factory = name.rpartition(":")
    if not colon or not module or not factory:
        raise ValueError("it has no ':' between the names of a module and of a function")
    path = Path(module)
    if path.suffix == ".py":
        if not path.is_file():
            raise FileNotFoundError(f"no such file: {path}")
        module = path.stem
    directory = str(path.parent.resolve()) if path.suffix == ".py" else os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    found = getattr(importlib.import_module(module), factory)()
    if not isinstance(found, Workload):
        raise TypeError(f"it returned {found!r}")
    return found
