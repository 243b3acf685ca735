"""The tests in tests/mpi on several ranks; the usual run of pytest covers one."""

from __future__ import annotations

import subprocess

import pytest

SECONDS = 240  # for a loaded machine; a rank that waits for nobody is told much sooner


@pytest.mark.parametrize("np", [2, 3, 4])
def test_on_several_ranks(np, launch):
    words = ["-m", "pytest", "-x", "-q", "--color=no", "-p", "no:cacheprovider", "tests/mpi"]
    stall = {"MPICOMP_STALL_SECONDS": "20", "MPICOMP_STALL_SHUTDOWN_SECONDS": "60"}
    try:
        run = launch(np, *words, timeout=SECONDS, **stall, merged=True)
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        pytest.fail(f"{np} ranks are not done after {SECONDS} s:\n{output.decode()}")
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout
