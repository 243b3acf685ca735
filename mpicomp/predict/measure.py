"""Measures collectives of the ranks at hand, as the exchange of gradients would issue them."""

from __future__ import annotations

import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from mpicomp import world as _world
from mpicomp.comm.communicator import Communicator, Op
from mpicomp.comm.levels import levels, library
from mpicomp.comm.waiting import Task
from mpicomp.predict.network import ACROSS, MEASURED, WITHIN, Link, Network, Profile, Sample, fit

KINDS = sorted(MEASURED)
PATIENCE_SECONDS = 2.0  # a size that takes longer is the last
SHORT_SECONDS, MOST_REPEATS = 0.2, 20  # repeats go on until either


def machine(device: torch.device) -> dict[str, str]:
    """What has to be equal where measured times are to be used again."""
    model = next(_cpu_models(), platform.processor() or platform.machine())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"processor": model, "cores": str(os.cpu_count()), "MPI": library(), "device": name}


def _cpu_models() -> Iterator[str]:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    yield line.partition(":")[2].strip()
    except OSError:
        return


def measure(sizes: Iterable[int], *, device: torch.device | None = None) -> Profile:
    """Collective: the network of all ranks, from collectives of about ``sizes`` bytes.

    A size is that of the result: an all-gather among n ranks hands over a n-th of it each. Sizes
    grow until one takes seconds. All ranks return the same.
    """
    world = _world.get()
    device = device or torch.device("cpu")
    samples: dict[str, list[Sample]] = {}
    for level, communicator in zip((WITHIN, ACROSS), levels(world.communicator), strict=True):
        found: list[Sample] = []
        if communicator is not None and communicator.size > 1:
            for kind in KINDS:
                found += _sweep(communicator, kind, sizes, device)
        _world.wait(world.communicator.barrier(), "the end of a measurement")
        samples[level] = world.communicator.comm.bcast(found)
    links: dict[str, dict[str, Link]] = {
        level: {kind: fit([s for s in found if s.collective == kind]) for kind in KINDS if found}
        for level, found in samples.items()
    }
    most = max(world.communicator.comm.allgather(world.communicator.local.size))
    network = Network(world.communicator.hosts, most, **links)
    return Profile(network, machine(device), samples)


def _sweep(
    communicator: Communicator, kind: str, sizes: Iterable[int], device: torch.device
) -> Iterator[Sample]:
    for size in sizes:
        call, num_bytes, done = _prepare(communicator, kind, size, device)
        seconds = time_task(communicator, call)
        done()
        yield Sample(kind, communicator.size, num_bytes, seconds)
        if seconds > PATIENCE_SECONDS:
            return


def _prepare(
    communicator: Communicator, kind: str, size: int, device: torch.device
) -> tuple[Callable[[], Task[object]], int, Callable[[], None]]:
    """A call that can be repeated, its size as in `collectives`, and what frees its memory."""
    n = communicator.size
    numel = max(1, size // 4)
    if kind == "all-reduce" and device.type == "cpu":
        block = _world.wait(communicator.allocate(4 * numel), "memory for a measurement")
        flat = block.view(torch.float32).zero_()
        return (
            lambda: communicator.reduce_(flat, Op.SUM),
            4 * numel,
            lambda: communicator.release(block),
        )
    if kind in ("all-reduce", "broadcast"):
        vector = torch.zeros(numel, device=device)
        reduce: Callable[[], Task[object]] = lambda: communicator.reduce_(vector, Op.SUM)  # noqa: E731
        spread: Callable[[], Task[object]] = lambda: communicator.broadcast_(vector, 0)  # noqa: E731
        return reduce if kind == "all-reduce" else spread, 4 * numel, lambda: None
    part = torch.zeros(max(1, numel // n), device=device)
    if kind == "all-gather":
        return (
            lambda: communicator.gather(part, [part.numel()] * n),
            4 * part.numel(),
            lambda: None,
        )
    outgoing: list[Tensor] = [part] * n
    return (
        lambda: communicator.all_to_all(outgoing, [part.numel()] * n),
        4 * part.numel() * n,
        lambda: None,
    )


def time_task(communicator: Communicator, call: Callable[[], Task[object]]) -> float:
    """Collective: median seconds of a task, each counted on the rank that takes longest."""
    _world.wait(call(), "a collective that is measured")  # connections are made
    taken: list[float] = []
    while len(taken) < MOST_REPEATS and (len(taken) < 2 or sum(taken) < SHORT_SECONDS):
        _world.wait(communicator.barrier(), "the start of a measurement")
        start = time.perf_counter()
        _world.wait(call(), "a collective that is measured")
        own = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        _world.wait(communicator.reduce_(own, Op.MAX), "the end of a measurement")
        taken.append(float(own))
    return statistics.median(taken)


def contention(seconds: float = 0.03) -> float:
    """Collective: how much a computing thread loses by a second one, while all ranks do the same.

    0 if nothing, 1 if the two share what one had; the largest of all ranks.
    """
    matrix = torch.rand(96, 96)

    def count(stop: float) -> int:
        done = 0
        while time.perf_counter() < stop:
            torch.mm(matrix, matrix)
            done += 1
        return done

    count(time.perf_counter() + seconds)
    communicator = _world.get().communicator
    _world.wait(communicator.barrier(), "the start of a measurement")
    alone = count(time.perf_counter() + seconds)
    _world.wait(communicator.barrier(), "the start of a measurement")
    other = threading.Thread(target=count, args=(time.perf_counter() + seconds,))
    other.start()
    beside = count(time.perf_counter() + seconds)
    other.join()
    own = torch.tensor([2 * (1 - beside / alone)], dtype=torch.float64).clamp_(0.0, 1.0)
    _world.wait(communicator.reduce_(own, Op.MAX), "the end of a measurement")
    return float(own)
