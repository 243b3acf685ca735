"""Who wins: command line, then `MPICOMP_*` variables, then config files, then the defaults."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mpicomp_launch.errors import LaunchError
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
    """Takes each option from the first source that has it.

    Options that repeat (`env`, `mpi_args`, `ssh_args`) are joined over all sources, the strongest
    last, so that it wins where an order decides.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, field in FIELDS.items():
        given = [source[name] for source in sources if name in source]
        if not given:
            continue
        if field.metadata["repeats"]:
            values[name] = sum((each.value for each in reversed(given)), ())
            origins[name] = ", ".join(each.origin for each in reversed(given))
        else:
            values[name], origins[name] = given[0].value, given[0].origin
    return Resolved(Options(**values), origins)


def convert(name: str, value: Any, origin: str) -> Value:
    """A value of an option as somebody has given it.

    Raises:
        LaunchError: It is not what the option accepts; the text begins with the origin.
    """
    kind = FIELDS[name].metadata["kind"]
    try:
        return Value(kind.parse(value), origin)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        named = flag_of(name) if origin == COMMAND_LINE else f"{origin}: {name}"
        raise LaunchError(f"{named} must be {kind.contract}, got {reprlib.repr(value)}") from None


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
