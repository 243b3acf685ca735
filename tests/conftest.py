"""Whole jobs: ranks started by the launcher, under the MPI of the Python that runs the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
Job = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def environ() -> dict[str, str]:
    """The environment, with the source importable, one thread a rank and none of our settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MPICOMP_", "OMP_"))}
    paths = [str(ROOT), str(ROOT / "launch"), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


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
            [sys.executable, "-m", "mpicomp_launch", "-np", str(np), "--tag", "none", sys.executable, *words],
            env=environ | variables,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            text=True,
            timeout=timeout,
        )

    return run
