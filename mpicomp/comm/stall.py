"""A wait that lasts too long is given a name: who is missing, and where everybody else is.

A waiting rank that loses patience asks every other rank where it is. Ranks that wait in a
collective answer; a rank that does not answer is computing, stuck or gone: it is the missing one.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from typing import TypeVar

from mpi4py import MPI

from mpicomp.comm.waiting import Task, run
from mpicomp.errors import StallError

T = TypeVar("T")

_ASK, _ANSWER = 1, 2
_ANSWER_SECONDS = 2.0
_POLL_SECONDS = 0.2


class RollCall:
    """Answers the question where this rank is, and asks it of others.

    Args:
        comm: a communicator used for nothing else.
        stall_seconds: a longer wait is reported on stderr.
        shutdown_seconds: a longer wait raises `StallError`, which ends the job.
    """

    def __init__(self, comm: MPI.Comm, *, stall_seconds: float, shutdown_seconds: float) -> None:
        self._comm = comm
        self._stall_seconds = stall_seconds
        self._shutdown_seconds = shutdown_seconds
        self._lock = threading.Lock()
        self._last_poll = 0.0
        self._reported: dict[int, float] = {}  # thread -> when its wait was last reported

    def run(self, task: Task[T], what: str) -> T:
        """Run ``task`` to its end, and watch over its waits."""
        return run(task, lambda waited_seconds: self.attend(what, waited_seconds))

    def attend(self, what: str, waited_seconds: float) -> None:
        """Called again and again by whoever waits in ``what``: answer, and complain when due.

        Raises:
            StallError: ``waited_seconds`` is above the limit at which the job ends.
        """
        now = time.monotonic()
        if now - self._last_poll < _POLL_SECONDS or not self._lock.acquire(blocking=False):
            return
        try:
            self._last_poll = now
            self._answer(what)
            thread = threading.get_ident()
            if waited_seconds < self._stall_seconds:
                self._reported.pop(thread, None)
                return
            final = waited_seconds >= self._shutdown_seconds
            if not final and now - self._reported.get(thread, -1e9) < self._stall_seconds:
                return
            self._reported[thread] = now
            report = self._report(what, waited_seconds)
        finally:
            self._lock.release()
        if final:
            raise StallError(report)
        sys.stderr.write(report + "\n")
        sys.stderr.flush()

    def _answer(self, what: str) -> None:
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, _ASK, status):
            self._comm.recv(source=status.Get_source(), tag=_ASK)
            self._comm.send(what, dest=status.Get_source(), tag=_ANSWER)

    def _report(self, what: str, waited_seconds: float) -> str:
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, _ANSWER, status):  # late answers to an old call
            self._comm.recv(source=status.Get_source(), tag=_ANSWER)
        for rank in others:
            self._comm.send(None, dest=rank, tag=_ASK)  # a few bytes: buffered, does not wait
        places: dict[int, str] = {}
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline and len(places) < len(others):
            self._answer(what)
            while self._comm.Iprobe(MPI.ANY_SOURCE, _ANSWER, status):
                source = status.Get_source()
                places[source] = self._comm.recv(source=source, tag=_ANSWER)
            time.sleep(0.01)
        missing = [rank for rank in others if rank not in places]
        elsewhere = [f"rank {r} waits in {p}" for r, p in sorted(places.items()) if p != what]
        lines = [
            f"mpicomp: rank {self._comm.rank} on {socket.gethostname()} (pid {os.getpid()}) "
            f"has waited {waited_seconds:.0f} s in {what}"
        ]
        if missing:
            lines.append("missing (not waiting in any collective): " + _ranks(missing))
        lines += elsewhere
        if not missing and not elsewhere:
            lines.append("all other ranks wait there too")
        return "; ".join(lines)


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
