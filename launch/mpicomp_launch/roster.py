"""What the ranks of a job say: who has come up, what they print, who has failed, who has ended."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from mpicomp_launch.frames import Frame
from mpicomp_launch.output import Printer

NOT_STARTED = 125
KILLED = 137


@dataclass(frozen=True)
class Started:
    """A rank that has come up: where, and as which process."""

    host: str
    pid: int
    python: str


@dataclass(frozen=True)
class Failure:
    """How a rank failed: its exit status (128 + n after signal n), its last words, and why."""

    rank: int
    host: str
    status: int
    text: str
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        if self.status > 128 and not self.text:
            number = self.status - 128
            with contextlib.suppress(ValueError):
                return f"was killed by signal {number} ({signal.Signals(number).name})"
        return f"failed with status {self.status}"


class Roster:
    """Takes the frames of all ranks, and passes on what they print.

    Attributes:
        started: The ranks that have come up.
        failures: Those that have failed, the first one first.
        first_to_end: The first rank that has ended by itself, for messages.
        has_stopped: Whether a rank has ended because it was told to.
        is_closed: Whether ranks that fail from now on do so because they have been stopped.
    """

    def __init__(self, np: int, printer: Printer) -> None:
        self.started: dict[int, Started] = {}
        self.failures: list[Failure] = []
        self.first_to_end = ""
        self.has_stopped = False
        self.is_closed = False
        self._np = np
        self._printer = printer
        self._ended: set[int] = set()
        self._watched: set[int] = set()
        self._suspects: set[int] = set()
        self._records: dict[int, bytes] = {}  # those which have come in part

    def missing(self) -> list[int]:
        """The ranks that have not come up."""
        return [rank for rank in range(self._np) if rank not in self.started]

    def take(self, frame: Frame) -> None:
        """One frame."""
        rank, kind, payload = frame.rank, frame.kind, frame.payload
        host = self.started[rank].host if rank in self.started else "?"
        if kind in "oe":
            self._printer.line(rank, host, kind, payload)
        elif kind in "OE":
            self._printer.piece(rank, host, kind.lower(), payload)
        else:
            self._records[rank] = self._records.get(rank, b"") + payload
            if kind.islower():
                self._take_record(rank, host, kind, json.loads(self._records.pop(rank)))

    def look_for_lost(self) -> None:
        """After the end of a job that was said to be well: ranks that have not said that they end.

        Open MPI ends with status 0 when it has lost a host.
        """
        for rank in sorted(self.started.keys() - self._ended):
            reason = "was lost, with its host or the way to it"
            self._note(Failure(rank, self.started[rank].host, 1, "", reason))

    def look_for_killed(self, alive: Container[int], host: str) -> None:
        """Ranks of this host whose guard is gone without a word, at two looks in a row.

        The MPI need not notice: ranks that have not begun with it are nothing to it.

        Args:
            alive: The processes below the launcher. Only a guard that was among them once can be
                missed: schedulers, and ssh, start ranks of this host elsewhere.
            host: This host.
        """
        here = {
            rank: started.pid in alive
            for rank, started in self.started.items()
            if rank not in self._ended and started.host == host
        }
        self._watched |= {rank for rank, is_alive in here.items() if is_alive}
        gone = {rank for rank, is_alive in here.items() if rank in self._watched and not is_alive}
        for rank in sorted(gone & self._suspects):
            reason = "was killed, together with what watches over it"
            self._note(Failure(rank, host, KILLED, "", reason))
        self._suspects = gone

    def _take_record(self, rank: int, host: str, kind: str, record: dict[str, Any]) -> None:
        if kind == "s":
            started = Started(**record)
            self.started[rank] = started
            self._compare(rank, started)
        elif kind == "f":
            self._note(Failure(rank, host, **record))
        else:
            self._ended.add(rank)
            self.has_stopped |= record["stopped"]
            if not record["stopped"]:
                self.first_to_end = self.first_to_end or f"rank {rank} on {host}"
            status = 128 + record["signal"] if record["signal"] else record["status"]
            if status and not record["stopped"]:
                self._note(Failure(rank, host, status, ""))

    def _compare(self, rank: int, started: Started) -> None:
        """Ranks of two versions of Python do not understand each other's objects."""
        number = min(self.started)
        first = self.started[number]
        if started.python != first.python:
            reason = (
                f"runs Python {started.python}, and rank {number} on {first.host} "
                f"{first.python}; all ranks must run the same"
            )
            self._note(Failure(rank, started.host, NOT_STARTED, "", reason))

    def _note(self, failure: Failure) -> None:
        """A rank that says what happened and then ends has failed once."""
        if not self.is_closed and failure.rank not in [each.rank for each in self.failures]:
            self.failures.append(failure)
