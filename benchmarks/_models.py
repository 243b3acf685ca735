"""What the sides of `overhead.py` train, and how: SGD without momentum.

It leaves the most memory and time to what differs between sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from _resnet import ResNet18, images
from language_model import SIZES, Transformer
from step import CONTEXT, sample_of
from torch import Tensor, nn

RESNET = "resnet18"
MODELS = (*SIZES, RESNET)
LEARNING_RATE = 1e-3


def build_model(name: str) -> nn.Module:
    """The same weights on all ranks and for all sides."""
    torch.manual_seed(0)
    return ResNet18() if name == RESNET else Transformer(SIZES[name], CONTEXT)


def sample(model: str, batch: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a rank: bytes for a transformer, or handwritten digits."""
    if model == RESNET:
        return images(batch, torch.Generator().manual_seed(rank))
    return sample_of(batch, rank)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    logits = model(x)  # (n, classes), or (n, context, 256)
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


@dataclass
class Side:
    """A model and how it trains.

    Attributes:
        sent: bytes that a rank hands over in a step, or a counter of those so far.
        exchange: what is to be done after backward.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sent: int | Callable[[], int]
    exchange: Callable[[], None] | None = None

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, (x, y)).backward()
        if self.exchange is not None:
            self.exchange()
        self.optimizer.step()

    def bytes_of(self, run: Callable[[], object], steps: int) -> int:
        """Bytes handed over in a step while ``run`` takes so many."""
        if isinstance(self.sent, int):
            run()
            return self.sent
        before = self.sent()
        run()
        return (self.sent() - before) // steps
