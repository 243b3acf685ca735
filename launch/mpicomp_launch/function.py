"""`run`: a function on every rank of a job, from a script, a notebook or a prompt.

The launcher is a process of its own, because it needs signal handlers and adopts orphans, which is
not for the caller's process. The function travels by value as far as it belongs to `__main__`,
which therefore is not imported a second time.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

from mpicomp_launch import allocation, called, resolve
from mpicomp_launch.errors import LaunchError, RankError
from mpicomp_launch.options import FIELDS

T = TypeVar("T")

TIMED_OUT = 124
INTERRUPTED = 130
JOB = "job"
OUTCOME = "outcome"
LAUNCHER = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[2]]; "
    "from mpicomp_launch import function; sys.exit(function.launch(sys.argv[1]))"
)
RANK = "from mpicomp_launch.called import main; main()"


def run(
    function: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | None = None,
    hosts: str | Sequence[str] | None = None,
    config: str | None = None,
    directory: str | os.PathLike[str] | None = None,
    **options: Any,
) -> list[T]:
    """Calls ``function(*args, **kwargs)`` on every rank and returns what each returns, by rank.

    What the ranks print goes to `sys.stdout` and `sys.stderr`. `KeyboardInterrupt` ends the job.

    Args:
        function: Anything that `cloudpickle` takes; lambdas, closures and what a notebook has
            defined are fine. So must be the arguments and what it returns.
        np, hosts, config: As on the command line of `mpicomp-launch`.
        directory: Where function and results are put for the time of the job; with several hosts
            one that all of them share.
        options: The other options of the command line by name, as in ``compression="topk"`` or
            ``env={"SEED": "1"}``.

    Raises:
        LaunchError: The job could not start, or its launcher was ended from outside.
        RankError: A rank was killed, or ended without a result.
        TimeoutError: The job took longer than ``timeout``.
        Exception: What the function raised on the first rank that failed, with a `RankError` that
            has the rank's traceback as its cause.
    """
    variable = allocation.inside_step(os.environ)
    if variable:
        raise LaunchError(
            f"run must be called outside of a job, got {variable} in the environment, which says "
            "that this is a rank already"
        )
    if not callable(function):
        raise TypeError(f"run: function must be callable, got {function!r}")
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise TypeError(f"run: args must be a tuple, got {args!r}; as in args=(value,)")
    given = convert({"np": np, "hosts": hosts, **options})
    with tempfile.TemporaryDirectory(
        prefix="mpicomp-", dir=directory, ignore_cleanup_errors=True
    ) as private:
        path = Path(private).resolve()
        caller = {"path": [os.path.abspath(each) for each in sys.path], "argv": sys.argv}
        try:
            called.write(path / called.CALL, caller, (function, tuple(args), dict(kwargs or {})))
        except Exception as error:
            raise TypeError(
                f"run: function and arguments must be picklable, got {function!r}: {error}"
            ) from error
        called.write(path / JOB, {"parent": os.getpid()}, (given, config))
        return conclude(path, start(path))


def convert(options: Mapping[str, Any]) -> dict[str, resolve.Value]:
    """Options as the command line would have made them."""
    for name in options:
        if name not in FIELDS:
            raise TypeError(f"run: {name!r} is not an option{resolve.nearest(name, FIELDS)}")
    return {
        name: resolve.convert(name, value, "run")
        for name, value in options.items()
        if value is not None
    }


# The launcher's process.


def start(path: Path) -> int:
    """Runs the launcher to its end and returns its status."""
    words = [sys.executable, "-c", LAUNCHER, str(path), str(Path(__file__).parents[1])]
    replaced = [is_replaced(sys.stdout, 1), is_replaced(sys.stderr, 2)]
    process = subprocess.Popen(
        words,
        env=dict(os.environ),  # without what an MPI in this process has put into C's
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if replaced[0] else None,
        stderr=subprocess.PIPE if replaced[1] else None,
        start_new_session=True,  # Ctrl-C reaches this process, which passes it on once
    )
    threads = [
        threading.Thread(target=copy, args=(source, target), daemon=True)
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        if source is not None
    ]
    try:
        for thread in threads:
            thread.start()
        return process.wait()
    except BaseException as error:
        end(process, signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
        raise
    finally:
        for thread in threads:
            thread.join()


def is_replaced(stream: TextIO | None, fd: int) -> bool:
    """Whether what Python prints goes elsewhere than to the descriptor, as in a notebook."""
    if stream is None:
        return False
    with contextlib.suppress(OSError, ValueError):  # closed, or without any descriptor
        stream.flush()
        return stream.fileno() != fd
    return True


def copy(source: BinaryIO, target: TextIO) -> None:
    """Passes on what comes from a pipe, as it comes; reads on if nobody takes it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with source:
        while data := os.read(source.fileno(), 1 << 16):
            with contextlib.suppress(OSError, ValueError):
                target.write(decoder.decode(data))
                target.flush()


