"""A running job: starts the launcher of the MPI, hears its ranks, and leaves nobody behind."""

from __future__ import annotations

import contextlib
import errno
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
from mpicomp_launch.roster import NOT_STARTED, Roster

TIMED_OUT = 124
TICK_SECONDS = 0.2
POLL_SECONDS = 0.002  # for the end of mpirun, when it has closed its output
NOTICE_SECONDS = 1.0  # from a rank's failure to our ending the job, if the MPI has not
FIRST_LOOK_SECONDS = 0.1  # after the last rank has come up
LOOK_SECONDS = 2.0  # between two looks for ranks that were killed without a word
KILL_SECONDS = 2.0  # from our ending mpirun to SIGKILL for whoever is left
DRAIN_SECONDS = 1.0  # for output that is still under way when mpirun has ended
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Limits:
    """Seconds: for all ranks to come up, for the whole job, and from a signal to the end."""

    start: float
    whole: float | None
    grace: float


class Job:
    """The MPI's launcher as a child process, and what is known of the ranks below it.

    Attributes:
        roster: What its ranks have said.
        stopped_by: The signal that ended us, 0 if none did.
        is_late: Whether the time for the job, or for its start, has run out.
        diagnosis: What is wrong with the hosts whose ranks have not come up.
    """

    def __init__(
        self, command: Command, dialect: Dialect, plan: Plan, limits: Limits, printer: Printer
    ) -> None:
        self.roster = Roster(plan.np, printer)
        self.stopped_by = 0
        self.is_late = False
        self.diagnosis: list[str] = []
        self._plan = plan
        self._limits = limits
        self._dialect = dialect
        self._printer = printer
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
        self._alarm("start", limits.start)
        self._alarm("timeout", limits.whole)

    def run(self) -> int:
        """Waits for the end and returns the exit status.

        That is the status of the first rank that failed, 128 + n after signal n.
        """
        while self._process.poll() is None:
            self._look_at_start()
            self._hear(TICK_SECONDS)
            self._look_at_clock()
        self._finish()
        return self._status()

    def _status(self) -> int:
        mpi_status = self._process.returncode
        if self.stopped_by:
            return 128 + self.stopped_by
        if self.roster.failures:
            return self.roster.failures[0].status
        if self.roster.missing():
            return NOT_STARTED
        if self.is_late:
            return TIMED_OUT
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
        if isinstance(item, bytes):
            if self._plan.verbose or not (self.roster.failures or self.roster.is_closed):
                self._printer.plain(item)  # the MPI's own obituaries would bury the reason
            return
        self.roster.take(item)
        if item.kind == "s":
            self._alarms["look"] = time.monotonic() + FIRST_LOOK_SECONDS
        if self.roster.failures or self.roster.has_stopped:
            self._alarm("end", NOTICE_SECONDS)

    def _look_at_start(self) -> None:
        """One passing line while ranks come up."""
        if "start" not in self._alarms:
            return
        missing = self.roster.missing()
        if not missing:
            del self._alarms["start"]
            self._printer.pass_by(b"")
            return
        np = self._plan.np
        hosts = hosts_of(self._plan, missing)
        waiting = f", waiting for {shorten(hosts)}" if hosts else ""
        text = f"mpicomp-launch: {np - len(missing)} of {np} ranks are up{waiting}"
        self._printer.pass_by(text.encode())

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
            if what == "look":
                self.roster.look_for_killed(descendants(), os.uname().nodename)
                if self.roster.failures:
                    self._alarm("end", NOTICE_SECONDS)
                self._alarm("look", LOOK_SECONDS)
            elif what == "kill":
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
        self.diagnosis = missing_ranks(self._plan, self.roster.missing(), ports)

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
        self.roster.is_closed = True
        self._signal_ranks(signum)
        self._alarm("end", self._limits.grace)

    def _signal_ranks(self, signum: int) -> None:
        """Sends a signal to all ranks: to those of this host directly, else by way of mpirun.

        mpiruns differ in what they pass on, and some kill at once where they are asked to stop.
        """
        here = os.uname().nodename
        ranks = self.roster.started.values()
        if self.roster.missing() or any(rank.host != here for rank in ranks):
            self._process.send_signal(self._dialect.carrier(signum))
            return
        for rank in ranks:
            with contextlib.suppress(OSError):  # it has ended
                os.kill(rank.pid, signum)

    def _finish(self) -> None:
        """Takes the last words, and kills what a failed job left, after a moment to tidy up."""
        end = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < end and self._hear(TICK_SECONDS / 4):
            pass
        if self._status() == NOT_STARTED and not self.diagnosis:
            self._diagnose([])
        if not self._status():
            self.roster.look_for_lost()
        if self._status():
            end = time.monotonic() + KILL_SECONDS
            while descendants() and time.monotonic() < end:
                time.sleep(TICK_SECONDS / 4)
        kill_descendants()
