"""Fixtures for tests that start ranks of their own, under the MPI of the Python that runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def ranks():
    """Runs `python WORDS...` on so many ranks; keyword arguments are variables."""
    pytest.importorskip("mpi4py")

    def run(np, *words, timeout=60, **variables):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MPICOMP_", "OMP_"))}
        paths = [str(ROOT), str(ROOT / "launch"), *filter(None, [kept.get("PYTHONPATH")])]
        return subprocess.run(
            [sys.executable, "-m", "mpicomp_launch", "-np", str(np), sys.executable, *words],
            env={**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **variables},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )

    return run
