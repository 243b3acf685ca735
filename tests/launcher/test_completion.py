"""Completion, by the shells themselves."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from mpicomp_launch import completion
from mpicomp_launch.options import FIELDS, flag_of

BASH = """
source {script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMP_LINE={line}
_mpicomp_launch
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def complete(tmp_path):
    """What a shell offers at the end of words."""

    def run(shell, *words):
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed")
        script = tmp_path / "script"
        script.write_text(completion.script(shell))
        if shell == "bash":
            line = shlex.quote(" ".join(words))
            pieces = [
                piece for word in words for piece in re.split("([:=])", word) if piece or not word
            ]
            quoted = " ".join(map(shlex.quote, pieces))
            command = ["bash", "-c", BASH.format(script=script, words=quoted, line=line)]
        else:
            line = " ".join(words)
            command = ["fish", "-N", "-c", f"source {script}; complete -C '{line}'"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert not done.stderr, done.stderr
        return {line.split("\t")[0] for line in done.stdout.split("\n")} - {""}

    return run


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_options_and_choices(complete, shell):
    every = complete(shell, "mpicomp-launch", "--")
    assert {flag_of(name) for name in FIELDS if name not in ("np", "host")} <= every
    assert complete(shell, "mpicomp-launch", "-np", "2", "--ta") == {"--tag"}
    assert complete(shell, "mpicomp-launch", "--gpu-bind", "") == {"local", "none"}
    assert complete(shell, "mpicomp-launch", "--completion", "z") == {"zsh"}


def test_words_that_bash_takes_apart(complete):
    assert complete("bash", "mpicomp-launch", "--hosts", "a:4,b:4", "--ta") == {"--tag"}
    assert complete("bash", "mpicomp-launch", "--tag=no") == {"none"}


def test_files_and_what_follows_the_command(complete, tmp_path):
    (tmp_path / "hosts.txt").touch()
    assert "hosts.txt" in complete("bash", "mpicomp-launch", "--hostfile", "ho")
    assert "hosts.txt" in complete("bash", "mpicomp-launch", "-np", "2", "cat", "ho")
    assert complete("bash", "mpicomp-launch", "cat", "--ta") == set()


def test_zsh_takes_it(tmp_path):
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    script = tmp_path / "script"
    script.write_text(completion.script("zsh"))
    code = f"autoload -U compinit; compinit -D; source {script}; print $_comps[mpicomp-launch]"
    done = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True)
    assert done.stdout == "_mpicomp_launch\n", done.stderr
    for name in FIELDS:
        assert name == "host" or f"*{flag_of(name)}" in script.read_text()


def test_at_the_command_line(environ):
    words = [sys.executable, "-m", "mpicomp_launch", "--completion", "bash"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    assert done.stdout == completion.script("bash")
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0
