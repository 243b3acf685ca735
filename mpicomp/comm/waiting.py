"""How a rank waits: it polls, and sleeps the longer the longer it has waited.

Collectives are written as generators that yield whenever they can go no further, so that one
thread can have several under way and no rank burns a core: MPI's own blocking calls spin.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from typing import TypeAlias, TypeVar

from mpi4py import MPI

T = TypeVar("T")
Task: TypeAlias = Generator[None, None, T]  # yields while it waits, returns its result

LONGEST_SLEEP_SECONDS = 1e-3


def pause(waited_seconds: float, *, spin_seconds: float) -> None:
    """Give up the processor for a time that is small beside what was waited already."""
    if waited_seconds < spin_seconds:
        os.sched_yield()
    else:
        time.sleep(min(waited_seconds / 8, LONGEST_SLEEP_SECONDS))


def until(request: MPI.Request) -> Task[None]:
    """Wait for a non-blocking call of MPI."""
    while not request.Test():
        yield


def run(task: Task[T]) -> T:
    """Run ``task`` to its end. For set-up; `world.wait` also watches over long waits."""
    start = time.perf_counter()
    while True:
        try:
            next(task)
        except StopIteration as stop:
            result: T = stop.value
            return result
        pause(time.perf_counter() - start, spin_seconds=1e-4)
