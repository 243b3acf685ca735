"""What a rank runs for `mpicomp_launch.run`: calls the function and leaves what it returns.

A file of a call or of a result is a line of JSON, then a pickle. This module must not be a rank's
`__main__`, which is what travels by value.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import traceback
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, BinaryIO, NoReturn

from mpicomp_launch import rank_env

CALL = "call"


def result_file(directory: Path, rank: int) -> Path:
    """Where a rank leaves its result."""
    return directory / f"result-{rank}"


def write(path: Path, head: Mapping[str, object], body: object) -> None:
    """Writes a file, which is there whole or not at all, for this user alone.

    Raises:
        Exception: Whatever a class raises that does not let itself be pickled.
    """
    part = path.with_suffix(".part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(json.dumps(head).encode() + b"\n")
        dump(body, file)
    part.rename(path)


def dump(body: object, file: BinaryIO) -> None:
    """Pickles by value what belongs to `__main__`, and what has no name."""
    from cloudpickle import CloudPickler

    plain = CloudPickler.dispatch_table[CodeType]

    def reduce_code(code: CodeType) -> tuple[Any, ...]:
        make, fields = plain(code)
        return remake_code, (make, fields, code.co_filename)

    # pickle reads the table of the class, and no other.
    table = ChainMap({CodeType: reduce_code}, CloudPickler.dispatch_table)
    pickler = type("Pickler", (CloudPickler,), {"dispatch_table": table})
    pickler(file).dump(body)


def remake_code(make: Callable[..., CodeType], fields: Sequence[Any], filename: str) -> CodeType:
    """Code with the name of its file, which cloudpickle leaves out: tracebacks need it."""
    return make(*fields).replace(co_filename=filename)


def main() -> None:
    """Runs the call that lies in the directory `sys.argv[1]`."""
    directory = Path(sys.argv[1])
    rank = rank_env.number(rank_env.RANK, os.environ) or 0
    path = result_file(directory, rank)
    with open_call(directory) as file:
        caller = json.loads(file.readline())
        sys.path[:], sys.argv[:] = caller["path"], caller["argv"]
        try:
            function, args, kwargs = pickle.load(file)
            value = function(*args, **kwargs)
        except Exception as error:
            fail(path, error)
    try:
        write(path, {"error": None}, value)
    except Exception as error:
        text = f"run: what rank {rank} returns must be picklable, got {type(value).__name__}"
        fail(path, TypeError(f"{text}: {error}"))


def open_call(directory: Path) -> BinaryIO:
    """The file of the call; the first thing that fails where a host does not have it."""
    try:
        return open(directory / CALL, "rb")
    except OSError as error:
        sys.exit(
            f"run: the directory must be one that all hosts share, got {directory}: "
            f"{error.strerror} on {os.uname().nodename}; as in run(..., directory='/shared/tmp')"
        )


def fail(path: Path, error: Exception) -> NoReturn:
    """Leaves an exception, or its text alone if that is all that can be carried."""
    where = error.__traceback__
    while where is not None and where.tb_frame.f_code.co_filename == __file__:
        where = where.tb_next
    text = "".join(traceback.format_exception(type(error), error, where))
    write(path, {"error": text}, portable(error))
    sys.exit(1)


def portable(error: Exception) -> Any:
    """The exception, None if it does not survive a pickle and back."""
    file = io.BytesIO()
    try:
        dump(error, file)
        pickle.loads(file.getvalue())
    except Exception:
        return None
    return error
