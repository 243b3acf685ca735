"""The command line and its help follow the schema; who wins among sources."""

import re
import subprocess
import sys

import pytest

from mpicomp_launch import arguments, resolve
from mpicomp_launch.environment import INTERNAL, without_own
from mpicomp_launch.errors import LaunchError
from mpicomp_launch.kinds import HostSection
from mpicomp_launch.options import FIELDS, Options, flag_of, variable_of
from mpicomp_launch.resolve import Value


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
        (["--host", "x"], "unrecognized arguments: --host"),
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


def test_strongest_source_wins():
    options = resolve.resolve(
        {"np": Value(1, "command line")},
        {"np": Value(2, "X"), "tag": Value("none", "MPICOMP_LAUNCH_TAG")},
        {"np": Value(3, "f"), "tag": Value("rank", "f"), "timeout": Value(5.0, "f:1:1")},
    )
    assert (options.options.np, options.options.tag, options.options.timeout) == (1, "none", 5.0)
    assert options.origins == {
        "np": "command line",
        "tag": "MPICOMP_LAUNCH_TAG",
        "timeout": "f:1:1",
    }
    assert options.options.start_timeout == Options().start_timeout


def test_what_repeats_is_joined_with_the_strongest_last():
    found = resolve.resolve(
        {"env": Value((("A", "strong"),), "command line")},
        {"env": Value((("A", "weak"), ("B", "1")), "f")},
    )
    assert dict(found.options.env) == {"A": "strong", "B": "1"}


def test_environment():
    environ = {
        "MPICOMP_LAUNCH_NP": "4",
        "MPICOMP_STATS": "off",
        "MPICOMP_LAUNCH_HOSTS": "",
        "MPICOMP_EXPECT_SIZE": "9",
        "OTHER": "x",
    }
    found = resolve.from_environment(environ, INTERNAL)
    assert found == {"np": Value(4, "MPICOMP_LAUNCH_NP"), "stats": Value(False, "MPICOMP_STATS")}
    assert without_own(environ) == {"MPICOMP_STATS": "off", "OTHER": "x"}
    with pytest.raises(LaunchError, match="MPICOMP_LAUNCH_NPP is not a setting; did you mean"):
        resolve.from_environment({"MPICOMP_LAUNCH_NPP": "4"}, INTERNAL)
    with pytest.raises(LaunchError, match="MPICOMP_STATS: stats must be true or false, got 'x'"):
        resolve.from_environment({"MPICOMP_STATS": "x"}, INTERNAL)


def test_library_and_launcher_know_the_same_variables():
    settings = pytest.importorskip("mpicomp.settings")
    library = {f"MPICOMP_{name.upper()}" for name in settings.Settings.__dataclass_fields__}
    ours = {f.metadata["variable"] for f in FIELDS.values() if f.metadata["variable"]}
    assert library - ours <= set(INTERNAL)
    assert ours <= library


def test_sections():
    assert resolve.convert("host", {"a": {"slots": 2}, "b": None}, "f").value == (
        HostSection("a", 2),
        HostSection("b"),
    )
    for wrong in ({"a": {"slots": 0}}, {"a": 3}, ["a"], {"a": {"env": {"A B": "1"}}}):
        with pytest.raises(LaunchError, match="f: host must be a table of hosts"):
            resolve.convert("host", wrong, "f")


def test_every_option_has_a_variable():
    assert len({variable_of(name) for name in FIELDS}) == len(FIELDS)


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
