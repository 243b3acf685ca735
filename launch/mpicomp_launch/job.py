"""A running job: starts the launcher of the MPI, hears its ranks, and leaves nobody behind."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from mpicomp_launch.diagnose import hosts_of, listening_ports, missing_ranks, shorten
from mpicomp_launch.dialects import Command, Dialect
from mpicomp_launch.frames import LISTENED_TO, Decoder, Frame
from mpicomp_launch.output import Printer
from mpicomp_launch.plan import Plan
from mpicomp_launch.processes import adopt_orphans, descendants, die_with_parent, kill_descendants

TIMED_OUT = 124
NOT_STARTED = 125
TICK_SECONDS = 0.2
POLL_SECONDS = 0.002  # for the end of mpirun, when it has closed its output
NOTICE_SECONDS = 1.0  # from a rank's failure to our ending the job, if the MPI has not
KILL_SECONDS = 2.0  # from our ending mpirun to SIGKILL for whoever is left
DRAIN_SECONDS = 1.0  # for output that is still under way when mpirun has ended
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Limits:
    """Seconds: for all ranks to come up, for the whole job, and from a signal to the end."""

    start: float
    whole: float | None
    grace: float


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


class Job:
    """The MPI's launcher as a child process, and what is known of the ranks below it.

    Attributes:
        started: The ranks that have come up.
        failures: Those that have failed, the first one first.
        ended: Those that have said that they end.
        stopped_by: The signal that ended us, 0 if none did.
        is_late: Whether the time for the job, or for its start, has run out.
        diagnosis: What is wrong with the hosts whose ranks have not come up.
    """

    def __init__(
        self, command: Command, dialect: Dialect, plan: Plan, limits: Limits, printer: Printer
    ) -> None:
        self.started: dict[int, Started] = {}
        self.failures: list[Failure] = []
        self.ended: set[int] = set()
        self.stopped_by = 0
        self.is_late = False
        self.diagnosis: list[str] = []
        self._plan = plan
        self._limits = limits
        self._dialect = dialect
        self._printer = printer
        self._records: dict[int, bytes] = {}  # those which have come in part
        self._alarms: dict[str, float] = {}  # what is to be done when
        self._selector = selectors.DefaultSelector()
        adopt_orphans()
        self._process = subprocess.Popen(
            command.argv,
            env={**plan.environ, **command.exports, LISTENED_TO: "1"},
            cwd=command.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, Decoder())
        self._install_signals()
        self._show_progress(self.missing())
        self._alarm("start", limits.start)
        self._alarm("timeout", limits.whole)

    def run(self) -> int:
        """Waits for the end and returns the exit status.

        That is the status of the first rank that failed, 128 + n after signal n.
        """
        while self._process.poll() is None:
            self._hear(TICK_SECONDS)
            self._look_at_clock()
        self._finish()
        return self._status()

    def missing(self) -> list[int]:
        """The ranks that have not come up."""
        return [rank for rank in range(self._plan.np) if rank not in self.started]

    def _status(self) -> int:
        mpi_status = self._process.returncode
        if self.stopped_by:
            return 128 + self.stopped_by
        if self.failures:
            return self.failures[0].status
        if self.is_late:
            return NOT_STARTED if self.missing() else TIMED_OUT
        if mpi_status and self.missing():
            return NOT_STARTED
        return 128 - mpi_status if mpi_status < 0 else mpi_status

    # What ranks say.

    def _hear(self, seconds: float) -> bool:
        """Takes what has come within a time; False if nothing can come any more."""
        if not self._selector.get_map():
            time.sleep(min(seconds, POLL_SECONDS))
            return False
        for key, _ in self._selector.select(seconds):
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            decoder: Decoder = key.data
            self._take(decoder.feed(data) if data else decoder.flush())
            if not data:
                self._selector.unregister(key.fileobj)
        return True

    def _take(self, items: Iterator[Frame | bytes]) -> None:
        for item in items:
            try:
                self._take_item(item)
            except OSError as error:
                self._lose_output(error)

    def _lose_output(self, error: OSError) -> None:
        """A job whose output goes nowhere is stopped, as a program is that writes there itself."""
        if not self.stopped_by:
            self.stopped_by = signal.SIGPIPE
            if error.errno != errno.EPIPE:
                with contextlib.suppress(OSError):
                    self._printer.say(f"output cannot be written: {error.strerror}, ending the job")
            self._stop(signal.SIGTERM)

    def _take_item(self, item: Frame | bytes) -> None:
        if isinstance(item, Frame):
            self._take_frame(item)
        elif self._plan.verbose or not (self.failures or self.stopped_by or self.is_late):
            self._printer.plain(item)  # the MPI's own obituaries would bury the reason

    def _take_frame(self, frame: Frame) -> None:
        rank, payload = frame.rank, frame.payload
        host = self.started[rank].host if rank in self.started else "?"
        if frame.kind in "oe":
            self._printer.line(rank, host, frame.kind, payload)
        elif frame.kind in "OE":
            self._printer.piece(rank, host, frame.kind.lower(), payload)
        else:
            self._take_record(rank, host, frame.kind, payload)

    def _take_record(self, rank: int, host: str, kind: str, payload: bytes) -> None:
        self._records[rank] = self._records.get(rank, b"") + payload
        if kind.islower():
            record = json.loads(self._records.pop(rank))
            if kind == "s":
                self._take_start(rank, Started(record["host"], record["pid"], record["python"]))
            elif kind == "f":
                self._take_failure(Failure(rank, host, record["status"], record["text"]))
            elif kind == "x":
                self.ended.add(rank)
                if record["stopped"]:
                    return
                status = 128 + record["signal"] if record["signal"] else record["status"]
                if status:
                    self._take_failure(Failure(rank, host, status, ""))

    def _take_start(self, rank: int, started: Started) -> None:
        self.started[rank] = started
        missing = self.missing()
        first = self.started[min(self.started)]
        if started.python != first.python:
            text = f"runs Python {started.python}, and rank {min(self.started)} on {first.host} "
            text += f"{first.python}; all ranks must run the same"
            self._take_failure(Failure(rank, started.host, NOT_STARTED, "", text))
        if not missing:
            self._alarms.pop("start", None)
        self._show_progress(missing)

    def _show_progress(self, missing: list[int]) -> None:
        """One passing line while ranks come up."""
        text = ""
        if missing:
            np = self._plan.np
            hosts = hosts_of(self._plan, missing)
            waiting = f", waiting for {shorten(hosts)}" if hosts else ""
            text = f"mpicomp-launch: {np - len(missing)} of {np} ranks are up{waiting}"
        self._printer.pass_by(text.encode())

    def _take_failure(self, failure: Failure) -> None:
        """Notes it; a rank that says what happened and then ends has failed once."""
        if self.stopped_by or self.is_late:
            return
        if failure.rank not in [each.rank for each in self.failures]:
            self.failures.append(failure)
            self._alarm("end", NOTICE_SECONDS)

    # Time and signals.

    def _alarm(self, what: str, seconds: float | None) -> None:
        if seconds is not None:
            self._alarms.setdefault(what, time.monotonic() + seconds)

    def _look_at_clock(self) -> None:
        """Does what is due.

        Ranks that fail before `MPI_Init` leave the others waiting for them, and mpirun too: hydra
        always, Open MPI 5 sometimes. So a failure ends the job, whatever the MPI does.
        """
        now = time.monotonic()
        for what in [name for name, due in self._alarms.items() if due <= now]:
            del self._alarms[what]
            if what == "kill":
                kill_descendants()
            elif what == "end":
                self._process.terminate()
                self._alarm("kill", KILL_SECONDS)
            else:
                self.is_late = True
                if what == "start":  # while mpirun still waits for the answer of its helpers
                    self._diagnose(listening_ports(self._process.pid))
                self._stop(signal.SIGTERM)

    def _diagnose(self, ports: list[int]) -> None:
        self._printer.pass_by(b"")
        self.diagnosis = missing_ranks(self._plan, self.missing(), ports)

    def _install_signals(self) -> None:
        for signum in STOPPING:
            if signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, self._on_stop)
        signal.signal(signal.SIGUSR1, self._on_other)

    def _on_stop(self, signum: int, frame: FrameType | None) -> None:
        """Asks the job to end; the second time it is not asked."""
        if self.stopped_by or self.is_late:
            kill_descendants()
            return
        self.stopped_by = signum
        os.write(2, f"mpicomp-launch: {signal.Signals(signum).name}, ending the job\n".encode())
        self._stop(signum)

    def _on_other(self, signum: int, frame: FrameType | None) -> None:
        self._signal_ranks(signum)

    def _stop(self, signum: int) -> None:
        """Lets ranks tidy up, then ends mpirun, then whoever is left."""
        self._signal_ranks(signum)
        self._alarm("end", self._limits.grace)

    def _signal_ranks(self, signum: int) -> None:
        """Sends a signal to all ranks: to those of this host directly, else by way of mpirun.

        mpiruns differ in what they pass on, and some kill at once where they are asked to stop.
        """
        here = os.uname().nodename
        if self.missing() or any(rank.host != here for rank in self.started.values()):
            self._process.send_signal(self._dialect.carrier(signum))
            return
        for rank in self.started.values():
            with contextlib.suppress(OSError):  # it has ended
                os.kill(rank.pid, signum)

    def _finish(self) -> None:
        """Takes the last words, and kills what a failed job left, after a moment to tidy up."""
        end = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < end and self._hear(TICK_SECONDS / 4):
            pass
        if self._status() == NOT_STARTED and not self.diagnosis:
            self._diagnose([])
        if self._status() == 0:  # which Open MPI also says when it has lost a host
            for rank in sorted(self.started.keys() - self.ended):
                reason = "was lost, with its host or the way to it"
                self._take_failure(Failure(rank, self.started[rank].host, 1, "", reason))
        if self._status():
            end = time.monotonic() + KILL_SECONDS
            while descendants() and time.monotonic() < end:
                time.sleep(TICK_SECONDS / 4)
        kill_descendants()
