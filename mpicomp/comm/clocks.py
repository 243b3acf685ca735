"""How far the clocks of the ranks are apart, so that what each notes fits on one time line.

A rank asks rank 0 for the time, again and again. When the answer was made, the asker's clock stood
between the sending of the question and the arrival of the answer; the middle is wrong by half of
that round trip at most, and the shortest round trip counts. Cristian, "Probabilistic clock
synchronization", Distributed Computing 3, 1989. Two readings, one at each end of a job, tell how
the clocks drift apart, which is linear to a good approximation (Hunold & Carpen-Amarie, "On the
Impact of Synchronizing Clocks and Processes on Benchmarking MPI Collectives", EuroMPI 2015).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from mpi4py import MPI

from mpicomp.comm.waiting import Task, until

_ROUNDS = 32
_TAG = 3


@dataclass(frozen=True, slots=True)
class Reading:
    """A look at the clock of rank 0; all in ns, on the monotonic clock of this rank.

    Attributes:
        at: when it was.
        ahead: how much more this rank's clock showed than that of rank 0.
        error: by how much ``ahead`` may be wrong.
    """

    at: int
    ahead: int
    error: int


def compare(comm: MPI.Comm) -> Task[Reading]:
    """Collective: read the clock of rank 0. Ranks take turns, and sleep until theirs comes."""
    if comm.rank > 0:
        return (yield from _ask(comm))
    for rank in range(1, comm.size):
        yield from _answer(comm, rank)
    return Reading(time.perf_counter_ns(), 0, 0)


def on_rank0(time_ns: int, start: Reading, end: Reading) -> int:
    """What the clock of rank 0 showed when this rank's showed ``time_ns``, by two readings."""
    share = (time_ns - start.at) / (end.at - start.at)
    return time_ns - start.ahead - round((end.ahead - start.ahead) * share)


def _ask(comm: MPI.Comm) -> Task[Reading]:
    question, answer = bytearray(1), memoryview(bytearray(8))
    best: Reading | None = None
    for turn in range(_ROUNDS):
        sent = time.perf_counter_ns()
        request = comm.Irecv([answer, MPI.BYTE], 0, _TAG)
        comm.Send([question, MPI.BYTE], 0, _TAG)
        if turn == 0:  # others may be asking: this is no round trip, but a wait
            yield from until(request)
            continue
        _at_once(request)
        received = time.perf_counter_ns()
        middle, error = (sent + received) // 2, (received - sent + 1) // 2
        if best is None or error < best.error:
            best = Reading(middle, middle - int.from_bytes(answer, "little", signed=True), error)
    assert best is not None
    return best


def _answer(comm: MPI.Comm, rank: int) -> Task[None]:
    question = bytearray(1)
    for turn in range(_ROUNDS):
        request = comm.Irecv([question, MPI.BYTE], rank, _TAG)
        if turn == 0:
            yield from until(request)
        else:
            _at_once(request)
        now = time.perf_counter_ns().to_bytes(8, "little", signed=True)
        comm.Send([now, MPI.BYTE], rank, _TAG)


def _at_once(request: MPI.Request) -> None:
    """Wait for what comes in microseconds; the other rank may need this very processor for it."""
    while not request.Test():
        os.sched_yield()
