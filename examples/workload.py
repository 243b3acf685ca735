"""What does compression cost and win for my model? A training step to hand to the tools.

    mpicomp-launch -np 2 --tag none python -m mpicomp.bench model --model examples/workload.py:small
    python -m mpicomp.advise --model examples/workload.py:small --bandwidth 1 --ranks 2,8,64

`python -m mpicomp.bench model` and `python -m mpicomp.advise` want a function that returns model,
batches and loss. Here it is for the model of ``language_model.py``, with a batch and a context that
two cores can bear.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from language_model import SIZES, Transformer, load_text, loss_of, windows
from torch import Tensor

import mpicomp
from mpicomp.bench.workload import Workload

CONTEXT = 64


def batches(batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random batches, others on each rank."""
    text, _ = load_text()
    generator = torch.Generator().manual_seed(mpicomp.rank())
    while True:
        starts = torch.randint(len(text) - CONTEXT, (batch,), generator=generator)
        yield windows(text, starts, CONTEXT)


def transformer(size: str = "25M", batch: int = 1) -> Workload:
    """A language model of 25 million parameters."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Transformer(SIZES[size], CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters())
    return Workload(model, batches(batch), lambda m, xy: loss_of(m, *xy), optimizer)


def small() -> Workload:
    """The same with a million parameters: for a first look."""
    return transformer("1M", 4)
