"""A running job: starts the MPI's launcher, passes signals on, and leaves nobody behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from mpicomp_launch import worker
from mpicomp_launch.dialects import Command, Dialect
from mpicomp_launch.plan import Plan

PR_SET_CHILD_SUBREAPER = 36
TICK_SECONDS = 0.2
NOTICE_SECONDS = 1.0  # from a rank's failure to our ending the job, if the MPI has not
FAILED_GRACE_SECONDS = 2.0  # from then to SIGKILL for whoever is left
STOPPED_GRACE_SECONDS = 5.0  # from a signal to SIGKILL


def run(plan: Plan, dialect: Dialect) -> int:
    """Runs a job to its end and returns its exit status.

    That is the status of the first rank that failed, 128 + n after signal n.
    """
    with tempfile.TemporaryDirectory(prefix="mpicomp-") as private:
        status_file = Path(private, "status")
        job = Job(dialect.command(plan), plan, status_file)
        status = job.wait()
        if job.stopped_by:
            return 128 + job.stopped_by
        if status_file.exists():
            return int(status_file.read_text() or 1)
        if status < 0:
            return 128 - status
        return dialect.status_of_killed(status) if plan.command.is_python else status


class Job:
    """The MPI's launcher as a child process.

    Attributes:
        stopped_by: The signal that ended us, 0 if none did.
    """

    def __init__(self, command: Command, plan: Plan, status_file: Path) -> None:
        self.stopped_by = 0
        self._status_file = status_file
        self._deadline = float("inf")
        adopt_orphans()
        self._process = subprocess.Popen(
            command.argv,
            env={**plan.environ, **command.exports, "MPICOMP_STATUS_FILE": str(status_file)},
            cwd=command.cwd,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=worker.die_with_parent,
        )
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, self._stop)
        signal.signal(signal.SIGALRM, self._tick)
        signal.setitimer(signal.ITIMER_REAL, TICK_SECONDS, TICK_SECONDS)

    def wait(self) -> int:
        """Waits for the end; returns the launcher's own status, as `subprocess` gives it."""
        status = self._process.wait()
        signal.setitimer(signal.ITIMER_REAL, 0)
        if status or self.stopped_by:
            self._sweep()
        return status

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        """Asks the job to end; the second time it is not asked."""
        if self.stopped_by:
            kill_descendants()
            return
        self.stopped_by = signum
        name = signal.Signals(signum).name
        os.write(2, f"mpicomp-launch: {name}, ending the job\n".encode())
        self._end(signum if signum == signal.SIGINT else signal.SIGTERM, STOPPED_GRACE_SECONDS)

    def _tick(self, signum: int, frame: FrameType | None) -> None:
        """Ends the job after a failure which the MPI did not notice, and when grace is over.

        When a rank exits before `MPI_Init`, hydra lets all others wait for it there, and Open MPI
        5.0.11 may hang itself.
        """
        if time.monotonic() > self._deadline:
            kill_descendants()
        elif self._deadline == float("inf") and self._seconds_since_failure() > NOTICE_SECONDS:
            self._end(signal.SIGTERM, FAILED_GRACE_SECONDS)

    def _seconds_since_failure(self) -> float:
        if not self._status_file.exists():
            return 0.0
        return time.time() - self._status_file.stat().st_mtime

    def _end(self, signum: int, grace_seconds: float) -> None:
        self._deadline = time.monotonic() + grace_seconds
        self._process.send_signal(signum)

    def _sweep(self) -> None:
        """Kills what a failed job left, after a moment in which helpers can tidy up."""
        end = time.monotonic() + FAILED_GRACE_SECONDS
        while descendants() and time.monotonic() < end:
            time.sleep(TICK_SECONDS / 4)
        kill_descendants()


def adopt_orphans() -> None:
    """Processes below us whose parent dies become our children, not those of process 1."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> list[int]:
    """Living processes below this one, from /proc; none where that does not exist."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
        except OSError:  # ended meanwhile
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = list(children.get(os.getpid(), []))
    for pid in found:
        found += children.get(pid, [])
    return found


def kill_descendants() -> None:
    """SIGKILL for every process below this one."""
    for pid in descendants():
        with contextlib.suppress(OSError):  # ended meanwhile, or somebody else's
            os.kill(pid, signal.SIGKILL)
