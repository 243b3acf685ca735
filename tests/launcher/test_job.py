"""Whole jobs of two ranks, under the MPI of the Python which runs the tests."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HELLO = """
from mpi4py import MPI
world = MPI.COMM_WORLD
import sys
sys.stdout.write(f"rank {world.rank} of {world.size}\\n")
"""
BARRIER = """
import os, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
world.Barrier()
if world.rank == 1:
    {}
world.Barrier()
"""
ECHO = """
import json, os, sys
names = "ODD", "EMPTY", "MPICOMP_EXPECT_SIZE", "OMP_NUM_THREADS", "MPICOMP_FRAMES"
got = [os.environ.get(name) for name in names]
line = json.dumps([sys.argv[1:], os.getcwd(), sys.stdin.read(), *got])
sys.stdout.write(line + "\\n")
"""
SLEEPERS = """
import multiprocessing, os, sys, time
def sleep(): time.sleep(60)
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=sleep)
    child.start()
    from mpi4py import MPI
    sys.stdout.write(f"{os.getpid()} {child.pid}\\n")
    sys.stdout.flush()
    if MPI.COMM_WORLD.rank == 0:
        time.sleep(60)
    MPI.COMM_WORLD.Barrier()
"""


def is_running(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def sleepers(environ, mpi, script, tmp_path):
    """A started job, and the process numbers of its ranks and their children."""
    words = ["-m", "mpicomp_launch", "-np", "2", "--tag", "none", sys.executable, script(SLEEPERS)]
    with subprocess.Popen(
        [sys.executable, *words],
        env={**environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        pids = [int(pid) for _ in range(2) for pid in job.stdout.readline().split()]
        yield job, pids
        job.kill()


def test_ranks(launch_python, script):
    done = launch_python(script(HELLO))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def test_what_the_ranks_get(launch_python, script, tmp_path):
    """Variables and arguments arrive byte for byte, also in a directory with a space."""
    program = script(ECHO, "a b/train it.py")
    odd = " a b\n\"c'd,e=f;$HOME \\ \t%r*{x}:é\udcff\n"
    arguments = [odd, "", ":", "::", "-np", "--mca", "-x", "--"]
    cwd = tmp_path / "a b"
    done = launch_python(program, *arguments, cwd=cwd, ODD=odd, EMPTY="")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == lines[1]
    assert len(lines) == 2
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert json.loads(lines[0]) == [arguments, str(cwd), "", odd, "", "2", threads, None]


def test_other_programs(launch, mpi):
    done = launch(
        "-np",
        "2",
        "--tag=none",
        "--compression=topk:density=0.1",
        "printenv",
        "MPICOMP_COMPRESSION",
    )
    assert done.stdout.splitlines() == ["topk:density=0.1"] * 2
    assert launch("-np", "1", "sh", "-c", "exit 9").returncode == 9


def test_module(launch_python):
    done = launch_python("-u", "-m", "mpi4py.bench", "helloworld", "-q")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("failure", "status", "text"),
    [
        ("raise ValueError('broken')", 1, "ValueError: broken"),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('sorry')", 1, "\nsorry"),
        ("world.Abort(7)", 7, ""),
        ("os.kill(os.getpid(), 9)", 137, ""),
        ("os.kill(os.getpid(), 11)", 139, ""),
    ],
)
def test_one_rank_fails_while_another_waits(launch_python, script, mpi, failure, status, text):
    start = time.monotonic()
    done = launch_python(script(BARRIER.format(failure)))
    assert done.returncode == status, done.stderr
    assert text in done.stderr
    assert done.stderr.count(text) == 1 or not text
    if "Abort" not in failure:
        assert "mpicomp-launch: rank 1 on " in done.stderr
    assert time.monotonic() - start < 8


def test_one_rank_fails_before_mpi(launch_python, script):
    start = time.monotonic()
    first = (
        "import os\nif '1' in (os.environ.get('PMI_RANK'), os.environ.get('OMPI_COMM_WORLD_RANK')):"
    )
    done = launch_python(script(f"{first}\n    raise SystemExit(4)\n{HELLO}"))
    assert done.returncode == 4, done.stderr
    assert time.monotonic() - start < 10


def test_all_ranks_fail(launch_python, script):
    assert launch_python(script("raise SystemExit(5)")).returncode == 5


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_ends_everything(sleepers, signum):
    job, pids = sleepers
    assert len(pids) == 4
    assert all(map(is_running, pids))
    job.send_signal(signum)
    _, stderr = job.communicate(timeout=15)
    assert job.returncode == 128 + signum
    assert f"{signum.name}, ending the job" in stderr
    assert not any(map(is_running, pids))


def test_failed_job_leaves_no_process(launch_python, script):
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL)\n"
        "sys.stdout.write(f'{child.pid}\\n')\n"
        "sys.stdout.flush()\n"
    )
    done = launch_python(script(program + BARRIER.format("1 / 0")))
    assert done.returncode == 1
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert not any(map(is_running, pids))


def test_killed_launcher_leaves_no_rank(sleepers):
    job, pids = sleepers
    job.kill()
    ranks = pids[::2]
    end = time.monotonic() + 10
    while any(map(is_running, ranks)) and time.monotonic() < end:
        time.sleep(0.1)
    left = [pid for pid in pids if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not set(ranks) & set(left)


def test_two_jobs_at_once(environ, mpi, script):
    words = [sys.executable, "-m", "mpicomp_launch", "-np", "2", "--tag", "none", sys.executable]
    programs = [script(HELLO, "a.py"), script(BARRIER.format("sys.exit(6)"), "b.py")]
    jobs = [
        subprocess.Popen([*words, program], env=environ, stdout=subprocess.PIPE, text=True)
        for program in programs
    ]
    outputs = [job.communicate(timeout=40)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 6]
    assert sorted(outputs[0].splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_data_loader_workers(launch_python, script, method):
    program = script(
        "import multiprocessing, sys\n"
        "class Item:\n"
        "    def __init__(self, value): self.value = value\n"
        "def double(item): return Item(2 * item.value)\n"
        "if __name__ == '__main__':\n"
        "    from mpi4py import MPI\n"
        "    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:\n"
        "        (item,) = pool.map(double, [Item(MPI.COMM_WORLD.rank)])\n"
        "    sys.stdout.write(f'{MPI.COMM_WORLD.allreduce(item.value)}\\n')\n"
    )
    done = launch_python(program, method)
    assert done.stdout.splitlines() == ["2", "2"], done.stderr


def test_a_terminal_sees_ranks_come_up(environ, mpi, script):
    """A passing line, gone when all have come; nothing of it where output goes elsewhere."""
    late = "import os, time\nif os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK'))"
    path = script(f"{late} == '0': time.sleep(1)\n{HELLO}")
    words = [sys.executable, "-m", "mpicomp_launch", "-np", "2", sys.executable, path]
    ours, theirs = os.openpty()
    done = subprocess.run(words, env=environ, stdout=subprocess.PIPE, stderr=theirs, timeout=60)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0
    assert "mpicomp-launch: 0 of 2 ranks are up" in shown
    assert shown.endswith("\r\x1b[K")


def test_output_that_nobody_reads_ends_the_job(environ, mpi, script):
    path = script("while True: print('x' * 100)")
    words = f"{sys.executable} -m mpicomp_launch -np 2 {sys.executable} {path} | head -n 2"
    done = subprocess.run(
        ["bash", "-c", f"{words}; exit ${{PIPESTATUS[0]}}"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert done.returncode == 141
    assert len(done.stdout.splitlines()) == 2
    assert "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_written_is_said_at_once(launch, mpi, tmp_path):
    (tmp_path / "file").touch()
    done = launch("-np", "2", "--output-dir", str(tmp_path / "file"), sys.executable, "-c", "0")
    assert done.returncode == 2
    assert "--output-dir must be a directory that can be written" in done.stderr
    assert done.stderr.count("\n") == 1


def test_closed_streams(environ, mpi):
    words = f"{sys.executable} -m mpicomp_launch -np 2 {sys.executable} -c 'print(1); 1 / 0'"
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        done = subprocess.run(
            ["bash", "-c", f"{words} {closed}"], env=environ, capture_output=True, text=True
        )
        assert done.returncode == 1, done
        assert "mpicomp_launch/cli.py" not in done.stderr
        assert ("ZeroDivisionError" in done.stderr) == (closed == ">&-")


def test_a_rank_that_leaves_early_is_named(launch_python, script, mpi):
    done = launch_python(script(BARRIER.format("os._exit(0)")))
    assert done.returncode != 0
    if mpi.family != "openmpi":  # which says so itself
        assert "rank 1 on " in done.stderr.splitlines()[-1]


def test_full_disk(environ, mpi):
    words = [sys.executable, "-m", "mpicomp_launch", "-np", "2", sys.executable, "-c", "print(1)"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, env=environ, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 141
    assert done.stderr == (
        "mpicomp-launch: output cannot be written: No space left on device, ending the job\n"
    )


@pytest.mark.parametrize("who", ["guard", "shim"])
def test_what_watches_over_a_rank_is_killed(environ, mpi, who):
    """Before MPI has begun, so that no mpirun notices."""
    code = (
        "import os, sys, time; guard = os.getppid()\n"
        "shim = open(f'/proc/{guard}/stat').read().rpartition(')')[2].split()[1]\n"
        "print(guard, shim, flush=True); time.sleep(100)"
    )
    words = ["-m", "mpicomp_launch", "-np", "2", "--tag", "none", sys.executable, "-c", code]
    job = subprocess.Popen(
        [sys.executable, *words], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    lines = [job.stdout.readline().split() for _ in range(2)]
    time.sleep(1)  # until the launcher has seen them
    os.kill(int(lines[0][who == "shim"]), signal.SIGKILL)
    _, err = job.communicate(timeout=30)
    assert job.returncode > 0, err
    assert b"mpicomp-launch: " in err


def test_directories_that_are_none(launch, mpi, environ, tmp_path):
    for wrong in (tmp_path / "none", sys.executable):
        done = launch("-np", "1", "--cwd", str(wrong), "true")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "--cwd must be a directory" in done.stderr
    gone = tmp_path / "gone"
    gone.mkdir()
    words = f"cd {gone}; rmdir {gone}; {sys.executable} -m mpicomp_launch -np 1 true"
    done = subprocess.run(["bash", "-c", words], env=environ, capture_output=True, text=True)
    assert done.returncode == 2
    assert "the working directory must exist" in done.stderr


def test_ranks_that_flood_the_launcher(launch, mpi, script):
    """Whole lines, in the order of each rank, whatever the MPI does with what it forwards.

    Without tags the beginning of a line would be passed on before its end has come.
    """
    path = script(
        "from mpi4py import MPI\n"
        "for n in range(30000): print(MPI.COMM_WORLD.rank, n, (n * 37 % 101) * 'x')\n"
    )
    done = launch("-np", "3", sys.executable, path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for rank in range(3):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert own == [f"[{rank}] {rank} {n} {(n * 37 % 101) * 'x'}" for n in range(30000)]
    assert len(lines) == 90000
