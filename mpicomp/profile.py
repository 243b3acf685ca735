"""Where the time and the bytes go: totals for `stats`, and notes for a trace if one is wanted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]  # of a Chrome trace, but for its time, which is in ns
_NO_SPAN = nullcontext()


@dataclass(slots=True)
class Stats:
    """Totals of this rank since the start.

    Attributes:
        steps: exchanges of all gradients, one for each synchronised backward pass.
        bytes_sent: bytes in this rank's messages, as the compressors made them.
        bytes_received: bytes in the answers that came from other ranks.
        dense_bytes: what an exchange without compression would have sent.
        accumulate_seconds: copying gradients into buckets, and adding residuals to them.
        encode_seconds: spent in compressors until their last message, choosing and encoding.
        communicate_seconds: from handing a message over to having its answer.
        index_seconds: the share of it that indices took, by their bytes (int32 and int64).
        decode_seconds: from the last answer on, decoding, storing means and residuals.
        wait_seconds: the training thread stood still at the end of backward.
        hidden_seconds: work on the exchange that went on behind the backward pass.
        bad_steps: exchanges in which some rank had a gradient that was not finite.
    """

    steps: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    dense_bytes: int = 0
    accumulate_seconds: float = 0.0
    encode_seconds: float = 0.0
    communicate_seconds: float = 0.0
    index_seconds: float = 0.0
    decode_seconds: float = 0.0
    wait_seconds: float = 0.0
    hidden_seconds: float = 0.0
    bad_steps: int = 0

    @property
    def worked_seconds(self) -> float:
        """What exchanges took in all, hidden or not, less the copies into buckets."""
        return self.encode_seconds + self.communicate_seconds + self.decode_seconds

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent than without compression; 1 before any step."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    def __sub__(self, earlier: Stats) -> Stats:
        """What happened since ``earlier``."""
        return Stats(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def __str__(self) -> str:
        if not self.steps:
            return "no gradients were exchanged (one rank, or no backward pass)"
        steps = self.steps
        return (
            f"{self.steps} steps ({self.bad_steps} bad), {self.bytes_sent / steps:,.0f} bytes sent "
            f"per step ({self.ratio:.1f}x less than dense); ms per step: "
            f"accumulate {1e3 * self.accumulate_seconds / steps:.2f}, "
            f"encode {1e3 * self.encode_seconds / steps:.2f}, "
            f"communicate {1e3 * self.communicate_seconds / steps:.2f}, "
            f"decode {1e3 * self.decode_seconds / steps:.2f}, "
            f"hidden {1e3 * self.hidden_seconds / steps:.2f}, "
            f"wait {1e3 * self.wait_seconds / steps:.2f}"
        )


class Profile:
    """The counters of one process and, with ``tracing``, what each of its threads did when.

    Attributes:
        threads: the names of those that have noted something, in the order in which they began.
    """

    def __init__(self, *, rank: int, tracing: bool) -> None:
        self.stats = Stats()
        self.tracing = tracing
        self.threads: dict[int, str] = {}
        self._rank = rank
        self._events: list[Event] = []

    def mark(self, name: str, **details: object) -> None:
        """A point in time in the trace."""
        if self.tracing:
            self._record(name, "i", time.perf_counter_ns(), args=details, s="t")

    def span(self, name: str, **details: object) -> AbstractContextManager[None]:
        """A stretch of time in the trace, on the thread that runs it."""
        return self._noted(name, details) if self.tracing else _NO_SPAN

    @contextmanager
    def _noted(self, name: str, details: dict[str, object]) -> Iterator[None]:
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            duration_us = (time.perf_counter_ns() - start) / 1e3
            self._record(name, "X", start, args=details, dur=duration_us)

    def _record(self, name: str, phase: str, start_ns: int, **rest: object) -> None:
        thread = threading.get_native_id()
        if thread not in self.threads:
            self.threads[thread] = _name_of(threading.current_thread())
        event = {"name": name, "ph": phase, "ts": start_ns, "pid": self._rank, "tid": thread}
        self._events.append(event | rest)

    def take_events(self) -> list[Event]:
        """The events so far, which are then forgotten."""
        events, self._events = self._events, []
        return events


def _name_of(thread: threading.Thread) -> str:
    """What a thread is called in a trace."""
    if thread is threading.main_thread():
        return "training"
    if thread.name == "mpicomp":
        return "communication"
    return "autograd" if thread.name.startswith("Dummy-") else thread.name  # not of Python's making
