"""What the launcher runs as a rank: `python worker.py train.py --lr 1`.

It is run by its path, in a Python that need not have the launcher installed. The user's program
runs in a process of its own, below a guard (`supervise.py`) that passes its output on, says how it
ended, and leaves no process behind. A rank that just exits would leave all others waiting in MPI
for ever; so an uncaught exception, or a status other than 0, is reported and ends the job.
"""

from __future__ import annotations

import importlib.util
import os
import sys


def main() -> None:
    """Runs `sys.argv[1:]`: a script, `-m module`, `-c code`, or `--exec program`, and arguments."""
    load_package(os.path.dirname(os.path.abspath(__file__)))
    from mpicomp_launch import rank, supervise

    supervise.supervise(rank.run)


def load_package(directory: str) -> None:
    """Imports the launcher from where this file is, whatever else is installed.

    With the directory above it on `sys.path`, all that is installed beside the launcher would come
    before the standard library, and a backport of one of its modules be taken for it.
    """
    spec = importlib.util.spec_from_file_location(
        "mpicomp_launch", os.path.join(directory, "__init__.py")
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["mpicomp_launch"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    main()
