"""Launchers that cannot be had here: their options, and jobs that run through stand-ins."""

import json
import os
import sys
from pathlib import Path

import pytest

STUBS = Path(__file__).with_name("stubs.py")
PROGRAMS = {"srun": "srun", "flux": "flux", "jsrun": "jsrun", "pals": "mpiexec"}
FACTS = """
import json, os, sys
print(json.dumps([os.getcwd(), os.environ["ODD"], os.environ.get("OMP_NUM_THREADS"), sys.argv[1:]]))
"""


@pytest.fixture
def stub(tmp_path, launch):
    """Launches through a stand-in that is the first of its name on PATH."""

    def run(kind, *words, **variables):
        program = tmp_path / "bin" / PROGRAMS[kind]
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {STUBS} {kind} "$@"\n')
        program.chmod(0o755)
        path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
        return launch("--mpi", kind, *words, PATH=path, **variables)

    return run


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_job(stub, tmp_path, kind):
    program = tmp_path / "facts.py"
    program.write_text(FACTS)
    words = ["-np", "3", "--env", "ODD", "--cwd", str(tmp_path), sys.executable, str(program), ":"]
    done = stub(kind, *words, ODD="a 'b\"\n,=;c")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line[:4] for line in lines] == ["[0] ", "[1] ", "[2] "]
    threads = str(max(1, len(os.sched_getaffinity(0)) // 3))
    for line in lines:
        cwd, odd, num_threads, arguments = json.loads(line[4:])
        assert (cwd, odd, arguments) == (str(tmp_path), "a 'b\"\n,=;c", [":"])
        assert num_threads in (threads, None)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_failing_rank(stub, script, kind):
    variable = {"srun": "SLURM_PROCID", "flux": "FLUX_TASK_RANK", "pals": "PALS_RANKID"}
    name = variable.get(kind, "JSM_NAMESPACE_RANK")
    path = script(f"import os, time\nif os.environ[{name!r}] == '1': 1 / 0\ntime.sleep(100)\n")
    done = stub(kind, "-np", "2", sys.executable, path)
    assert done.returncode == 1
    assert "mpicomp-launch: rank 1 on " in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("kind", PROGRAMS)
def test_every_option_that_can_be_said(stub, kind):
    words = ["-np", "2", "--verbose", "--bind", "core", "--interface", "lo", "--tag", "none"]
    pmi = ["--pmi", "pmix"] if kind in ("srun", "flux") else []
    done = stub(kind, *words, *pmi, "printenv", "FI_TCP_IFACE")
    assert done.stdout.splitlines() == ["lo", "lo"], done.stderr


def test_what_the_real_one_would_refuse_is_refused(stub):
    done = stub("srun", "-np", "2", "--mpi-args", "--no-such-option", "true")
    assert done.returncode == 125
    assert "unrecognized arguments: --no-such-option" in done.stderr
