"""Completion, by the shells themselves: bash and zsh on a terminal, fish by its own word for it."""

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import time

import pytest

from mpicomp_launch import completion
from mpicomp_launch.options import FIELDS, flag_of

SECONDS = 60
SHOW = "mpicomp-launch() { printf '<%s>' \"$@\"; echo '<E''ND>'; }"  # what the line has become
PREPARE = {
    "bash": "source {directory}/script",
    "zsh": "autoload -U compinit; compinit -D; source {directory}/script",
    "zsh, by fpath": "fpath=({directory}/functions $fpath); autoload -U compinit; compinit -D",
}
COMMANDS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}


class Terminal:
    """A shell on a terminal of its own."""

    def __init__(self, words, directory):
        self.said = b""
        self.pid, self._end = pty.fork()
        if self.pid == 0:
            os.chdir(directory)
            os.execvpe(words[0], words, {**os.environ, "TERM": "dumb", "PS1": "$ "})

    def type(self, text, until):
        """Types, and returns what is said from then on until a word comes."""
        start = len(self.said)
        os.write(self._end, text.encode())
        limit = time.monotonic() + SECONDS
        while until.encode() not in self.said[start:]:
            assert time.monotonic() < limit, self.said
            if select.select([self._end], [], [], 1)[0]:
                self.said += os.read(self._end, 65536)
        return self.said[start:].decode(errors="replace")

    def close(self):
        os.close(self._end)  # hangs up
        os.waitpid(self.pid, 0)


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "hosts.txt").touch()
    (tmp_path / "results").mkdir()
    return tmp_path


@pytest.fixture
def on_terminal(directory):
    """Completes words on a terminal; returns the words that a program would get."""
    terminals = []

    def run(shell, *lines):
        name = shell.partition(",")[0]
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
        (directory / "functions").mkdir()
        for place in ("script", "functions/_mpicomp-launch"):
            (directory / place).write_text(completion.script(name))
        terminal = Terminal(COMMANDS[name], directory)
        terminals.append(terminal)
        prepare = PREPARE[shell].format(directory=shlex.quote(str(directory)))
        terminal.type(f"{prepare}; {SHOW}; echo RE''ADY\n", "READY")
        # Keys are taken in order: the end of the line waits until completion is through.
        return [
            re.findall("<(.*?)>", terminal.type(f"mpicomp-launch {line}\t\n", "<END>"))[:-1]
            for line in lines
        ]

    yield run
    for terminal in terminals:
        terminal.close()


@pytest.fixture
def in_fish(directory):
    """What fish offers at the end of a line."""
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    (directory / "script").write_text(completion.script("fish"))

    def run(line):
        code = f"source script; complete -C 'mpicomp-launch {line}'"
        words = ["fish", "-N", "-c", code]
        done = subprocess.run(words, capture_output=True, text=True, cwd=directory)
        assert not done.stderr, done.stderr
        return {line.split("\t")[0] for line in done.stdout.split("\n")} - {""}

    return run


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_on_a_terminal(on_terminal, shell):
    cases = {
        "--ta": ["--tag"],
        "-H a:4,b:4 --ta": ["-H", "a:4,b:4", "--tag"],
        "--tag=rank --gpu": ["--tag=rank", "--gpu-bind"],
        "--tag=ho": ["--tag=host:rank"],
        "--tag host:r": ["--tag", "host:rank"],
        "--gpu-bind lo": ["--gpu-bind", "local"],
        "--completion z": ["--completion", "zsh"],
        "--hostfile ho": ["--hostfile", "hosts.txt"],
        "--hostfile=ho": ["--hostfile=hosts.txt"],
        "-np 2 cat ho": ["-np", "2", "cat", "hosts.txt"],
        "-np 2 -- cat ho": ["-np", "2", "--", "cat", "hosts.txt"],
        "-np 2 cat --ta": ["-np", "2", "cat", "--ta"],
    }
    assert dict(zip(cases, on_terminal(shell, *cases), strict=True)) == cases


def test_zsh_finds_it_on_fpath(on_terminal):
    assert on_terminal("zsh, by fpath", "--ta") == [["--tag"]]


def test_fish(in_fish):
    assert {flag_of(name) for name in FIELDS if name not in ("np", "host")} <= in_fish("--")
    assert in_fish("-H a:4,b:4 --ta") == {"--tag"}
    assert in_fish("--tag ho") == {"host:rank"}
    assert in_fish("--tag=ho") == {"--tag=host:rank"}
    assert in_fish("--gpu-bind ") == {"local", "none"}
    assert in_fish("--hostfile ho") == {"hosts.txt"}
    assert in_fish("--cwd re") == {"results/"}
    assert in_fish("-np 2 cat ho") == {"hosts.txt"}
    assert in_fish("--stats -- cat ho") == {"hosts.txt"}
    assert in_fish("-np 2 cat --ta") == set()
    assert "env" in in_fish("-np 2 en")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_has_every_option(shell):
    for name in FIELDS:
        assert name == "host" or flag_of(name) in completion.script(shell)


def test_at_the_command_line(environ):
    words = [sys.executable, "-m", "mpicomp_launch", "--completion", "bash"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    assert done.stdout == completion.script("bash")
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0
    if shutil.which("shellcheck"):
        check = ["shellcheck", "--shell=bash", "-"]
        found = subprocess.run(check, input=done.stdout, text=True, capture_output=True)
        assert found.returncode == 0, found.stdout
