"""Hosts and their slots: host lists, host files, and which host gets how many ranks."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mpicomp_launch.errors import LaunchError

MAX_NAMES = 100_000
# What names and IPv4 addresses have, and never first what ssh or mpirun take for an option.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
ADDRESS = re.compile(r"([0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)(?:%[A-Za-z0-9_.-]+)?")
COUNT = re.compile(r"0*[1-9][0-9]{0,5}")
# As Open MPI's host files have them, `-` and `_` being the same.
SLOT_WORDS = {
    **dict.fromkeys(("slots", "cpu", "count"), "slots"),
    **dict.fromkeys(("max_slots", "max_cpu", "max_count"), "max_slots"),
    **dict.fromkeys(("slots_max", "cpu_max", "count_max"), "max_slots"),
}


@dataclass(frozen=True)
class Host:
    """A host that was named.

    Attributes:
        name: Name or address; an IPv6 address without brackets.
        slots: Ranks it shall get.
        max_slots: Ranks it may get where the slots of all hosts are too few.
    """

    name: str
    slots: int = 1
    max_slots: int | None = None

    @property
    def limit(self) -> int:
        """The most ranks it may get."""
        return self.max_slots or self.slots


@dataclass(frozen=True)
class Placement:
    """How many ranks of a job run on a host."""

    host: str
    ranks: int


class Complaint(Exception):
    """What is wrong with a part of a text, and where it begins, from 0."""

    def __init__(self, column: int, text: str) -> None:
        super().__init__(text)
        self.column = column


def parse_hosts(text: str, what: str = "hosts") -> tuple[Host, ...]:
    """A host list: `a:4,b,node[01-16]:2,[::1]:2`. A name alone is one slot.

    Args:
        text: The list.
        what: What it is called in error messages.

    Raises:
        LaunchError: It is none; the text says at which column.
    """
    found: list[Host] = []
    with located(f"{what} {text!r}, column "):
        for column, part in split(text):
            names, slots = parse_entry(column, part)
            found += [Host(name, slots or 1) for name in names]
    return merge(found)


def read_hostfile(path: str) -> tuple[Host, ...]:
    """A file of hosts, one a line: `a`, `a:4`, `a 4`, `a slots=4 max-slots=8`, `node[01-16]:4`.

    What follows `#` is a comment. Slots of a name that comes again are added.

    Raises:
        LaunchError: The file cannot be read, or a line of it; the text says which and where.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig", errors="surrogateescape")
    except (OSError, ValueError) as error:
        raise LaunchError(f"the host file must be a readable file, got {path!r}: {error}") from None
    found: list[Host] = []
    for number, line in enumerate(text.split("\n"), 1):
        with located(f"{path}:{number}:"):
            found += parse_line(line.partition("#")[0])
    if not found:
        raise LaunchError(f"the host file must name a host, got none in {path!r}")
    return merge(found)


def expand(text: str) -> list[str]:
    """The names of a range: `node[01-03,7]` is node01, node02, node03, node7."""
    with located(f"host {text!r}, column "):
        return expand_name(0, text)


def place(hosts: Sequence[Host], np: int | None) -> tuple[Placement, ...]:
    """Ranks for each host: its slots, in order; beyond those in turn, as `max_slots` allow.

    Raises:
        LaunchError: There are more ranks than that.
    """
    left = sum(host.slots for host in hosts) if np is None else np
    most = sum(host.limit for host in hosts)
    if left > most:
        raise LaunchError(
            f"-np must be at most {most}, the slots of all hosts, got {left}; "
            f"give a host more, as in {hosts[0].name}:{hosts[0].slots + left - most}"
        )
    ranks = []
    for host in hosts:
        ranks.append(min(host.slots, left))
        left -= ranks[-1]
    while left:
        for index, host in enumerate(hosts):
            if left and ranks[index] < host.limit:
                ranks[index] += 1
                left -= 1
    return tuple(Placement(h.name, n) for h, n in zip(hosts, ranks, strict=True) if n)


def bracketed(name: str) -> str:
    """A host's name as it stands before a colon: an IPv6 address in brackets."""
    return f"[{name}]" if ":" in name else name


