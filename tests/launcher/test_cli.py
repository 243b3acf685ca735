"""Mistakes end with one line and status 2."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("-np 0 env", "-np must be a whole number, 1 or more, got '0'"),
        ("-np -3 env", "-np"),
        ("-np two env", "-np must be a whole number, 1 or more, got 'two'"),
        ("-np 1.5 env", "got '1.5'"),
        ("-np 9999999 env", "got '9999999'"),
        ("-np", "expected one argument"),
        ("env", "-np or --hosts must be given"),
        ("-np 2", "COMMAND must be given"),
        ("-np 2 --", "COMMAND must be given"),
        ("-np 2 no-such-program --x", "COMMAND must be a program on PATH"),
        ("-np 2 python no-such-script.py", "must be a file, got 'no-such-script.py'"),
        ("-np 2 --no-such-option env", "--no-such-option is not an option"),
        ("-np 2 --compress x env", "--compress is not an option; did you mean --compression?"),
        (
            "-np 2 --mpi lam env",
            "--mpi must be mpich, openmpi, intel, mvapich, spectrum, srun, flux, jsrun or pals, "
            "got 'lam'",
        ),
    ],
)
def test_mistakes(launch, words, text):
    done = launch(*words.split())
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("mpicomp-launch: ")
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_help(launch):
    done = launch("--help")
    assert done.returncode == 0
    assert "--compression SPEC" in done.stdout


def test_options_after_the_command_are_not_ours(launch, mpi, script):
    path = script("")
    words = ["--compression", "topk", "--stats", "-np", "9", "--dry-run", ":"]
    done = launch("--dry-run", "-n", "1", "--compression", "powersgd", sys.executable, path, *words)
    assert "MPICOMP_COMPRESSION=powersgd" in done.stdout
    assert "MPICOMP_STATS" not in done.stdout
    assert f"{path} --compression topk --stats -np 9 --dry-run ::" in done.stdout


def test_dry_run_prints_the_exact_command(launch, mpi, script):
    path = script("import sys; sys.stdout.write(repr(sys.argv[1:]) + '\\n')")
    done = launch("-np", "2", "--dry-run", "--", sys.executable, path, "it's", "")
    assert mpi.launcher in done.stdout
    assert "# np = 2  (command line)\n" in done.stdout
    assert "# tag = 'rank'  (default)\n" in done.stdout
    assert "mpicomp_launch/worker.py" in done.stdout
    ran = subprocess.run(["sh", "-c", done.stdout], capture_output=True, text=True, timeout=30)
    assert ran.stdout.splitlines() == [repr(["it's", ""])] * 2


def test_nothing_heavy_is_imported(environ):
    code = (
        "import sys, mpicomp_launch.cli; "
        "print({'torch', 'numpy', 'mpi4py', 'mpicomp', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_help_into_a_pipe_that_closes(environ):
    words = f"{sys.executable} -m mpicomp_launch --completion bash | true"
    done = subprocess.run(["bash", "-c", words], env=environ, capture_output=True, text=True)
    assert done.stderr == ""


def test_full_disk(environ):
    words = [sys.executable, "-m", "mpicomp_launch", "--completion", "bash"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, env=environ, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.stderr == "mpicomp-launch: [Errno 28] No space left on device\n"
