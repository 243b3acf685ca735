"""How another host is reached: by ssh, or by a program of the user's that stands in for it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

CONNECT_SECONDS = 10
# Unlike `shlex.quote`: zsh takes `=ls` for the path of a program, and fish `%self` for its own pid.
PLAIN = re.compile(r"[\w@+:,./-][\w@%+=:,./-]*", re.ASCII)


@dataclass(frozen=True)
class Agent:
    """A program that is called as `PROGRAM [options] HOST COMMAND`, as ssh is.

    Attributes:
        program: Its words, the path or name first.
        port: Of the ssh servers.
        identity: File of the key.
        options: More of the user's.
    """

    program: tuple[str, ...] = ("ssh",)
    port: int | None = None
    identity: str | None = None
    options: tuple[str, ...] = ()

    @property
    def is_ssh(self) -> bool:
        """Whether it takes ssh's options."""
        return os.path.basename(self.program[0]) == "ssh"

    def flags(self) -> list[str]:
        """Options between program and host, for us and for the MPI's launcher alike.

        ssh must neither ask for a password, which nobody could type for several hosts at once, nor
        wait for ever for a host that is down. What the user says stands first: ssh keeps the first
        value it is given.
        """
        words = []
        if self.port is not None:
            words += ["-p", str(self.port)]
        if self.identity is not None:
            words += ["-i", self.identity]
        words += self.options
        if self.is_ssh:
            words += ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
        return words

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """The argument list that runs a program on a host; the shell there gets it quoted."""
        return [*self.program, *self.flags(), host, " ".join(map(quote, words))]


def quote(word: str) -> str:
    """A word for a shell of another host, which may be sh, bash, zsh, fish, or csh.

    In single quotes fish takes a backslash for more than itself, so it stands outside of them.
    """
    if PLAIN.fullmatch(word):
        return word
    inside = word.replace("'", "'\"'\"'").replace("\\", "'\\\\'")
    return f"'{inside}'"