def merge(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Each name once, where it came first, with all its slots."""
    found: dict[str, Host] = {}
    for host in hosts:
        before = found.get(host.name)
        if before is not None:
            is_limited = before.max_slots is not None or host.max_slots is not None
            limit = before.limit + host.limit if is_limited else None
            host = Host(host.name, before.slots + host.slots, limit)
        found[host.name] = host
    return tuple(found.values())


@contextmanager
def located(place: str) -> Iterator[None]:
    """Complaints become errors that begin with the place and the column, from 1."""
    try:
        yield
    except Complaint as error:
        raise LaunchError(f"{place}{error.column + 1}: {error}") from None


def split(text: str) -> Iterator[tuple[int, str]]:
    """The parts between commas, those within brackets left alone, each with its column."""
    start, is_inside = 0, False
    for column, letter in enumerate(text):
        is_inside = letter == "[" or (is_inside and letter != "]")
        if letter == "," and not is_inside:
            yield start, text[start:column]
            start = column + 1
    yield start, text[start:]


def parse_entry(column: int, entry: str) -> tuple[list[str], int | None]:
    """Names and slots, if given, of `name`, `name:4`, `[::1]:4`, or a bare IPv6 address."""
    column += len(entry) - len(entry.lstrip())
    entry = entry.strip()
    bracketed = re.fullmatch(r"\[([^\[\]]*:[^\[\]]*)\](?::(.*))?", entry, re.DOTALL)
    if bracketed:
        names, count = [check_name(column + 1, bracketed[1])], bracketed[2]
    elif entry.count(":") > 1:
        names, count = [check_name(column, entry)], None
    else:
        name, colon, after = entry.partition(":")
        names, count = expand_name(column, name), after if colon else None
    if count is None:
        return names, None
    return names, parse_count(column + len(entry) - len(count), "slots", count)


def parse_line(line: str) -> list[Host]:
    """One line of a host file: an entry, and counts behind it, `=` with or without spaces."""
    words = list(re.finditer(r"([^\s=]+)(?:\s*(=)\s*([^\s=]*))?|=\S*", line))
    if not words:
        return []
    if "=" in words[0].group():
        raise Complaint(words[0].start(), f"a host must come first, got {words[0].group()!r}")
    names, slots = parse_entry(words[0].start(), words[0].group())
    counts = {} if slots is None else {"slots": slots}
    for word in words[1:]:
        key, text = (word[1], word[3]) if word[2] else ("slots", word.group())
        meaning = SLOT_WORDS.get(key.replace("-", "_")) if word[1] else None
        if meaning is None:
            raise Complaint(
                word.start(), f"a word must be slots=N or max-slots=N, got {word.group()!r}"
            )
        if meaning in counts:
            raise Complaint(word.start(), f"{meaning} must be given once, got {word.group()!r} too")
        counts[meaning] = parse_count(word.end() - len(text), key, text)
    slots, most = counts.get("slots", 1), counts.get("max_slots")
    if most is not None and most < slots:
        raise Complaint(words[0].start(), f"max-slots must be {slots} or more, got {most}")
    return [Host(name, slots, most) for name in names]


def expand_name(column: int, name: str) -> list[str]:
    """A name, or all names of its ranges, the last one running fastest."""
    parts = re.split(r"\[([^\[\]]*)\]", name)  # texts and what is in brackets take turns
    choices: list[list[str]] = []
    begin = column
    for index, part in enumerate(parts):
        is_range = index % 2 == 1
        if not is_range and ("[" in part or "]" in part):
            raise Complaint(begin, f"a range must be as in node[01-16,20], got {name!r}")
        choices.append(list(numbers_of(begin + 1, part)) if is_range else [part])
        begin += len(part) + 2 * is_range
    if math.prod(map(len, choices)) > MAX_NAMES:
        raise Complaint(column, f"a range must have at most {MAX_NAMES} names, got {name!r}")
    return [check_name(column, "".join(each)) for each in itertools.product(*choices)]


def numbers_of(column: int, ranges: str) -> Iterator[str]:
    """`01-03,7` is 01, 02, 03, 7."""
    left = MAX_NAMES
    for part in ranges.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
        count = int(last) - int(first) + 1
        if count < 1:
            raise Complaint(column, f"a range must be as in node[01-16,20], got {part!r}")
        left -= count
        if left < 0:
            raise Complaint(column, f"a range must have at most {MAX_NAMES} names, got {part!r}")
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}}"
        column += len(part) + 1


def check_name(column: int, name: str) -> str:
    """A name that is safe to hand to ssh and mpirun."""
    if "@" in name:
        user, _, host = name.rpartition("@")
        raise Complaint(
            column,
            f"a host must be a name alone, got {name!r}; "
            f'for the user write {host} and --ssh-args "-l {user}"',
        )
    if not name:
        raise Complaint(column, "a host must have a name, got nothing; as in a:4,b:4")
    if not (NAME.fullmatch(name) and not name.isdigit()) and not is_ipv6(name):
        raise Complaint(column, f"a host must be a name or an address, got {name!r}")
    return name


def is_ipv6(name: str) -> bool:
    """Whether a name is an IPv6 address, with or without an interface behind `%`."""
    found = ADDRESS.fullmatch(name)
    if found is None:
        return False
    import socket

    try:
        return bool(socket.inet_pton(socket.AF_INET6, found[1]))
    except OSError:
        return False


def parse_count(column: int, what: str, text: str) -> int:
    """Slots."""
    if not COUNT.fullmatch(text):
        raise Complaint(
            column, f"{what} must be a whole number, 1 or more, got {text!r}; as in a:4 or slots=4"
        )
    return int(text)
