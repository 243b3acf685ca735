"""When gradients are there: a training step without communication, layer by layer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of one rank, without any exchange.

    Attributes:
        outside_seconds: all of it but the backward pass: data, forward, optimizer.
        backward_seconds: the backward pass.
        arrivals: for each parameter, in order of arrival, the seconds from the beginning of the
            backward pass until its gradient is there.
    """

    outside_seconds: float
    backward_seconds: float
    arrivals: Mapping[str, float]

    @property
    def step_seconds(self) -> float:
        return self.outside_seconds + self.backward_seconds


def now(device: torch.device) -> float:
    """Seconds by `time.perf_counter`, when ``device`` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def record(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    loss: Callable[[], Tensor],
    update: Callable[[], object],
    *,
    steps: int = 5,
) -> Timeline:
    """Take ``steps`` steps after one to warm up; medians of each time.

    Args:
        named_parameters: those to watch.
        loss: draws a batch and runs forward.
        update: what follows the backward pass: the optimizer's step, and clearing gradients.
        steps: how many are timed.
    """
    arrived: dict[str, float] = {}
    watched: list[str] = []
    handles = []
    named = list(named_parameters)
    device = named[0][1].device if named else torch.device("cpu")

    for name, param in named:

        def arrive(_: Tensor, name: str = name) -> None:
            arrived[name] = now(device)

        if param.requires_grad:
            watched.append(name)
            handles.append(param.register_post_accumulate_grad_hook(arrive))
    runs: list[tuple[float, float, dict[str, float]]] = []
    try:
        for _ in range(steps + 1):
            arrived.clear()
            start = now(device)
            value = loss()
            backward = now(device)
            value.backward()
            end = now(device)
            update()
            since = {name: seconds - backward for name, seconds in arrived.items()}
            runs.append((now(device) - start - (end - backward), end - backward, since))
    finally:
        for handle in handles:
            handle.remove()
    outside, whole, sinces = zip(*runs[1:], strict=True)
    late = statistics.median(whole)  # where there is no gradient, zeros are exchanged at the end
    medians = {
        name: statistics.median(since.get(name, late) for since in sinces) for name in watched
    }
    return Timeline(
        statistics.median(outside),
        late,
        dict(sorted(medians.items(), key=lambda item: item[1])),
    )
