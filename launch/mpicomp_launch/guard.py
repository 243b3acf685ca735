"""Carries what a rank prints to the launcher, says how it ended, and cleans up after it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import selectors
import signal
import stat
import struct
import sys
import termios
import time
from collections import deque
from collections.abc import Iterator, Mapping
from types import FrameType

from mpicomp_launch import frames
from mpicomp_launch.lines import Lines
from mpicomp_launch.processes import descendants, kill_descendants

OUTPUT_FD = 2  # Open MPI gives ranks a terminal for standard output, which cuts and mixes lines
BATCH_BYTES = 4096  # what every MPI's helper reads at once, and what a pipe takes in one piece
MAX_QUEUED_BYTES = 1 << 18
POLL_SECONDS = (0.0001, 0.01)  # between two looks whether the launcher can take more
TICK_SECONDS = 0.5
LINGER_SECONDS = 1.0  # for helpers of the rank to end by themselves, and for their last output
DRAIN_SECONDS = 2.0  # for the launcher to take the last frames, when the job is over
READ_BYTES = 1 << 16
# What asks a rank to end, and what it then gets. Launchers that kill at once where they are sent
# SIGINT or SIGTERM pass the last two on.
STOPS = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGHUP,
    signal.SIGURG: signal.SIGINT,
    signal.SIGUSR2: signal.SIGTERM,
}


class Guard:
    """Stays with one rank from its start until no process of it is left.

    Args:
        number: Which rank it is.
        pid: Its process.
        shim: Our parent; if that is gone, so is the job.
        out, err: Its standard output and error, to read from.
        report: Where it says why it fails.
        acknowledge: Where it hears that the launcher knows.
        grace_seconds: What it has to end by itself, when asked.
    """

    def __init__(
        self,
        *,
        number: int,
        pid: int,
        shim: int,
        out: int,
        err: int,
        report: int,
        acknowledge: int,
        grace_seconds: float,
    ) -> None:
        self._number = number
        self._pid = pid
        self._shim = shim
        self._acknowledge = acknowledge
        self._grace_seconds = grace_seconds
        self._lines = {out: Lines(number, "o"), err: Lines(number, "e")}
        self._report = report
        self._reported = b""
        self._queue: deque[bytes] = deque()
        self._num_queued = 0
        self._has_reported = False
        self._owes_answer = False
        self._pause = POLL_SECONDS[0]
        self._kill_at = float("inf")
        self._is_stopped = False
        self._status: int | None = None
        self._is_pipe = stat.S_ISFIFO(os.fstat(OUTPUT_FD).st_mode)
        self._reader = select.poll()
        self._reader.register(OUTPUT_FD, 0)
        self._selector = selectors.DefaultSelector()
        for fd in (out, err, report):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ)
        self._install_signals()

    def run(self) -> int:
        """Returns the rank's status as `waitpid` gives it."""
        python = ".".join(map(str, sys.version_info[:3]))
        self._tell("s", {"host": os.uname().nodename, "pid": os.getpid(), "python": python})
        try:
            while self._status is None:
                self._turn(TICK_SECONDS)
                self._look_after()
            self._clean_up()
        except OSError:  # nobody reads what we write: the job is over
            kill_descendants()
        if self._status is None:
            _, self._status = os.waitpid(self._pid, 0)
        return self._status

    def _tell(self, kind: str, record: Mapping[str, object]) -> None:
        self._put(frames.encode_long(self._number, kind, json.dumps(record).encode()))

    def _put(self, pieces: Iterator[bytes]) -> None:
        for piece in pieces:
            self._queue.append(piece)
            self._num_queued += len(piece)

    # One turn: read what the rank prints, write what the launcher can take.

    def _turn(self, seconds: float) -> None:
        if self._queue or self._owes_answer:
            time.sleep(self._pause)
            seconds = 0.0
        waits = [each.seconds_to_piece() for each in self._lines.values()]
        seconds = min(seconds, *(wait for wait in waits if wait is not None), TICK_SECONDS)
        for key, _ in [] if self._is_full() else self._selector.select(max(0.0, seconds)):
            self._read(key.fd)
        for lines in self._lines.values():
            due = lines.seconds_to_piece()
            if due is not None and due <= 0:
                self._put(lines.take_piece())
        self._write()

    def _read(self, fd: int) -> None:
        if fd not in self._selector.get_map():  # its end was met on the way to another one's
            return
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(fd)
        elif fd == self._wakeup:
            pass
        elif fd == self._report:
            self._take_report(data)
        else:
            self._put(self._lines[fd].feed(data))

    def _take_report(self, data: bytes) -> None:
        """The first report counts; what the rank has printed before it is passed on before it."""
        if self._has_reported:
            return
        self._reported += data
        line, end, _ = self._reported.partition(b"\n")
        if end:
            self._read_rest()
            self._tell("f", parse_report(line))
            self._has_reported = self._owes_answer = True

    def _read_rest(self) -> None:
        for fd, lines in self._lines.items():
            self._read(fd)
            self._put(lines.take_piece())

    def _write(self) -> None:
        """Whole frames, into an empty pipe: then nobody can cut one or mix it with another's."""
        if not self._is_drained():
            self._pause = min(2 * self._pause, POLL_SECONDS[1])
            return
        self._pause = POLL_SECONDS[0]
        batch: list[bytes] = []
        size = 0
        while self._queue and size + len(self._queue[0]) <= BATCH_BYTES:
            batch.append(self._queue.popleft())
            size += len(batch[-1])
        self._num_queued -= size
        if batch:
            write_all(OUTPUT_FD, b"".join(batch))
        elif self._owes_answer:
            self._owes_answer = False
            with contextlib.suppress(OSError):  # the rank does not wait any more
                os.write(self._acknowledge, b".")

    def _is_full(self) -> bool:
        return self._num_queued > MAX_QUEUED_BYTES

    def _is_drained(self) -> bool:
        """Whether the launcher has taken all; raises an OSError if it is gone."""
        if any(events & select.POLLERR for _, events in self._reader.poll(0)):
            raise BrokenPipeError
        if not self._is_pipe:
            return True
        waiting = fcntl.ioctl(OUTPUT_FD, termios.FIONREAD, bytes(4))
        return bool(struct.unpack("i", waiting)[0] == 0)

    # Signals, and the end.

    def _install_signals(self) -> None:
        self._wakeup, wakeup_in = os.pipe()
        for fd in (self._wakeup, wakeup_in):
            os.set_blocking(fd, False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        signal.set_wakeup_fd(wakeup_in, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        for signum in STOPS:
            if signal.getsignal(signum) != signal.SIG_IGN:  # as under nohup
                signal.signal(signum, self._on_stop)
        signal.signal(signal.SIGUSR1, self._pass_on)

    def _on_stop(self, signum: int, frame: FrameType | None) -> None:
        """Asks the rank to end; kills it when grace is over, or at once if the job is gone."""
        self._is_stopped = True
        if os.getppid() != self._shim:
            self._kill_at = 0.0
            return
        self._kill_at = min(self._kill_at, time.monotonic() + self._grace_seconds)
        self._pass_on(STOPS[signal.Signals(signum)], frame)

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # it has ended
            os.kill(self._pid, signum)

    def _look_after(self) -> None:
        self._is_drained()
        if time.monotonic() > self._kill_at or os.getppid() != self._shim:
            self._is_stopped = True
            kill_descendants()
        ended, status = os.waitpid(-1, os.WNOHANG)  # orphans that we adopted, too
        while ended:
            if ended == self._pid:
                self._status = status
                return
            ended, status = os.waitpid(-1, os.WNOHANG)

    def _clean_up(self) -> None:
        """After the rank: what it started, what was printed last, and the news of its end."""
        assert self._status is not None
        end = time.monotonic() + LINGER_SECONDS
        while descendants() and time.monotonic() < min(end, self._kill_at):
            self._turn(TICK_SECONDS / 10)
        kill_descendants()
        end = time.monotonic() + LINGER_SECONDS
        while self._has_output() and time.monotonic() < end:
            self._turn(TICK_SECONDS / 10)
            if self._is_full() and not self._is_over():
                # The launcher reads slowly, as any program's reader may.
                end = time.monotonic() + LINGER_SECONDS
        for lines in self._lines.values():
            self._put(lines.take_piece())
        self._read(self._report)  # it may have been written in the last moment
        code = os.waitstatus_to_exitcode(self._status)
        ended = {"status": max(code, 0), "signal": max(-code, 0), "stopped": self._is_stopped}
        self._tell("x", ended)
        end = time.monotonic() + DRAIN_SECONDS
        while self._queue or not self._is_drained():
            if self._is_over() and time.monotonic() > end:
                return
            self._write()
            time.sleep(self._pause)

    def _is_over(self) -> bool:
        """Whether the job has been told to end, or has ended without us."""
        return self._is_stopped or os.getppid() != self._shim

    def _has_output(self) -> bool:
        return any(fd in self._selector.get_map() for fd in self._lines)


def parse_report(line: bytes) -> Mapping[str, object]:
    """What a rank has reported; any program can write anything there."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("status"), int):
            return {"status": record["status"] & 0xFF or 1, "text": str(record.get("text", ""))}
    return {"status": 1, "text": line.decode(errors="replace") + "\n"}


def write_all(fd: int, data: bytes) -> None:
    """Writes to a blocking descriptor, or to one that somebody made non-blocking."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            time.sleep(POLL_SECONDS[0])
