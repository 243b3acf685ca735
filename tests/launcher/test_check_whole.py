"""`--check` as a whole on this host, with a Python, torch and CuPy that are well or broken."""

import json
import os
import sys
from pathlib import Path

import pytest

import mpicomp_launch
from mpicomp_launch.check.findings import OK, WARNING

ROOT = Path(mpicomp_launch.__file__).parents[1]


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


@pytest.mark.parametrize("answer", ["", "echo hello", "echo '{}'", "echo '{\"a'"])
def test_a_python_that_is_none(launch, tmp_path, answer):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{answer}\n")
    python.chmod(0o755)
    done = launch("--check", "--json", str(python), "-c", "0")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)["findings"]
    assert found[-1]["value"] == "it runs, but does not answer as a Python would"


def test_others_may_print_too(launch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit\nprint('hello')\natexit.register(print, 'bye')\n"
    )
    done = launch("--check", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert "all-reduce of 1 KB" in done.stdout, done.stdout + done.stderr


def test_a_missing_program_cannot_run(launch):
    done = launch("--check", "no-such-program")
    assert done.returncode == 1
    assert "must be a program on PATH" in done.stdout.replace("\n", " ")


def test_a_torch_that_crashes_is_a_finding(launch, tmp_path):
    (tmp_path / "torch.py").write_text("import os\nos.kill(os.getpid(), 11)\n")
    done = launch("--check", "--json", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    found = {each["what"]: each for each in json.loads(done.stdout)["findings"]}
    assert (found["GPU"]["state"], found["GPU"]["value"]) == ("warning", "it ended with status -11")
    assert "all-reduce" in found["2 ranks here"]["value"]


TORCH = """
class cuda:
    is_available = lambda: True
    device_count = lambda: 2
    get_device_name = "GPU {}".format
def empty(size, pin_memory):
    class Tensor:
        is_pinned = lambda self: pin_memory
    return Tensor()
"""
CUPY = """
__version__ = "13.0"
class cuda:
    class runtime:
        def getDeviceCount(): raise RuntimeError("cudaErrorInsufficientDriver: too old")
"""


def test_gpus_as_torch_and_cupy_tell(launch, tmp_path):
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "cupy.py").write_text(CUPY)
    done = launch("--check", "--json", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    found = {each["what"]: each for each in json.loads(done.stdout)["findings"]}
    assert found["GPU"]["value"] == "GPU 0, GPU 1"
    assert found["pinned memory"]["state"] == OK
    assert found["CuPy"]["state"] == WARNING
    assert "cudaErrorInsufficientDriver" in found["CuPy"]["value"]
