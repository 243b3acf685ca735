"""Jobs within an allocation of a real Slurm: by the MPI's own mpirun, and by srun."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

ODD = " a b\n\"c'd,e=f;$HOME \\ \t%r*{x}:é"
FACTS = """
import json, os, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
node = os.environ.get("SLURMD_NODENAME")
print(json.dumps([world.rank, world.size, node, os.environ["ODD"], sys.argv[1:]]))
"""
WAIT = """
import os, signal, subprocess, sys, time
from mpi4py import MPI
child = subprocess.Popen(["sleep", "300"])
def tidy(signum, frame):
    os.write(1, b"tidy\\n")
    sys.exit(3)
for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
    signal.signal(getattr(signal, name), tidy)
MPI.COMM_WORLD.Barrier()
print("up", os.getpid(), child.pid, flush=True)
if MPI.COMM_WORLD.rank == 1:
    {}
time.sleep(300)
"""


@pytest.fixture
def is_hasty(request, mpi):
    """Slurm's PMIx kills a step as soon as a rank is lost, guards among it, one by one.

    Last words can get lost then, and without cgroups, as here, a process can be overlooked.
    """
    return mpi.family == "openmpi" and "srun" in request.node.name


@pytest.fixture(params=["mpirun", "srun"])
def start(request, environ):
    """Starts the launcher in an allocation of three tasks."""
    started = []
    by = []
    if request.param == "srun":
        by = ["--mpi", "srun", "--pmi", request.getfixturevalue("pmi")]

    def start(*words, **variables):
        launcher = [sys.executable, "-m", "mpicomp_launch", *by, *words]
        job = subprocess.Popen(
            ["salloc", "-Q", "--ntasks=3", *launcher],
            env={**environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(job)
        return job

    yield start
    for job in started:
        job.kill()
        job.communicate()
    subprocess.run(["scancel", "--user=root"], env=environ)
    end = time.monotonic() + 30
    while (
        time.monotonic() < end
        and subprocess.run(["squeue", "-h"], env=environ, capture_output=True).stdout.strip()
    ):
        time.sleep(0.2)


def test_ranks_hosts_and_values(start):
    job = start("--env", "ODD", "--tag=none", sys.executable, "-c", FACTS, ":", "a b", ODD=ODD)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    rows = sorted(map(json.loads, out.splitlines()))
    assert [row[:2] for row in rows] == [[0, 3], [1, 3], [2, 3]]
    assert {row[2] for row in rows} == {"n1", "n2"}
    assert all(row[3:] == [ODD, [":", "a b"]] for row in rows)


def test_lines_stay_whole_whatever_srun_is_told(start):
    told = {"SLURM_LABELIO": "1", "SLURM_UNBUFFEREDIO": "1", "SLURM_STDERRMODE": "none"}
    job = start(sys.executable, "-c", "for n in range(2000): print(n % 90 * '=')", **told)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    lines = [f"[{rank}] {n % 90 * '='}" for rank in range(3) for n in range(2000)]
    assert sorted(out.splitlines()) == sorted(lines)
    assert "==" not in err


def test_hosts_are_not_given_twice(start):
    job = start("--hosts", "a,b", sys.executable, "-c", "0")
    _, err = job.communicate(timeout=60)
    assert job.returncode == 2
    assert "SLURM_JOB_NODELIST" in err


@pytest.mark.parametrize(
    ("failure", "status", "text"),
    [
        ("raise KeyError('the reason')", 1, "KeyError: 'the reason'"),
        ("sys.exit(4)", 4, "failed with status 4"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by signal 9 (SIGKILL)"),
    ],
)
def test_a_failing_rank(start, is_hasty, failure, status, text):
    job = start(sys.executable, "-c", WAIT.format(failure))
    out, err = job.communicate(timeout=60)
    if is_hasty:
        assert job.returncode
        return
    assert job.returncode == status, err
    last = err[err.index("mpicomp-launch: rank 1 on ") :]
    assert text in last
    assert nobody_is_left(out)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_all_ranks(start, is_hasty, signum):
    job = start(sys.executable, "-c", WAIT.format("pass"))
    lines = [job.stdout.readline() for _ in range(3)]
    assert all(" up " in line for line in lines), [*lines, job.stderr.read()]
    (launcher,) = children(job.pid)
    os.kill(launcher, signum)
    out, err = job.communicate(timeout=60)
    assert job.returncode == (143 if signum == signal.SIGTERM else 3), err
    assert out.count("tidy") == 3
    assert is_hasty or nobody_is_left("".join(lines))


def children(pid):
    """Processes whose parent it is."""
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in done.stdout.split()]


def nobody_is_left(out):
    """Whether all processes that have said that they are up are gone, soon."""
    pids = [word for line in out.splitlines() if " up " in line for word in line.split()[-2:]]
    end = time.monotonic() + 15
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return len(pids) == 6


def test_check(start):
    out, err = start("--check", "--json").communicate(timeout=90)
    found = {each["what"]: each for each in json.loads(out)["findings"]}
    (job,) = [each for what, each in found.items() if what.startswith("3 ranks, by SLURM_")]
    assert "all-reduce of 1 KB" in job["value"], (job, err)
    assert not [what for what in found if what.startswith("2 ranks")]


def test_ranks_that_are_not_below_the_launcher_are_not_missed(start):
    """A scheduler's own process starts them, on the launcher's host as on others."""
    job = start(sys.executable, "-c", "import time; time.sleep(7); print('done')")
    out, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert out.count("done") == 3
