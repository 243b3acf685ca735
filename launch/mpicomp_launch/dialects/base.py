"""What every launcher's dialect has to say, and how it becomes a command."""

from __future__ import annotations

import os
import re
import shlex
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mpicomp_launch.errors import LaunchError
from mpicomp_launch.hosts import bracketed
from mpicomp_launch.plan import Plan

Option = tuple[str, ...]  # one option with its values: ("--bind-to", "none")


@dataclass(frozen=True)
class Command:
    """What is executed.

    Attributes:
        program: The MPI's launcher.
        options: Its options, each with its values.
        rank: What a rank runs.
        exports: Variables added to the environment.
        cwd: The directory it is started in.
    """

    program: str
    options: tuple[Option, ...]
    rank: tuple[str, ...]
    exports: Mapping[str, str]
    cwd: str

    @property
    def argv(self) -> tuple[str, ...]:
        """The argument list."""
        return (self.program, *(word for option in self.options for word in option), *self.rank)

    def __str__(self) -> str:
        """The same for a shell, one option a line."""
        assignments = [(f"{name}={value}",) for name, value in self.exports.items()]
        lines = [("env",), *assignments, (self.program,), *self.options, self.rank]
        text = " \\\n    ".join(map(shlex.join, lines))
        return f"cd {shlex.quote(self.cwd)} &&\n{text} </dev/null"


class Dialect(ABC):
    """One family of launchers: a method for each thing that a `Plan` can ask for.

    What a launcher cannot express raises LaunchError, with what to do instead.
    """

    title: str
    verbose: ClassVar[tuple[Option, ...]] = ()  # options that make it tell what it does
    begins_here = (
        False  # gives the first ranks to the host it is started on, whatever the list says
    )
    unknown_schedulers: ClassVar[tuple[str, ...]] = ()  # it would run all ranks of theirs here

    def command(self, plan: Plan) -> Command:
        """The whole command for a plan."""
        options = [
            *self.ranks(plan),
            *self.where(plan),
            *self.reach(plan),
            *self.environment(plan),
            *self.directory(plan),
            *self.binding(plan),
            *self.network(plan),
            *(self.verbose if plan.verbose else ()),
            *([plan.mpi_args] if plan.mpi_args else []),
        ]
        exports = {**self.exports(plan), **plan.exports}
        rank = self.segments(plan, tuple(plan.command.argv()))
        return Command(plan.mpi.launcher, tuple(options), rank, exports, plan.cwd)

    def segments(self, plan: Plan, rank: Option) -> Option:
        """What stands behind the options: the command of a rank, for most launchers once."""
        return rank

    def ranks(self, plan: Plan) -> list[Option]:
        """How many."""
        return [("-n", str(plan.np))]

    @abstractmethod
    def where(self, plan: Plan) -> list[Option]:
        """Hosts and the ranks of each. Inside an allocation the launcher knows them itself."""

    def reach(self, plan: Plan) -> list[Option]:
        """The program that starts something on another host, and its options."""
        return []

    def environment(self, plan: Plan) -> list[Option]:
        """Options by which `plan.forward` reaches ranks on other hosts: names, never values."""
        return []

    def directory(self, plan: Plan) -> list[Option]:
        """The working directory; `plan.cwd` is the launcher's own, and ranks go there, too."""
        return []

    @abstractmethod
    def binding(self, plan: Plan) -> list[Option]:
        """Which part of its host a rank may use."""

    def network(self, plan: Plan) -> list[Option]:
        """Transports and interface."""
        return []

    def exports(self, plan: Plan) -> dict[str, str]:
        """Variables that say what no option can."""
        return {}

    def carrier(self, signum: int) -> int:
        """The signal to send to the launcher so that ranks elsewhere get ``signum``."""
        return signal.SIGTERM if signum == signal.SIGHUP else signum

    def agent_words(self, plan: Plan) -> str:
        """Program and options by which hosts are reached, in one text that MPIs split at blanks.

        Raises:
            LaunchError: One of the words has a blank or a quote: no MPI can carry those.
        """
        words = [*plan.agent.program, *plan.agent.flags()]
        for word in words:
            if re.search(r"[\s'\"\\]", word) or not word:
                raise self.cannot(
                    f"a blank or quote in {word!r}", "use a script without one as --rsh-agent"
                )
        return " ".join(words[1:])

    def cannot(self, what: str, instead: str) -> LaunchError:
        """The error for something this launcher has no word for."""
        return LaunchError(f"{what} cannot be said to {self.title}; {instead}")


def unless_set(plan: Plan, exports: Mapping[str, str]) -> dict[str, str]:
    """Those of the variables which the user has not set."""
    return {name: value for name, value in exports.items() if name not in plan.environ}


def slots(plan: Plan) -> str:
    """`a:2,b:1`, with IPv6 addresses in brackets."""
    return ",".join(f"{bracketed(each.host)}:{each.ranks}" for each in plan.placement)


def own_bin_first(plan: Plan) -> dict[str, str]:
    """PATH for a launcher that finds its helpers through it."""
    own_bin = os.path.dirname(plan.mpi.launcher)
    return {"PATH": os.pathsep.join([own_bin, plan.environ.get("PATH", os.defpath)])}