def end(process: subprocess.Popen[bytes], signum: int) -> None:
    """Ends the job; a second Ctrl-C kills it."""
    while process.poll() is None:
        process.send_signal(signum)
        with contextlib.suppress(KeyboardInterrupt):
            process.wait()


def launch(directory: str) -> int:
    """What the launcher's process does; it ends with the caller, and then tidies up for it."""
    from mpicomp_launch.processes import die_with_parent

    die_with_parent(signal.SIGTERM)
    path = Path(directory)
    with open(path / JOB, "rb") as file:
        parent = json.loads(file.readline())["parent"]
        given, config = pickle.load(file)
    try:
        record = {"error": None, **play(path, given, config)}
    except LaunchError as error:
        record = {"error": str(error)}
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if os.getppid() != parent:
            shutil.rmtree(path, ignore_errors=True)
    (path / OUTCOME).write_text(json.dumps(record))
    return 0


def play(path: Path, given: Mapping[str, resolve.Value], config: str | None) -> dict[str, Any]:
    """Runs the job; its outcome as it is told to the caller."""
    from mpicomp_launch import cli, dialects, planner, session

    resolved = cli.gather(given, config)
    words = [sys.executable, "-c", RANK, str(path)]
    plan, warnings = planner.make_plan(resolved, words, os.environ)
    dialect = dialects.for_plan(plan)
    printer = session.make_printer(plan, resolved.options)
    for warning in warnings:
        printer.say(warning)
    outcome = session.play(plan, dialect, dialect.command(plan), resolved.options, printer)
    return {"np": plan.np, **dataclasses.asdict(outcome)}


# What has come of it.


def conclude(path: Path, status: int) -> list[Any]:
    """The results, or the reason why there are none."""
    try:
        outcome = json.loads((path / OUTCOME).read_text())
    except FileNotFoundError:
        raise LaunchError(f"run: the launcher was ended, with status {status}") from None
    if outcome["error"]:
        raise LaunchError(outcome["error"])
    if not outcome["status"]:
        return [take(path, rank, "?", "") for rank in range(outcome["np"])]
    text = "\n".join([*outcome["reason"], outcome["text"]]).rstrip()
    if outcome["failures"]:
        first = outcome["failures"][0]
        why = text.removeprefix(f"rank {first['rank']} on {first['host']} ")
        return [take(path, first["rank"], first["host"], why)]
    if outcome["status"] == TIMED_OUT:
        raise TimeoutError(text)
    raise LaunchError(text or f"the job was ended by signal {outcome['status'] - 128}")


def take(path: Path, rank: int, host: str, why: str) -> Any:
    """What a rank has returned.

    Args:
        why: How it has failed, if it has.

    Raises:
        Exception: What it has raised instead, or a RankError if it has left nothing.
    """
    try:
        file = open(called.result_file(path, rank), "rb")  # noqa: SIM115
    except FileNotFoundError:
        raise RankError(rank, host, why or "ended without a result") from None
    with file:
        text = json.loads(file.readline())["error"]
        if text is None and not why:
            return pickle.load(file)
        if text is None:
            raise RankError(rank, host, why)
        cause = RankError(rank, host, f"raised\n\n{text}")
        try:
            error = pickle.load(file)
        except Exception:  # an exception of a class that is not known here
            error = None
    if error is None:
        raise cause
    raise error from cause
