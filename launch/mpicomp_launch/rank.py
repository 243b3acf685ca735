"""The rank itself: runs the user's program, and reports its failure before it ends all ranks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import sys
import time
import traceback
from types import TracebackType
from typing import NoReturn

from mpicomp_launch import program

INTERRUPTED = 130
NOT_FOUND = 127
ACKNOWLEDGE_SECONDS = 2.0


class CannotStart(Exception):
    """The program could not be started at all; the text says why."""


def escape(argument: str) -> str:
    """`:` as `::`, `::` as `:::`: every mpirun takes a lone `:` for a separator."""
    return argument + ":" if argument and not argument.strip(":") else argument


def unescape(argument: str) -> str:
    """Undoes `escape`."""
    return argument[:-1] if argument and not argument.strip(":") else argument


def run(report_fd: int | None, acknowledged_fd: int | None) -> NoReturn:
    """Runs the program of `sys.argv` and exits with its status.

    Args:
        report_fd: Where a failure is written to; None for standard error, where no guard listens.
        acknowledged_fd: Where a byte comes from when the launcher has it.
    """
    directory = os.environ.pop("MPICOMP_CHDIR", "")
    sys.argv = [unescape(argument) for argument in sys.argv[1:]]
    pid = os.getpid()
    try:
        change_directory(directory)
        if sys.argv[0] == "--exec":
            execute(sys.argv[1:], report_fd)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        program.run_program()
    except BaseException as error:
        status, text = describe(error)
        if os.getpid() != pid:  # a child which the program forked is no rank
            with contextlib.suppress(AttributeError, OSError, ValueError):  # it is closed, or none
                sys.stderr.write(text)
            sys.exit(status)
        if status:
            report(report_fd, acknowledged_fd, status, text)
            abort(status)
        sys.exit(status)
    sys.exit(0)


def change_directory(directory: str) -> None:
    """The working directory of the job; MPIs end up elsewhere, or nowhere, where it is missing."""
    try:
        if directory:
            os.chdir(directory)
    except OSError as error:
        sys.exit(f"the working directory must exist on every host: {error}; see --cwd")


def execute(words: list[str], report_fd: int | None) -> NoReturn:
    """Becomes a program that is not Python; one that it starts in its place may report, too."""
    if report_fd is not None:
        os.set_inheritable(report_fd, True)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and so would it
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        raise CannotStart(
            f"COMMAND must be executable on every host, got {words[0]!r}: {error.strerror}; "
            f"give a path that all hosts have\n"
        ) from error


def describe(error: BaseException) -> tuple[int, str]:
    """The exit status, and what `python` would have printed."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF, ""
        return 1, f"{error.code}\n"
    if isinstance(error, CannotStart):
        return NOT_FOUND, str(error)
    text = describe_exception(error, without_own(error.__traceback__))
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1, text


def without_own(where: TracebackType | None) -> TracebackType | None:
    """A traceback from where the program begins."""
    own = (__file__, program.__file__)
    while where is not None and where.tb_frame.f_code.co_filename in own:
        where = where.tb_next
    return where


def describe_exception(error: BaseException, where: TracebackType | None) -> str:
    """What the program's own hook prints, if it has one that works; else the traceback."""
    text = ""
    if sys.excepthook is not sys.__excepthook__:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                sys.excepthook(type(error), error, where)
            except Exception as broken:
                sys.stderr.write(f"sys.excepthook failed: {broken!r}\n")
            else:
                return said.getvalue()
        text = said.getvalue()
    return text + "".join(traceback.format_exception(type(error), error, where))


def report(report_fd: int | None, acknowledged_fd: int | None, status: int, text: str) -> None:
    """Tells the guard, and waits until the launcher has heard of it, and of what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # it is closed, or none
            stream.flush()
    if report_fd is None or acknowledged_fd is None:
        sys.stderr.write(text)
        return
    record = json.dumps({"status": status, "text": text})
    with contextlib.suppress(OSError):
        os.write(report_fd, record.encode() + b"\n")
        select.select([acknowledged_fd], [], [], ACKNOWLEDGE_SECONDS)


def abort(status: int) -> None:
    """Ends all ranks, if this one has taken part in MPI and not left it yet."""
    mpi = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        time.sleep(0.1)  # the report may still travel from host to host
        mpi.COMM_WORLD.Abort(status)
