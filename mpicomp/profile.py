"""Where the time and the bytes go: totals for `stats`, and a Chrome trace if one is asked for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


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
    """The counters of one process and, with ``tracing``, what each of its threads did when."""

    def __init__(self, *, rank: int, tracing: bool) -> None:
        self.stats = Stats()
        self._rank = rank
        self._tracing = tracing
        self._events: list[dict[str, Any]] = []

    def mark(self, name: str, **details: object) -> None:
        """A point in time in the trace."""
        if self._tracing:
            self._record(name, "i", time.time_ns(), args=details, s="t")

    @contextmanager
    def span(self, name: str, **details: object) -> Iterator[None]:
        """A stretch of time in the trace, on the thread that runs it."""
        if not self._tracing:
            yield
            return
        start = time.time_ns()
        try:
            yield
        finally:
            self._record(name, "X", start, args=details, dur=(time.time_ns() - start) / 1e3)

    def _record(self, name: str, phase: str, start_ns: int, **rest: object) -> None:
        # Wall-clock time, so that the ranks of a host share one time line.
        thread = threading.current_thread().name
        event = {"name": name, "ph": phase, "ts": start_ns / 1e3, "pid": self._rank, "tid": thread}
        self._events.append(event | rest)

    def take_events(self) -> list[dict[str, Any]]:
        """The events so far, which are then forgotten."""
        name = {"name": "process_name", "ph": "M", "pid": self._rank}
        events, self._events = self._events, []
        return [name | {"args": {"name": f"rank {self._rank}"}}, *events]


def write_trace(path: str, events: list[dict[str, Any]]) -> None:
    """Write ``events`` of all ranks as a Chrome trace (chrome://tracing, ui.perfetto.dev)."""
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
