"""The command line and its help follow the schema."""

import re
import subprocess
import sys

import pytest

from mpicomp_launch import arguments
from mpicomp_launch.errors import LaunchError
from mpicomp_launch.options import FIELDS, flag_of


def given(*words):
    return {name: value.value for name, value in arguments.parse(words).given.items()}


def test_values():
    request = arguments.parse(
        ["-np", "3", "-H", "a:2,b", "--no-stats", "--fusion-mb=2", "--env", "A=1=2", "--env", "B",
         "--mpi-args", "--mca 'x y' z", "--mpi-args", "-q", "python", "--mpi-args", "-q"]
    )  # fmt: skip
    assert {name: value.value for name, value in request.given.items()} == {
        "np": 3,
        "hosts": "a:2,b",
        "stats": False,
        "fusion_mb": 2.0,
        "env": (("A", "1=2"), ("B", None)),
        "mpi_args": ("--mca", "x y", "z", "-q"),
    }
    assert request.words == ("python", "--mpi-args", "-q")
    assert not request.check
    assert {value.origin for value in request.given.values()} == {"command line"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--tag", "all", "x"], "--tag must be rank, host:rank or none, got 'all'"),
        (["--timeout", "nan", "x"], "--timeout must be a number above 0, got 'nan'"),
        (["--timeout", "-1", "x"], "--timeout must be a number above 0, got '-1'"),
        (["--ssh-port", "x", "y"], "--ssh-port must be a whole number"),
        (["--env", "A B=1", "x"], "--env must be NAME or NAME=VALUE"),
        (["--mpi-args", "'", "x"], "--mpi-args must be words, quoted as for a shell"),
        (["--write-script", "moab", "x"], "invalid choice: 'moab'"),
        (["--host", "x"], "--host is not an option; did you mean --hosts?"),
        (["--np", "3", "x"], "--np is not an option; did you mean -np?"),
        (["--zzz=1", "x"], "--zzz is not an option; see `mpicomp-launch --help`"),
        (["-np", "--", "x"], "-np must be followed by its value, got --"),
        (["--mpi-args", "--", "x"], "--mpi-args must be followed by its value, got --"),
        (["--check", "--dry-run", "x"], "one thing to do must be given, got --check and --dry-run"),
        (["--json", "x"], "--json must be given with --check"),
        (["--config", "", "x"], "--config must name a file, got ''"),
        (["--write-config=", "x"], "--write-config must name a file, got ''"),
    ],
)
def test_mistakes(words, text):
    with pytest.raises(LaunchError) as caught:
        arguments.parse(words)
    assert text in str(caught.value)


def test_help_has_every_option_within_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = arguments.make_parser().format_help()
    for name, field in FIELDS.items():
        if name != "host":
            assert re.search(rf"^  (-\S+.*, )?{flag_of(name)}\b", text, re.MULTILINE), name
            assert field.metadata["help"].split()[0] in text
    for title in ("environment:", "files:", "exit status:", "examples:", "between hosts:"):
        assert f"\n{title}\n" in text
    assert max(map(len, text.splitlines())) <= 80


def test_precedence_at_the_command_line(environ, tmp_path):
    (tmp_path / "a.toml").write_text("np = 2\ncompression = 'topk'\ntimeout = 7\n")
    words = ["--config", str(tmp_path / "a.toml"), "--timeout", "9", "--write-script", "slurm", "x"]
    done = subprocess.run(
        [sys.executable, "-m", "mpicomp_launch", *words],
        env={**environ, "MPICOMP_COMPRESSION": "int8"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "--compression int8 --timeout 9 x" in done.stdout
    assert "--ntasks=2" in done.stdout
