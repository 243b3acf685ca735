"""The user's command: is it a Python program, and where does its own command line begin?"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpicomp_launch import rank
from mpicomp_launch.errors import LaunchError

PYTHON_NAME = re.compile(r"(python|pypy)[\d.]*t?")
OPTIONS_THAT_EXIT = frozenset(("-h", "-?", "-V", "-VV", "--version", "--help", "--help-all"))


@dataclass(frozen=True)
class UserCommand:
    """A command line, taken apart.

    Attributes:
        program: Absolute path of the executable.
        options: The interpreter's own options, if it is a Python program run by us.
        arguments: The script, `-m module` or `-c code`, and all that follows.
        is_python: Whether the program is a Python, which then runs `worker.py` itself.
    """

    program: str
    options: tuple[str, ...]
    arguments: tuple[str, ...]
    is_python: bool

    def argv(self) -> list[str]:
        """What a rank executes. mpirun takes a lone `:` as its own, whence the escape."""
        words = self.arguments if self.is_python else ("--exec", self.program, *self.arguments)
        worker = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
        return [self.python, *self.options, worker, *map(rank.escape, words)]

    @property
    def python(self) -> str:
        """The Python that runs the worker: the program itself, or the launcher's own."""
        return self.program if self.is_python else sys.executable


def parse(words: Sequence[str], environ: Mapping[str, str]) -> UserCommand:
    """Takes a command line apart.

    Raises:
        LaunchError: There is no such program or script, or nothing a rank could run.
    """
    if not words:
        raise LaunchError(
            "COMMAND must be given after the options, got nothing; "
            "as in `mpicomp-launch -np 2 python train.py`"
        )
    program = find_program(words[0], environ)
    rest = tuple(words[1:])
    if PYTHON_NAME.fullmatch(os.path.basename(program)):
        options, arguments = split_python(rest)
        if not set(options) & OPTIONS_THAT_EXIT:
            check_target(arguments)
            return UserCommand(program, options, arguments, is_python=True)
    return UserCommand(program, (), rest, is_python=False)


def find_program(name: str, environ: Mapping[str, str]) -> str:
    """The absolute path of a program; `python` is this launcher's own if PATH has none."""
    path = shutil.which(name, path=environ.get("PATH", os.defpath))
    if path:
        return os.path.abspath(path)
    if name in ("python", "python3"):
        return sys.executable
    if os.path.isfile(name):
        hint = f"write `python {name}`" if name.endswith(".py") else f"try `chmod +x {name}`"
        raise LaunchError(f"COMMAND must be executable, got {name!r}; {hint}")
    raise LaunchError(
        f"COMMAND must be a program on PATH or a path to one, got {name!r}; "
        "options of the launcher stand before it, those of the program behind it"
    )


def split_python(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Splits what follows `python` into the interpreter's options and what it shall run.

    `-um module` becomes `-u` and `-m module`: the worker knows one form only.
    """
    options: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        target = re.fullmatch(r"-([^-WXcm]*)([cm])(.*)", word, re.DOTALL)
        if target:
            flags, kind, value = target.groups()
            options += [f"-{flags}"] if flags else []
            return tuple(options), (f"-{kind}", *([value] if value else []), *rest)
        options.append(word)
        if rest and re.fullmatch(r"-[^-WXcm]*[WX]|--check-hash-based-pycs", word):
            options.append(rest.pop(0))
    return tuple(options), tuple(rest)


def check_target(arguments: Sequence[str]) -> None:
    """Complains now about a missing script, once, rather than later on every rank."""
    if not arguments or arguments[0] == "-" or arguments in (("-m",), ("-c",)):
        got = " ".join(arguments) or "nothing"
        raise LaunchError(
            f"a Python command must name a script, `-m module` or `-c code`, got {got}; "
            "ranks have no standard input to read a program from"
        )
    if arguments[0] not in ("-m", "-c") and not os.path.exists(arguments[0]):
        raise LaunchError(
            f"the script must be a file, got {arguments[0]!r}, which is not in {os.getcwd()}"
        )
