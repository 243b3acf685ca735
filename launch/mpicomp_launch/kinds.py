"""What options accept: a text for error messages, and how texts and config values are read."""

from __future__ import annotations

import math
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
    """

    contract: str
    parse: Callable[[Any], Any]
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostSection:
    """What a config file says of one host, or of a range of them (`node[01-16]`)."""

    name: str
    slots: int | None = None
    max_slots: int | None = None
    env: tuple[tuple[str, str | None], ...] = ()


def parse_whole(value: Any) -> int:
    """1 or more; a rank count of seven digits is a slip of the finger."""
    if isinstance(value, bool) or not re.fullmatch("0*[1-9][0-9]{0,5}", str(value)):
        raise ValueError
    return int(value)


def parse_number(value: Any) -> float:
    """Finite and above zero."""
    number = float("nan") if isinstance(value, bool) else float(value)
    if not 0 < number < math.inf:
        raise ValueError
    return number


def parse_text(value: Any) -> str:
    """A text without the one character that neither arguments nor variables can carry."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError
    return value


def parse_flag(value: Any) -> bool:
    """As the library reads its variables."""
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    return words[str(value).lower()]


def parse_words(value: Any) -> tuple[str, ...]:
    """One text, split as a shell would, or a list of words."""
    if isinstance(value, str):
        return tuple(shlex.split(value))
    return tuple(parse_text(word) for word in as_list(value))


def parse_hosts(value: Any) -> str:
    """A host list, or a list of them."""
    return value if isinstance(value, str) and value else ",".join(map(parse_text, as_list(value)))


def parse_env(value: Any) -> tuple[tuple[str, str | None], ...]:
    """`NAME` or `NAME=VALUE`, a list of these, or a table; a name alone means its present value."""
    if isinstance(value, Mapping):
        pairs = [(name, None if text is None else scalar(text)) for name, text in value.items()]
    else:
        words = [value] if isinstance(value, str) else as_list(value)
        pairs = [(n, text if equals else None) for n, equals, text in map(partition, words)]
    for name, text in pairs:
        if not VARIABLE_NAME.fullmatch(name) or "\0" in (text or ""):
            raise ValueError
    return tuple(pairs)


def parse_sections(value: Any) -> tuple[HostSection, ...]:
    """A table of tables: `slots`, `max_slots` and `env` of each host."""
    found = []
    for name, section in value.items():
        given = {str(key).replace("-", "_"): each for key, each in dict(section or {}).items()}
        env = parse_env(given.pop("env", {}))
        counts = {
            key: parse_whole(given.pop(key)) for key in ("slots", "max_slots") if key in given
        }
        if given:
            raise ValueError
        found.append(HostSection(parse_text(name), env=env, **counts))
    return tuple(found)


def as_list(value: Any) -> Sequence[Any]:
    """A list of a config file, not a text."""
    if not isinstance(value, (list, tuple)) or not value:
        raise TypeError
    return value


def scalar(value: Any) -> str:
    """A variable's value as a config file has it: text, number or truth value."""
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
SECTIONS = Kind("a table of hosts with slots, max_slots and env", parse_sections)
