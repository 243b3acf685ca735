"""The two processes above a rank: one that the MPI knows, and one that sees to the rank.

    mpirun's helper ── shim ── guard ── rank ── whatever it starts

The *shim* is the child the MPI waits for, signals and kills; it only passes signals on, and kills
what is left should the guard be killed. The *guard* lives in a session of its own, so that no kill
meant for the shim's group takes it away; it carries the rank's output to the launcher, says how the
rank ended, and then kills every process that the rank has left, also when the shim or the launcher
has been killed. All by `fork`: one interpreter starts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from mpicomp_launch import rank_env
from mpicomp_launch.frames import LISTENED_TO
from mpicomp_launch.guard import STOPS, Guard
from mpicomp_launch.processes import adopt_orphans, die_with_parent, kill_descendants

DEFAULT_GRACE_SECONDS = 5.0

Run = Callable[[int | None, int | None], NoReturn]


def supervise(run: Run) -> NoReturn:
    """Calls ``run`` in a process of its own, and exits with its status, 128 + n after signal n."""
    grace_seconds = float(os.environ.get("MPICOMP_GRACE") or DEFAULT_GRACE_SECONDS)
    rank_env.prepare(os.environ, rank_env.count_cores(), rank_env.count_gpus())
    die_with_parent()
    if not os.environ.pop(LISTENED_TO, ""):
        run(None, None)
    adopt_orphans()
    shim = os.getpid()
    guard = os.fork()
    if guard == 0:
        be_guard(run, shim, grace_seconds)
    pass_signals_on(guard)
    _, status = os.waitpid(guard, 0)
    if os.WIFSIGNALED(status):
        kill_descendants()
    os._exit(exit_status(status))


def pass_signals_on(pid: int) -> None:
    """What this process is sent goes to another one."""

    def pass_on(signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # it has ended
            os.kill(pid, signum)

    for signum in (*STOPS, signal.SIGUSR1):
        if signal.getsignal(signum) != signal.SIG_IGN:  # as under nohup
            signal.signal(signum, pass_on)


def be_guard(run: Run, shim: int, grace_seconds: float) -> NoReturn:
    """Starts the rank and stays with it."""
    os.setsid()
    adopt_orphans()
    die_with_parent(signal.SIGTERM)
    out, err, report, acknowledge = (os.pipe() for _ in range(4))
    guard = os.getpid()
    rank = os.fork()
    if rank == 0:
        die_with_parent()
        if os.getppid() != guard:  # it ended before that was said
            os._exit(1)
        os.setpgid(0, 0)  # what the program does to its group must not meet the guard
        be_rank(out, err, (out[0], err[0], report[0], acknowledge[1]))
        os.environ["MPICOMP_REPORT_FD"] = f"{report[1]}:{os.getpid()}"
        run(report[1], acknowledge[0])
    for fd in (out[1], err[1], report[1], acknowledge[0]):
        os.close(fd)
    status = Guard(
        number=rank_env.number(rank_env.RANK, os.environ) or 0,
        pid=rank,
        shim=shim,
        out=out[0],
        err=err[0],
        report=report[0],
        acknowledge=acknowledge[1],
        grace_seconds=grace_seconds,
    ).run()
    os._exit(exit_status(status))


def be_rank(out: tuple[int, int], err: tuple[int, int], of_guard: tuple[int, ...]) -> None:
    """Standard streams of the rank: nothing to read, and pipes to write to.

    Without a terminal or file behind them, Python would keep lines back: `rank.run` sees to that.
    """
    for fd in of_guard:
        os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out[1], 1), (err[1], 2)):
        os.dup2(source, target)
        if source > 2:
            os.close(source)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - it lasts as long as the process


def exit_status(wait_status: int) -> int:
    """A shell's status of what `waitpid` has said."""
    code = os.waitstatus_to_exitcode(wait_status)
    return 128 - code if code < 0 else code
