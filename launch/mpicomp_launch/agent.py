"""How another host is reached: by ssh, or by a program of the user's that stands in for it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

CONNECT_SECONDS = 10


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
        wait for ever for a host that is down.
        """
        words = []
        if self.is_ssh:
            words += ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
        if self.port is not None:
            words += ["-p", str(self.port)]
        if self.identity is not None:
            words += ["-i", self.identity]
        return [*words, *self.options]

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """The argument list that runs a program on a host; the shell there gets it quoted."""
        return [*self.program, *self.flags(), host, shlex.join(words)]
