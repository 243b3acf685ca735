"""Taking a command line apart."""

import os
import sys

import pytest

from mpicomp_launch import command, worker
from mpicomp_launch.errors import LaunchError


@pytest.mark.parametrize(
    ("words", "options", "arguments"),
    [
        ("train.py --lr 1 -m x", "", "train.py --lr 1 -m x"),
        ("-u -X dev train.py -u", "-u -X dev", "train.py -u"),
        ("-Xdev -W ignore -Werror train.py", "-Xdev -W ignore -Werror", "train.py"),
        ("-uW ignore train.py", "-uW ignore", "train.py"),
        ("--check-hash-based-pycs never train.py", "--check-hash-based-pycs never", "train.py"),
        ("-m pkg.mod -c 1", "", "-m pkg.mod -c 1"),
        ("-mpkg -c 1", "", "-m pkg -c 1"),
        ("-OOum pkg", "-OOu", "-m pkg"),
        ("-B -uc code -x", "-B -u", "-c code -x"),
        ("-ccode", "", "-c code"),
        ("-Wm train.py", "-Wm", "train.py"),
        ("- a", "", "- a"),
        ("-u", "-u", ""),
        ("", "", ""),
    ],
)
def test_interpreter_options_end_where_the_program_begins(words, options, arguments):
    assert command.split_python(words.split()) == (
        tuple(options.split()),
        tuple(arguments.split()),
    )


def test_python_command_goes_through_the_worker(script):
    path = script("")
    parsed = command.parse([sys.executable, "-u", path, "--np", "3"], os.environ)
    assert parsed.is_python
    assert parsed.argv() == [sys.executable, "-u", worker.__file__, path, "--np", "3"]


@pytest.mark.parametrize("name", ["python", "python3", "python3.11", "python3.13t", "pypy3.10"])
def test_recognised_as_python(tmp_path, name):
    (tmp_path / name).touch(mode=0o755)
    parsed = command.parse([name, "-c", "0"], {"PATH": str(tmp_path)})
    assert parsed.is_python
    assert parsed.program == str(tmp_path / name)


@pytest.mark.parametrize("name", ["python-config", "pythonx", "a.out", "ipython3"])
def test_not_recognised_as_python(tmp_path, name):
    (tmp_path / name).touch(mode=0o755)
    parsed = command.parse([name, "-c", "0"], {"PATH": str(tmp_path)})
    assert parsed.argv() == [str(tmp_path / name), "-c", "0"]


def test_asking_python_for_its_version_needs_no_worker():
    assert command.parse([sys.executable, "-V"], {}).argv() == [sys.executable, "-V"]


def test_without_python_on_path_the_own_one_is_taken(tmp_path):
    assert command.parse(["python", "-c", "0"], {"PATH": str(tmp_path)}).program == sys.executable


@pytest.mark.parametrize("argument", ["", ":", "::", ":::", "a:", ":a", "a:b", " ", " :"])
def test_escaping_is_undone(argument):
    assert worker.escape(argument) != ":"
    assert worker.unescape(worker.escape(argument)) == argument


def test_lone_colon_is_refused_where_nothing_can_unescape_it():
    with pytest.raises(LaunchError, match="lone ':'"):
        command.parse(["env", ":"], os.environ)


@pytest.mark.parametrize("words", [[], ["-u"], ["-"], ["-m"], ["-c"]])
def test_python_without_a_program_is_refused(words):
    with pytest.raises(LaunchError, match="must name a script"):
        command.parse([sys.executable, *words], os.environ)


def test_missing_script_is_refused():
    with pytest.raises(LaunchError, match=r"must be a file, got 'no\.py'"):
        command.parse([sys.executable, "no.py"], os.environ)


def test_script_that_is_not_executable_gets_advice(script):
    path = script("")
    with pytest.raises(LaunchError, match=f"write `python {path}`"):
        command.parse([path], os.environ)


def test_no_module_hides_one_of_the_standard_library():
    """`python worker.py` puts the package's directory first on the path."""
    names = {name.partition(".")[0] for name in os.listdir(os.path.dirname(worker.__file__))}
    assert not names & sys.stdlib_module_names
