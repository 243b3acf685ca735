"""Real gradients: those of the language model of the examples, a few steps into its training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from language_model import SIZES, Transformer, load_text, loss_of, windows

CONTEXT = 64
WARM_STEPS = 20


def build_model(size: str) -> nn.Module:
    """A transformer that has seen a little text, so that its gradients look like gradients."""
    torch.manual_seed(0)
    model = Transformer(SIZES[size], CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text, _ = load_text()
    for grads in gradients(model, text, batch=8, count=WARM_STEPS, seed=0):
        for name, param in model.named_parameters():
            param.grad = grads[name]
        optimizer.step()
    return model


def gradients(
    model: nn.Module, text: Tensor, *, batch: int, count: int, seed: int
) -> Iterator[dict[str, Tensor]]:
    """The gradients of ``count`` random batches, by parameter name, one after another."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(text) - CONTEXT, (batch,), generator=generator)
        model.zero_grad()
        loss_of(model, *windows(text, starts, CONTEXT)).backward()
        yield {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
