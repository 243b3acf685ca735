"""`mpicomp_launch.run`: exceptions, ranks that end early, callers that end early, and mistakes."""

import fcntl
import os
import pickle
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

import mpicomp_launch
from mpicomp_launch import LaunchError, RankError, called, function

ROOT = Path(__file__).resolve().parents[2]


def test_exceptions_come_as_they_are(caller):
    done = caller(
        "class Mine(ValueError):\n"
        "    def __init__(self, code, text): super().__init__(code, text); self.code = code\n"
        "def fail():\n"
        "    if ranks()[0] == 1:\n"
        "        raise Mine(7, 'broken')\n"
        "    from mpi4py import MPI\n"
        "    MPI.COMM_WORLD.Barrier()\n"
        "try:\n"
        "    run(fail, np=2)\n"
        "except Mine as error:\n"
        "    cause = error.__cause__\n"
        "    assert isinstance(cause, RankError)\n"
        "    print(error.code, cause.rank, cause.host == os.uname().nodename)\n"
        "    assert 'raise Mine(7' in str(cause), str(cause)\n"
        "    assert 'called.py' not in str(cause), str(cause)\n"
    )
    assert done.stdout == "7 1 True\n", done.stderr
    assert "Traceback" not in done.stderr


def test_an_uncaught_exception_shows_the_traceback_of_the_rank_once(caller):
    done = caller("def inner(): return {}['missing']\nrun(inner, np=2)\n")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("KeyError: 'missing'")
    assert done.stderr.count("return {}['missing']") == 1
    assert "RankError: rank " in done.stderr


def test_exceptions_that_cannot_travel(caller):
    done = caller(
        "class Locked(Exception):\n"
        "    def __init__(self):\n"
        "        import threading\n"
        "        self.lock = threading.Lock()\n"
        "class Strange(Exception):\n"
        "    def __init__(self, one, two): super().__init__('text')\n"
        "def lock(): raise Locked\n"
        "def strange(): raise Strange(1, 2)\n"
        "for fn in lock, strange:\n"
        "    try: run(fn, np=1)\n"
        "    except RankError as error: print(error.rank, str(error).splitlines()[-1])\n"
    )
    assert done.stdout == "0 Locked\n0 Strange: text\n", done.stderr


def test_results_that_cannot_travel(caller):
    done = caller(
        "def generate():\n"
        "    return (i for i in range(3)) if ranks()[0] else 0\n"
        "try: run(generate, np=2)\n"
        "except TypeError as error: print(error, error.__cause__.rank)\n"
        "import threading\n"
        "try: run(threading.Lock().acquire, np=1)\n"
        "except TypeError as error: print(error)\n"
    )
    first, second = done.stdout.splitlines()
    assert first.startswith("run: what rank 1 returns must be picklable, got generator: ")
    assert first.endswith(" 1")
    assert second.startswith("run: function and arguments must be picklable, got <built-in")


def test_ranks_that_end_early(caller, mpi):
    done = caller(
        "import signal\n"
        "def die(how):\n"
        "    if ranks()[0] == 1: how(os.getpid(), 9) if how is os.kill else how(3)\n"
        "    from mpi4py import MPI\n"
        "    MPI.COMM_WORLD.Barrier()\n"
        "for how in os.kill, sys.exit, os._exit:\n"
        "    try: run(die, (how,), np=2)\n"
        "    except RankError as error: print(error.rank, error.text)\n"
        "try: run(os._exit, (0,), np=1)\n"
        "except RankError as error: print(error.rank, error.text)\n"
    )
    assert done.stdout.splitlines() == [
        "1 was killed by signal 9 (SIGKILL)",
        "1 failed with status 3",
        "1 failed with status 3",
        "0 ended without a result",
    ], done.stderr


def test_time_limit(caller):
    done = caller(
        "try: run(time.sleep, (90,), np=2, timeout=1, grace=1)\n"
        "except TimeoutError as error: print(error)\n"
    )
    assert "the job was ended after 1 s" in done.stdout, done.stderr


def test_not_from_a_rank(caller):
    done = caller(
        "def nested(): return run(ranks, np=1)\n"
        "try: run(nested, np=1)\n"
        "except LaunchError as error: print(type(error).__name__, error)\n"
    )
    assert done.stdout.startswith("LaunchError run must be called outside of a job, got ")


