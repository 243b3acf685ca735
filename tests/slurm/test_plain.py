"""Plain srun, without the launcher: it works, or says why not."""

import subprocess
import sys

import pytest

HELLO = "import mpicomp; print(f'rank {mpicomp.rank()} of {mpicomp.size()}', flush=True)"


@pytest.fixture
def srun(environ, mpi):
    """Runs a Python program by srun on two tasks."""
    pytest.importorskip("torch")

    def run(pmi):
        return subprocess.run(
            ["srun", "-n", "2", f"--mpi={pmi}", sys.executable, "-c", HELLO],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=90,
        )

    return run


def test_ranks_find_each_other(srun, pmi):
    done = srun(pmi)
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"], done.stderr


def test_ranks_that_would_be_alone_stop_with_one_text(srun, mpi):
    if mpi.family == "openmpi":
        pytest.skip("it refuses to start under srun without PMIx, in its own words")
    done = srun("none")
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count("srun --mpi=pmix") == 1
    assert "srun" in done.stderr
