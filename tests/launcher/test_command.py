"""Taking a command line apart."""

import os
import sys

import pytest

from mpicomp_launch import command, rank
from mpicomp_launch.errors import LaunchError

WORKER = os.path.join(os.path.dirname(command.__file__), "worker.py")


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
    assert parsed.argv() == [sys.executable, "-u", WORKER, path, "--np", "3"]


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
    program = str(tmp_path / name)
    assert parsed.argv() == [sys.executable, WORKER, "--exec", program, "-c", "0"]


def test_asking_python_for_its_version_is_no_program():
    assert not command.parse([sys.executable, "-V"], {}).is_python


def test_without_python_on_path_the_own_one_is_taken(tmp_path):
    assert command.parse(["python", "-c", "0"], {"PATH": str(tmp_path)}).program == sys.executable


@pytest.mark.parametrize("argument", ["", ":", "::", ":::", "a:", ":a", "a:b", " ", " :"])
def test_escaping_is_undone(argument):
    assert rank.escape(argument) != ":"
    assert rank.unescape(rank.escape(argument)) == argument


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
