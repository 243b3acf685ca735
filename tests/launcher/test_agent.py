"""How other hosts are reached: ssh's options, and words that arrive whatever shell is there."""

import json
import shutil
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpicomp_launch.agent import Agent

CAREFUL = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
SHELLS = ("sh", "bash", "zsh", "fish", "dash")
SHOW = "import json, sys; print(json.dumps(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("agent", "flags"),
    [
        (Agent(), CAREFUL),
        (Agent(("/usr/bin/ssh", "-4")), CAREFUL),
        (Agent(port=22, identity="/k y"), ["-p", "22", "-i", "/k y", *CAREFUL]),
        (Agent(options=("-l", "me")), ["-l", "me", *CAREFUL]),
        (Agent(("rsh",)), []),
        (Agent(("/x/agent", "-v"), 2, "k", ("-q",)), ["-p", "2", "-i", "k", "-q"]),
    ],
)
def test_flags(agent, flags):
    assert agent.flags() == flags
    expected = [*agent.program, *flags, "a", "ls 'a b'"]
    assert agent.command("a", ["ls", "a b"]) == expected


def test_the_users_options_win():
    """The ssh of OpenSSH keeps the first value it is given; `ssh -G` says which ones it has."""
    ssh = shutil.which("ssh")
    if ssh is None:
        pytest.skip("no ssh")
    mine = Agent((ssh, "-G"), port=2222, options=("-o", "ConnectTimeout=60", "-o", "BatchMode=no"))
    said = subprocess.run(mine.command("a", ["x"]), capture_output=True, text=True, check=True)
    settings = dict(line.partition(" ")[::2] for line in said.stdout.splitlines())
    assert settings["port"] == "2222"
    assert settings["connecttimeout"] == "60"
    assert settings["batchmode"] == "no"


@pytest.mark.parametrize("shell", SHELLS)
def test_words_arrive(shell):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell}")

    @given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), max_size=4))
    @example(["=ls", "~", "a\\", "\\\\", "'", "\\'", '"', "$HOME", "`id`", "!!", "%self", "a=b"])
    @example(["", " ", "\n", "\t", "*", "{a,b}", "<(id)", "#", "^", ";", "&", "(", "|", "\\n"])
    @settings(max_examples=15, deadline=None)
    def check(words):
        line = Agent().command("a", [sys.executable, "-c", SHOW, *words])[-1]
        ran = subprocess.run([program, "-c", line], capture_output=True, text=True)
        assert ran.stderr == ""
        assert json.loads(ran.stdout) == words

    check()
