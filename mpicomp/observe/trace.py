"""The time line of a job: what each thread of each rank did when, on the clock of rank 0.

The format is that of Chrome's traces: https://ui.perfetto.dev and chrome://tracing show it. A rank
is a process there, and its threads have names.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from mpicomp.comm.clocks import Reading, compare, on_rank0
from mpicomp.comm.communicator import Communicator
from mpicomp.comm.waiting import run
from mpicomp.errors import MpicompError
from mpicomp.profile import Event, Profile


def check(path: str) -> None:
    """Find out now, not after hours of training, that the trace cannot be written."""
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise MpicompError(
            f"environment: MPICOMP_TRACE must be a file that can be written, got {path!r}: "
            f"{error.strerror}"
        ) from None


def write(path: str, profile: Profile, communicator: Communicator, start: Reading) -> None:
    """Collective: rank 0 writes what all ranks noted to ``path``.

    Args:
        start: this rank's reading of the clock of rank 0 from before the first note.
    """
    end = run(compare(communicator.comm))
    events = aligned(profile.take_events(), start, end)
    error_us = max(start.error, end.error) / 1e3
    where = f"on {socket.gethostname()}"
    if communicator.rank:
        where += f", clock known within {error_us:.1f} us"
    names = _names(communicator.rank, where, profile.threads)
    ranks = communicator.comm.gather((names, events, error_us))
    if ranks is not None:
        Path(path).write_text(json.dumps(_document(ranks)))


def aligned(events: list[Event], start: Reading, end: Reading) -> list[Event]:
    """``events`` with their times, in ns of this rank's clock, on the clock of rank 0."""
    return [event | {"ts": on_rank0(event["ts"], start, end)} for event in events]


def _names(rank: int, where: str, threads: dict[int, str]) -> list[Event]:
    """The events that name a rank and its threads and keep them in order."""
    described: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": f"rank {rank}"})
    ]
    described += [("process_labels", 0, {"labels": where})]
    described += [("process_sort_index", 0, {"sort_index": rank})]
    for place, (thread, name) in enumerate(threads.items()):
        described += [("thread_name", thread, {"name": name})]
        described += [("thread_sort_index", thread, {"sort_index": place})]
    return [
        {"name": name, "ph": "M", "pid": rank, "tid": thread, "args": args}
        for name, thread, args in described
    ]


def _document(ranks: list[tuple[list[Event], list[Event], float]]) -> dict[str, Any]:
    """The file: times in us from the first event on."""
    first = min((event["ts"] for _, events, _ in ranks for event in events), default=0)
    timed = [
        event | {"ts": (event["ts"] - first) / 1e3} for _, events, _ in ranks for event in events
    ]
    return {
        "traceEvents": [name for names, _, _ in ranks for name in names] + timed,
        "displayTimeUnit": "ms",
        "otherData": {"clock_error_us": [error_us for _, _, error_us in ranks]},
    }
