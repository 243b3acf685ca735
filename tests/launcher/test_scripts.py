"""Batch scripts: the head, and a command that says what the options said."""

import shlex
import shutil
import subprocess
import sys

import pytest

from mpicomp_launch import arguments, scripts
from mpicomp_launch.errors import LaunchError
from mpicomp_launch.kinds import HostSection
from mpicomp_launch.resolve import Value, resolve


def write(scheduler, *words):
    request = arguments.parse(words)
    return scripts.script(scheduler, resolve(request.given), request.words)


def last_line(text):
    return shlex.split(text.splitlines()[-1])


def test_slurm():
    text = write(
        "slurm", "-H", "a:4,b:4", "--timeout", "5400", "--ssh-port", "22", "--env", "A=b c",
        "--stats", "--mpi-args", "-x 'y z'", "python", "it's.py", "--lr", "1"
    )  # fmt: skip
    for line in ("--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--time=01:30:00"):
        assert f"#SBATCH {line}\n" in text
    words = ["exec", "mpicomp-launch", "--mpi-args=-x 'y z'", "--env", "A=b c", "--stats"]
    assert last_line(text) == [*words, "--timeout", "5400", "python", "it's.py", "--lr", "1"]


def test_pbs():
    text = write("pbs", "-np", "4", "--no-timestamps", "python", "t.py")
    assert "#PBS -l select=1:ncpus=4:mpiprocs=4\n" in text
    assert "#PBS -l walltime=01:00:00\n" in text
    assert last_line(text) == ["exec", "mpicomp-launch", "--no-timestamps", "python", "t.py"]


def test_numbers_and_words_arrive_as_they_were():
    words = ["--fusion-mb", "12.3456789", "--timeout", "1234567", "--mpi-args", "-x '' 'a\nb'"]
    text = write("slurm", "-np", "2", *words, "--cwd", "-d", "python", "a\n'b", "$x", "`y`", "")
    request = arguments.parse(shlex.split(text[text.index("exec ") :])[2:])
    assert {name: each.value for name, each in request.given.items()} == {
        "fusion_mb": 12.3456789,
        "timeout": 1234567.0,
        "mpi_args": ("-x", "", "a\nb"),
        "cwd": "-d",
    }
    assert request.words == ("python", "a\n'b", "$x", "`y`", "")


def test_variables_of_one_host_are_not_dropped():
    sections = Value((HostSection("a", 2), HostSection("b", 2, None, (("A", "1"),))), "f.toml:1:1")
    with pytest.raises(
        LaunchError, match=r"no env for --write-script, got one of 'b' \(f.toml:1:1"
    ):
        scripts.script("slurm", resolve({"host": sections}), ["x"])


def test_bytes_that_are_no_text(environ):
    words = [sys.executable, "-m", "mpicomp_launch", "-np", "2", "--write-script", "pbs"]
    strict = {**environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run([*words, b"a\xffb"], env=strict, capture_output=True)
    assert done.stdout.endswith(b"exec mpicomp-launch 'a\xffb'\n"), done.stderr


def test_what_is_missing():
    with pytest.raises(LaunchError, match="COMMAND must be given for --write-script"):
        write("slurm", "-np", "2")
    with pytest.raises(LaunchError, match="-np or --hosts must be given for --write-script"):
        write("pbs", "python", "t.py")


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_shells_take_it(scheduler):
    text = write(scheduler, "-np", "2", "--env", "A='\"$x", "python", "a b.py")
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    if shutil.which("shellcheck"):
        done = subprocess.run(
            ["shellcheck", "--severity=warning", "-"], input=text, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stdout
