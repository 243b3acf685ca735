"""What options accept: a text for error messages, and how texts and config values are read."""

from __future__ import annotations

import math
import operator
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Kind:
    """What an option accepts.

    Attributes:
        contract: What is wanted, for error messages: "must be <contract>".
        parse: From a text, or from a value of a config file, to the value of the field; raises
            ValueError or TypeError for anything else.
        names: The words to choose from, if it is a choice.
        join: A weaker and a stronger value of an option that repeats, in one.
    """

    contract: str
    parse: Callable[[Any], Any]
    names: tuple[str, ...] = ()
    join: Callable[[Any, Any], Any] = operator.add


@dataclass(frozen=True)
class HostSection:
    """What a config file says of one host, or of a range of them (`node[01-16]`)."""

    name: str
    slots: int | None = None
    max_slots: int | None = None
    env: tuple[tuple[str, str | None], ...] = ()


def parse_whole(value: Any) -> int:
    """1 or more; a rank count of seven digits is a slip of the finger."""
    if not re.fullmatch("0*[1-9][0-9]{0,5}", scalar(value)) or isinstance(value, bool):
        raise ValueError
    return int(value)


def parse_number(value: Any) -> float:
    """Finite and above zero."""
    number = float("nan") if isinstance(value, bool) else float(value)
    if not 0 < number < math.inf:
        raise ValueError
    return number


def parse_text(value: Any) -> str:
    """A text that says something."""
    if not value:
        raise ValueError
    return carried(value)


def carried(value: Any) -> str:
    """A text that arguments and variables can carry: no NUL, no half of a character."""
    if not isinstance(value, str) or "\0" in value:
        raise ValueError
    os.fsencode(value)
    return value


def parse_flag(value: Any) -> bool:
    """As the library reads its variables."""
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    return words[scalar(value).lower()]


def parse_words(value: Any) -> tuple[str, ...]:
    """One text, split as a shell would, or a list of words."""
    words = shlex.split(value) if isinstance(value, str) else as_list(value)
    return tuple(map(carried, words))


def parse_hosts(value: Any) -> str:
    """A host list, or a list of them."""
    return parse_text(
        value if isinstance(value, str) else ",".join(map(parse_text, as_list(value)))
    )


def parse_env(value: Any) -> tuple[tuple[str, str | None], ...]:
    """`NAME` or `NAME=VALUE`, a list of these, or a table; a name alone means its present value."""
    if isinstance(value, Mapping):
        pairs = [(name, None if text is None else scalar(text)) for name, text in value.items()]
    else:
        words = [value] if isinstance(value, str) else as_list(value)
        pairs = [(n, text if equals else None) for n, equals, text in map(partition, words)]
    for name, text in pairs:
        if not VARIABLE_NAME.fullmatch(name):
            raise ValueError
        carried(text or "")
    return tuple(pairs)


def parse_sections(value: Any) -> tuple[HostSection, ...]:
    """A table of tables: `slots`, `max_slots` and `env` of each host."""
    found = []
    for name, section in value.items():
        given = {str(key).replace("-", "_"): each for key, each in dict(section or {}).items()}
        settings = {key: SECTION_KINDS[key].parse(each) for key, each in given.items()}
        found.append(HostSection(parse_text(name), **settings))
    return tuple(found)


def join_sections(
    weaker: Sequence[HostSection], stronger: Sequence[HostSection]
) -> tuple[HostSection, ...]:
    """One section for each name, by what both say of it."""
    found = {section.name: section for section in weaker}
    for section in stronger:
        before = found.get(section.name, HostSection(section.name))
        found[section.name] = HostSection(
            section.name,
            section.slots or before.slots,
            section.max_slots or before.max_slots,
            before.env + section.env,
        )
    return tuple(found.values())


def as_list(value: Any) -> Sequence[Any]:
    """A list of a config file, not a text."""
    if not isinstance(value, (list, tuple)):
        raise TypeError
    return value


def scalar(value: Any) -> str:
    """The text of a single value: a text, a number or a truth value, but no list."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if not isinstance(value, (str, int, float)):
        raise TypeError
    return str(value)


def number_text(value: float) -> str:
    """A number as a text that reads back the same, without an idle `.0`."""
    return repr(value).removesuffix(".0")


def partition(word: Any) -> tuple[str, str, str]:
    """`NAME=VALUE` at its first `=`."""
    return parse_text(word).partition("=")


def choice(*names: str) -> Kind:
    """One of a few words."""

    def parse(value: Any) -> str:
        if value not in names:
            raise ValueError
        return str(value)

    return Kind(" or ".join([", ".join(names[:-1]), names[-1]]), parse, names)


WHOLE = Kind("a whole number, 1 or more", parse_whole)
NUMBER = Kind("a number above 0", parse_number)
TEXT = Kind("a text", parse_text)
FLAG = Kind("true or false", parse_flag)
WORDS = Kind("words, quoted as for a shell", parse_words)
HOSTS = Kind("a host list as in a:4,b:4", parse_hosts)
ENV = Kind("NAME or NAME=VALUE", parse_env)
SECTION_KINDS = {"slots": WHOLE, "max_slots": WHOLE, "env": ENV}
SECTIONS = Kind(
    "a table of hosts with slots, max_slots and env", parse_sections, join=join_sections
)
