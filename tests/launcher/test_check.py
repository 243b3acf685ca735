"""`--check`: how what is found is judged, and the whole on this host."""

import json
import sys

import pytest

from mpicomp_launch.check import elsewhere, here, report
from mpicomp_launch.check.findings import FAILURE, OK, WARNING, Finding

GOOD = {
    "host": "a",
    "python": "3.11.7",
    "executable": "/v/bin/python",
    "versions": {"torch": "2", "mpi4py": "4", "numpy": "2", "mpicomp": "0.1"},
    "missing": [],
    "shm": {"total": 8 << 30, "free": 8 << 30},
    "limits": {"memlock": -1, "nofile": 65536, "nproc": 1000, "stack": 8 << 20},
    "ptrace": "0",
    "mpi": {"text": "MPICH 5", "path": "/v/lib/libmpi.so", "level": "multiple", "cuda": False},
    "gpu": {"available": True, "names": ["H200"], "pinned": True},
    "cupy": {"version": "13", "devices": 1},
}


def states(found, *, has_rdma=False):
    return {each.what: each for each in here.judge({**GOOD, **found}, has_rdma)}


def test_all_is_well():
    assert {each.state for each in states({}).values()} == {OK}


@pytest.mark.parametrize(
    ("found", "what", "state", "text"),
    [
        ({"versions": {"torch": None}}, "torch", FAILURE, "pip install torch"),
        ({"mpi": {"error": "no libmpi"}}, "MPI library", FAILURE, "MPI4PY_LIBMPI"),
        ({"mpi": GOOD["mpi"] | {"level": "single"}}, "MPI threads", FAILURE, "THREAD_MULTIPLE"),
        ({"gpu": {"error": "broken"}}, "GPU", WARNING, "importable"),
        ({"gpu": GOOD["gpu"] | {"pinned": False}}, "pinned memory", WARNING, "ulimit -l"),
        ({"cupy": None}, "CuPy", WARNING, "mpicomp[cuda12]"),
        ({"cupy": {"error": "x"}}, "CuPy", WARNING, "CuPy of this CUDA"),
        ({"shm": None}, "shared memory", WARNING, "MPICOMP_SHARED_MEMORY_DIR"),
        ({"shm": {"total": 64 << 20, "free": 1}}, "shared memory", WARNING, "--shm-size"),
        ({"limits": GOOD["limits"] | {"nofile": 256}}, "limits", WARNING, "ulimit -n 4096"),
        ({"limits": GOOD["limits"] | {"stack": 1 << 20}}, "limits", WARNING, "ulimit -s 8192"),
        ({"ptrace": "1"}, "copies between processes", WARNING, "ptrace_scope=0"),
    ],
)
def test_what_is_not(found, what, state, text):
    finding = states(found)[what]
    assert finding.state == state
    assert text in finding.advice


def test_locked_memory_matters_with_rdma_only():
    limits = {"limits": GOOD["limits"] | {"memlock": 65536}}
    assert states(limits)["limits"].state == OK
    assert states(limits, has_rdma=True)["limits"].state == WARNING


def test_whether_mpi_takes_gpu_memory_and_how_that_is_known():
    texts = [
        states({"mpi": GOOD["mpi"] | {"cuda": cuda}})["MPI and GPU memory"].value
        for cuda in (True, False, None)
    ]
    assert [text.partition(",")[0] for text in texts] == ["yes", "no", "not known"]
    assert all("MPIX_Query_cuda_support" in text for text in texts)


def test_hosts_are_compared():
    other = GOOD | {"python": "3.10.1", "missing": ["/x/train.py"]}
    found = {each.what: each for each in elsewhere.compare("b", other, GOOD)}
    assert found["Python"].state == FAILURE
    assert found["Python"].value == "3.10.1, here 3.11.7"
    assert found["paths"].value == "absent: /x/train.py"
    assert found["torch"].state == OK


@pytest.mark.parametrize(("offset", "state"), [(0.1, OK), (-0.9, OK), (5, WARNING), (-5, WARNING)])
def test_clock(offset, state):
    assert elsewhere.judge_clock("b", offset).state == state


def test_report(capsys):
    findings = [Finding("a", "x", OK, "[bold]"), Finding("b", "y", FAILURE, "bad", "do this")]
    report.show(findings, as_json=False)
    text = capsys.readouterr().out
    assert "[bold]" in text
    assert "failure: b, y: bad. do this\nThe job cannot run.\n" in text
    report.show(findings[:1], as_json=True)
    assert json.loads(capsys.readouterr().out)["runs"]


def test_on_this_host(launch, mpi):
    done = launch("--check", "--json")
    found = {each["what"]: each for each in json.loads(done.stdout)["findings"]}
    assert found["Python"]["value"] == f"{sys.version.split()[0]} ({sys.executable})"
    assert found["MPI threads"]["value"] == "multiple"
    assert mpi.launcher in found["launcher"]["value"]
    assert "all-reduce of 1 KB" in found["2 ranks here"]["value"], found
    failures = {what for what, each in found.items() if each["state"] == "failure"}
    assert done.returncode == bool(failures)
    assert failures <= {"torch", "numpy"}  # as in an environment for the launcher alone


def test_a_python_without_mpi_cannot_run(launch, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    done = launch("--check", str(python), "-c", "0")
    assert done.returncode == 1
    assert "failure" in done.stdout
    assert done.stdout.endswith("The job cannot run.\n")
    assert not done.stderr


def test_a_missing_program_cannot_run(launch):
    done = launch("--check", "no-such-program")
    assert done.returncode == 1
    assert "must be a program on PATH" in done.stdout.replace("\n", " ")
