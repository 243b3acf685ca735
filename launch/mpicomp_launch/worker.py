"""Runs one rank's Python program as `python` itself would, and ends the whole job if it fails.

The launcher puts this file, by path, in front of the user's: `python -u worker.py train.py --lr 1`.
A rank that just exits leaves all others waiting in MPI for ever. So an uncaught exception, or an
exit with a status other than 0, becomes `MPI_Abort`, and the status is noted for the launcher.

This file uses the standard library only and imports nothing of its package: the Python which runs
it need not have the launcher installed.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib.machinery
import importlib.util
import os
import pkgutil
import signal
import sys
import time
import traceback
from types import CodeType, ModuleType

PR_SET_PDEATHSIG = 1
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
INTERRUPTED = 130


def escape(argument: str) -> str:
    """`:` as `::`, `::` as `:::`: every mpirun takes a lone `:` for a separator."""
    return argument + ":" if argument and not argument.strip(":") else argument


def unescape(argument: str) -> str:
    """Undoes `escape`."""
    return argument[:-1] if argument and not argument.strip(":") else argument


def main() -> None:
    """Runs `sys.argv[1:]`: a script, `-m module` or `-c code`, and its arguments."""
    die_with_parent()
    close_stdin()
    pid = os.getpid()
    status_file = os.environ.pop("MPICOMP_STATUS_FILE", "")
    sys.argv = [unescape(argument) for argument in sys.argv[1:]]
    try:
        run_program()
    except BaseException as error:
        if os.getpid() != pid:  # a child which the program forked is no rank
            raise
        status = report(error)
        if status:
            note_status(status_file, status)
            abort(status)
        sys.exit(status)


def die_with_parent() -> None:
    """A rank must not outlive the launcher that started it, even if that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def close_stdin() -> None:
    """Makes standard input empty; hydra leaves that of all ranks but 0 open for ever."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if null:
        os.close(null)


def run_program() -> None:
    """Executes the program in a new `__main__`, which lasts as long as the process.

    `runpy` would take its `__main__` away again before exit handlers and threads are done.
    """
    main_module = ModuleType("__main__")
    kind = sys.argv[0]
    if kind == "-c":
        code = prepare_code(main_module)
    elif kind == "-m":
        code = prepare_module(main_module)
    else:
        code = prepare_script(main_module)
    exec(code, vars(main_module))


def install(module: ModuleType) -> None:
    """Makes a module `__main__`, with what the interpreter would have put into it."""
    vars(module)["__builtins__"] = builtins
    sys.modules["__main__"] = module


def set_first_path(directory: str) -> None:
    """Replaces the directory of this file, unless `python -I` or `-P` has left it out."""
    if not is_path_safe():
        sys.path[0] = directory


def is_path_safe() -> bool:
    """Whether `sys.path` begins with the library, not with a directory of the program."""
    return bool(sys.flags.isolated or getattr(sys.flags, "safe_path", False))


def prepare_code(module: ModuleType) -> CodeType:
    """`-c code`."""
    source = sys.argv.pop(1)
    set_first_path("")
    install(module)
    return compile(source, "<string>", "exec", dont_inherit=True)


def prepare_module(module: ModuleType) -> CodeType:
    """`-m module`; a package means its `__main__`."""
    name = sys.argv.pop(1)
    set_first_path(os.getcwd())
    install(module)
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = describe(module, spec)
    if code is None:
        sys.exit(f"{sys.executable}: No module named {name}, or it cannot be run")
    sys.argv[0] = module.__file__ or name
    return code


def prepare_script(module: ModuleType) -> CodeType:
    """A file, or a directory or zip archive with a `__main__.py`."""
    path = os.path.join(os.getcwd(), sys.argv[0])
    finder = pkgutil.get_importer(path)
    if finder is not None:
        sys.path[: 0 if is_path_safe() else 1] = [path]
        code = describe(module, finder.find_spec("__main__"))
        install(module)
        if code is None:
            sys.exit(f"{sys.executable}: can't find '__main__' module in {path!r}")
        return code
    set_first_path(os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    module.__file__, module.__loader__, module.__spec__ = path, loader, None
    install(module)
    return compile(loader.get_data(path), path, "exec", dont_inherit=True)


def describe(module: ModuleType, spec: importlib.machinery.ModuleSpec | None) -> CodeType | None:
    """Sets the module's attributes from a spec and returns its code, None if it has none."""
    if spec is None or spec.loader is None or not hasattr(spec.loader, "get_code"):
        return None
    module.__file__, module.__loader__, module.__spec__ = spec.origin, spec.loader, spec
    module.__package__ = spec.parent
    code: CodeType | None = spec.loader.get_code(spec.name)
    return code


def report(error: BaseException) -> int:
    """Prints what `python` would have printed, in one write, and returns the exit status."""
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        if isinstance(error.code, int):
            return error.code & 0xFF
        text = f"{error.code}\n"
    elif sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, error.__traceback__)
        text = ""
    else:
        where = error.__traceback__
        while where is not None and where.tb_frame.f_code.co_filename == __file__:
            where = where.tb_next
        text = "".join(traceback.format_exception(type(error), error, where))
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"[rank {rank()} on {os.uname().nodename}] {text}")
        sys.stderr.flush()
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def rank() -> str:
    """The number of this rank, as the MPI's launcher has told it."""
    return next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "?")


def note_status(path: str, status: int) -> None:
    """Leaves the status for the launcher, unless another rank has failed before."""
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError:  # another rank was first, or this is another host
        return
    os.write(file, b"%d" % status)
    os.close(file)


def abort(status: int) -> None:
    """Ends all ranks, if this one has taken part in MPI and not left it yet."""
    mpi = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # a closed stream must not stop us
                stream.flush()
        time.sleep(0.1)  # mpirun drops what it has not read yet when it ends the job
        mpi.COMM_WORLD.Abort(status)


if __name__ == "__main__":
    main()
