"""Whole jobs: ranks started by the launcher, under the MPI of the Python that runs the tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mpicomp_launch import command, mpis

ROOT = Path(__file__).resolve().parents[1]
Job = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_configure() -> None:
    """Jobs under test inherit which signals are ignored: these, if a shell's background runs us."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGQUIT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


@pytest.fixture(scope="session")
def bare_environ() -> dict[str, str]:
    """The environment, with the source importable and none of our settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MPICOMP_", "OMP_"))}
    paths = [str(ROOT), str(ROOT / "launch"), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="session")
def environ(bare_environ: dict[str, str]) -> dict[str, str]:
    """The same, with one thread a rank."""
    return {**bare_environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def mpi(environ: dict[str, str]) -> mpis.Mpi:
    """The MPI under test. A library without its launcher, or the reverse, is an error."""
    beside = os.pathsep.join([os.path.join(sys.prefix, "bin"), environ["PATH"]])
    launchers = {name for family in mpis.FAMILIES.values() for name in family.programs}
    has_launcher = any(shutil.which(name, path=beside) for name in launchers)
    has_library = not subprocess.run(
        [sys.executable, "-c", "from mpi4py import MPI"], capture_output=True
    ).returncode
    if not has_launcher and not has_library:
        pytest.skip("no MPI is installed: neither a library for mpi4py nor an mpirun")
    return mpis.find(command.parse([sys.executable, "-c", "0"], environ), None, environ)


@pytest.fixture
def launch(environ: dict[str, str]) -> Job:
    """Runs ``python WORDS...`` on ``np`` ranks; keyword arguments are variables.

    With ``merged`` both streams are in ``stdout``, in the order of their lines.
    """
    pytest.importorskip("mpi4py")

    def run(
        np: int, *words: str, timeout: float = 120, merged: bool = False, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "mpicomp_launch",
                "-np",
                str(np),
                "--tag",
                "none",
                sys.executable,
                *words,
            ],
            env=environ | variables,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            text=True,
            timeout=timeout,
        )

    return run