SLEEPERS = """
def sleep(path):
    open(os.path.join(path, str(os.getpid())), "w").close()
    time.sleep(90)
try:
    run(sleep, (sys.argv[1],), np=2, grace=3)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_job_ends_with_its_caller(environ, mpi, script, head, tmp_path, signum):
    pids, temporary = tmp_path / "pids", tmp_path / "tmp"
    pids.mkdir()
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, script(head + SLEEPERS), str(pids)],
        env={**environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: len(list(pids.iterdir())) == 2)
    process.send_signal(signum)
    out, _ = process.communicate(timeout=60)  # our output is the job's: all have ended
    assert out == ("interrupted\n" if signum == signal.SIGINT else "")
    wait_until(lambda: not any(is_running(path.name) for path in pids.iterdir()))
    wait_until(lambda: not list(temporary.glob("mpicomp-*")))


def test_interrupt_at_a_prompt(environ, mpi, tmp_path):
    """A terminal sends Ctrl-C to all processes of its session; the prompt comes back."""
    main, side = pty.openpty()

    def take_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY)

    process = subprocess.Popen(
        [sys.executable, "-q"],
        env={**environ, "TMPDIR": str(tmp_path), "NO_COLOR": "1", "PYTHON_BASIC_REPL": "1"},
        stdin=side,
        stdout=side,
        stderr=side,
        preexec_fn=take_terminal,
    )
    os.close(side)
    said = ""

    def expect(text):
        nonlocal said
        while text not in said:
            assert select.select([main], [], [], 60)[0], said
            said += os.read(main, 1000).decode()
        said = said.partition(text)[2]

    expect(">>> ")
    os.write(main, b"import mpicomp_launch, time, os\n")
    os.write(main, b"run = mpicomp_launch.run\n")
    os.write(main, b"run(lambda: (print('u' + 'p'), time.sleep(90)), np=2, grace=3)\n")
    expect("] up")
    expect("] up")
    os.write(main, b"\x03")
    expect("KeyboardInterrupt")
    expect(">>> ")
    assert not list(tmp_path.glob("mpicomp-*"))
    os.write(main, b"run(lambda x: x + 1, (41,), np=1)\n")
    expect("[42]")
    os.write(main, b"exit()\n")
    assert process.wait(60) == 0
    os.close(main)


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Without a job.


@pytest.fixture
def outside(monkeypatch):
    """No launcher above the tests."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI", "MPI_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"host_file": "x"},
            TypeError,
            "run: 'host_file' is not an option; did you mean hostfile?",
        ),
        ({"compresion": "topk"}, TypeError, "did you mean compression?"),
        ({"np": 0}, LaunchError, "run: np must be a whole number, 1 or more, got 0"),
        ({"np": "two"}, LaunchError, "run: np must be a whole number"),
        ({"hosts": 4}, LaunchError, "run: hosts must be a host list"),
        ({"bind": "tight"}, LaunchError, "run: bind must be none, core, numa or socket"),
        ({"args": 3}, TypeError, r"run: args must be a tuple, got 3; as in args=\(value,\)"),
        ({"args": "abc"}, TypeError, "run: args must be a tuple, got 'abc'"),
        ({"function": 3}, TypeError, "run: function must be callable, got 3"),
        ({"directory": "/none"}, FileNotFoundError, "/none"),
    ],
)
def test_mistakes_of_the_caller(outside, options, error, text):
    with pytest.raises(error, match=text):
        mpicomp_launch.run(**{"function": print, **options})


def test_what_the_launcher_refuses_is_raised(outside, mpi, monkeypatch):
    monkeypatch.setenv("MPICOMP_COMPRESION", "x")
    with pytest.raises(LaunchError, match="did you mean MPICOMP_COMPRESSION"):
        mpicomp_launch.run(print, np=1)


def test_a_directory_that_is_not_shared(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", function.RANK, str(tmp_path / "none")],
        env={**os.environ, "PYTHONPATH": str(Path(called.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert "must be one that all hosts share" in done.stderr
    assert done.returncode == 1


def test_errors_of_ranks_can_be_pickled():
    error = pickle.loads(pickle.dumps(RankError(3, "a", "failed")))
    assert (error.rank, error.host, str(error)) == (3, "a", "rank 3 on a failed")
