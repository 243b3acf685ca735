"""Scripts, and jobs started by mpirun alone, without the launcher."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mpicomp_launch import mpis

Job = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(source: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(source)
        return str(path)

    return write


@pytest.fixture
def mpirun(environ: dict[str, str], mpi: mpis.Mpi) -> Job:
    """Runs ``mpirun -n N python ...`` with the plain mpirun of the MPI in use."""

    def run(
        np: int, *words: str, timeout: float = 60, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        extra = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":OVERSUBSCRIBE",
        }
        return subprocess.run(
            [mpi.launcher, "-n", str(np), sys.executable, *words],
            env=environ | extra | variables,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )

    return run
