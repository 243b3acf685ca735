"""Whole jobs, started as a user would: by the launcher, or by mpirun alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mpicomp_launch import command, mpis

ROOT = Path(__file__).resolve().parents[2]
Job = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def environ() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MPICOMP_")}
    paths = [str(ROOT), str(ROOT / "launch"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(source: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(source)
        return str(path)

    return write


@pytest.fixture
def launch(environ: dict[str, str]) -> Job:
    """Runs ``mpicomp-launch -np N python ...``; keyword arguments are variables."""

    def run(
        np: int, *words: str, timeout: float = 120, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mpicomp_launch", "-np", str(np), sys.executable, *words],
            env=environ | variables,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@pytest.fixture
def mpirun(environ: dict[str, str]) -> Job:
    """Runs ``mpirun -n N python ...`` with the plain mpirun of the MPI in use."""
    user = command.parse([sys.executable, "-c", "0"], environ)
    found = mpis.find(user, None, environ)

    def run(
        np: int, *words: str, timeout: float = 60, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        extra = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":OVERSUBSCRIBE",
        }
        return subprocess.run(
            [found.launcher, "-n", str(np), sys.executable, *words],
            env=environ | extra | variables,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )

    return run
