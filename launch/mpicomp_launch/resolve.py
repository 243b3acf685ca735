"""Who wins: command line, then `MPICOMP_*` variables, then config files, then the defaults."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mpicomp_launch.errors import LaunchError
from mpicomp_launch.kinds import Kind
from mpicomp_launch.options import FIELDS, Options, flag_of, variable_of

PREFIX = "MPICOMP_"
COMMAND_LINE = "command line"
CONFIG_VARIABLE = "MPICOMP_LAUNCH_CONFIG"


@dataclass(frozen=True)
class Value:
    """The value of an option, and where it came from: "command line", "cluster.yaml:3:5" ..."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Resolved:
    """The options of a job, and where each came from that is not a default."""

    options: Options
    origins: Mapping[str, str]

    def lines(self) -> Iterator[str]:
        """Each option that has a value, and where it came from."""
        for name in FIELDS:
            value = getattr(self.options, name)
            if value not in (None, ()):
                yield f"{name} = {value!r}  ({self.origins.get(name, 'default')})"


def resolve(*sources: Mapping[str, Value]) -> Resolved:
    """The options that several sources give, the strongest first."""
    values = stack(*sources)
    return Resolved(
        Options(**{name: each.value for name, each in values.items()}),
        {name: each.origin for name, each in values.items()},
    )


def stack(*sources: Mapping[str, Value]) -> dict[str, Value]:
    """Takes each option from the first source that has it.

    Options that repeat (`env`, `host`, `mpi_args`, `ssh_args`) are joined over all sources, the
    strongest last, so that it wins where an order decides.
    """
    values = {}
    for name, field in FIELDS.items():
        given = [source[name] for source in reversed(sources) if name in source]
        if given and field.metadata["repeats"]:
            value = functools.reduce(field.metadata["kind"].join, [each.value for each in given])
            values[name] = Value(value, ", ".join(dict.fromkeys(each.origin for each in given)))
        elif given:
            values[name] = given[-1]
    return values


def convert(name: str, value: Any, origin: str) -> Value:
    """A value of an option as somebody has given it.

    Raises:
        LaunchError: It is not what the option accepts; the text begins with the origin.
    """
    named = flag_of(name) if origin == COMMAND_LINE else f"{origin}: {name}"
    return Value(accept(FIELDS[name].metadata["kind"], value, named), origin)


def accept(kind: Kind, value: Any, named: str) -> Any:
    """The value as the kind has it; an error begins with `named`."""
    try:
        return kind.parse(value)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise LaunchError(f"{named} must be {kind.contract}, got {shown(value)}") from None


def shown(value: Any) -> str:
    """A value for an error message: not more of it than can be read."""
    short = reprlib.Repr()
    short.maxlevel = 2
    try:
        return short.repr(value)
    except ValueError:  # Python prints no number of more than 4300 digits
        return "a number that is too long"


def from_environment(environ: Mapping[str, str], others: Iterable[str]) -> dict[str, Value]:
    """The options which `MPICOMP_*` variables set; an empty one counts as one that is not set.

    Args:
        others: Variables with that prefix which are no options.

    Raises:
        LaunchError: A variable with our prefix is none of ours, or its value will not do.
    """
    options = {variable_of(name): name for name in FIELDS}
    known = [*options, CONFIG_VARIABLE, *others]
    values = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        if variable not in known:
            raise LaunchError(f"environment: {variable} is not a setting{nearest(variable, known)}")
        if text and variable in options:
            name = options[variable]
            values[name] = convert(name, text, variable)
    return values


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, if something is near."""
    import difflib  # for mistakes only

    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""
