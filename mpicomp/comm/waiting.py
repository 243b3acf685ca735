"""How a rank waits: it polls, and sleeps the longer the longer it has waited.

Collectives are written as generators that yield whenever they can go no further, so that one
thread can have several under way and no rank burns a core: MPI's own blocking calls spin.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from mpi4py import MPI

T = TypeVar("T")
Task: TypeAlias = Generator[None, None, T]  # yields while it waits, returns its result

SPIN_SECONDS = 300e-6  # where nothing else wants the processor
LONGEST_SLEEP_SECONDS = 1e-3
_WORK_SECONDS = 50e-6  # a look at a task that took longer was work; a shorter one only looked


class Patience:
    """For how long a task has made no progress, told from how long it takes to look at it."""

    def __init__(self) -> None:
        self._idle_since = time.perf_counter()

    def waited(self, looked_at: float) -> float:
        """Seconds without progress, after a look at the task that began at ``looked_at``."""
        now = time.perf_counter()
        if now - looked_at > _WORK_SECONDS:
            self._idle_since = now
        return now - self._idle_since


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


def run(task: Task[T], watch: Callable[[float], None] = lambda waited_seconds: None) -> T:
    """Run ``task`` to its end, asleep while it waits; ``watch`` is told for how long it has."""
    try:
        next(task)  # short tasks between ranks in step end here
        patience = Patience()
        while True:
            looked_at = time.perf_counter()
            next(task)
            waited = patience.waited(looked_at)
            watch(waited)
            pause(waited, spin_seconds=SPIN_SECONDS)
    except StopIteration as stop:
        result: T = stop.value
        return result
