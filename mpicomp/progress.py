"""The communication thread: it issues every collective of the training loop, and waits for them.

Work comes in *lanes*, one for each optimizer, each with a communicator of its own. Tasks of a lane
run one after another, in the order in which they were given, which is the same on all ranks. Tasks
of different lanes run side by side: two optimizers whose gradients arrive in another order on
another rank cannot block each other.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from mpicomp.comm.stall import RollCall
from mpicomp.comm.waiting import SPIN_SECONDS, Patience, Task, pause

T = TypeVar("T")


@dataclass(slots=True)
class _Job:
    task: Task[Any]
    what: str
    future: Future[Any]


@dataclass(slots=True, eq=False)
class Lane:
    """The queue of one optimizer; on a GPU its tasks run on ``stream``.

    Where answers come from other hosts, whoever ``spins`` for them only takes time from the rest.
    """

    stream: torch.cuda.Stream | None = None
    spins: bool = True
    jobs: deque[_Job] = field(default_factory=deque)
    patience: Patience = field(default_factory=Patience)

    def context(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class Progress:
    """One daemon thread, started with the first task."""

    def __init__(self, roll_call: RollCall) -> None:
        self._roll_call = roll_call
        self._busy: list[Lane] = []  # lanes with jobs
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self.stopped = False
        self._awaited = 0  # how many threads stand still until a task is done

    def submit(self, lane: Lane, task: Task[T], what: str) -> Future[T]:
        """Append ``task`` to ``lane``; a long wait is reported as ``what``."""
        future: Future[T] = Future()
        with self._wake:
            if self.stopped:
                raise RuntimeError("mpicomp was shut down")
            if lane not in self._busy:
                self._busy.append(lane)
                lane.patience = Patience()
            lane.jobs.append(_Job(task, what, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mpicomp", daemon=True)
                self._thread.start()
            self._wake.notify()
        return future

    def wait(self, future: Future[T]) -> T:
        """The result of a task; the communication thread now waits with less sleep."""
        self._awaited += 1
        try:
            return future.result()
        finally:
            self._awaited -= 1

    def stop(self) -> None:
        """End the thread when the tasks at hand are done."""
        with self._wake:
            self.stopped = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._busy:
                    if self.stopped:
                        return
                    self._wake.wait()
                busy = list(self._busy)
            waited = min(self._advance(lane) for lane in busy)
            if waited > 0:
                spins = self._awaited and any(lane.spins for lane in busy)
                pause(waited, spin_seconds=SPIN_SECONDS if spins else 0.0)

    def _advance(self, lane: Lane) -> float:
        """Go on with the first job of ``lane``; returns for how long it has waited, in seconds."""
        job = lane.jobs[0]
        looked_at = time.perf_counter()
        try:
            with lane.context():
                next(job.task)
            waited = lane.patience.waited(looked_at)
            self._roll_call.attend(job.what, waited)
            return waited
        except StopIteration as stop:
            job.future.set_result(stop.value)
        except BaseException as error:
            job.future.set_exception(error)
        with self._wake:
            lane.jobs.popleft()
            lane.patience = Patience()
            if not lane.jobs:
                self._busy.remove(lane)
        return 0.0
