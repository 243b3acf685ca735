"""Hosts and their slots: host lists, host files, and which host gets how many ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpicomp_launch.errors import LaunchError

MAX_NAMES = 100_000
# Letters, digits and what else names and addresses have; never first what ssh takes for an option.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.%-]*|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?")
COUNT = re.compile(r"0*[1-9][0-9]{0,5}")
SLOT_WORDS = {"slots": "slots", "max_slots": "max_slots", "max-slots": "max_slots"}


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


def parse_hosts(text: str) -> tuple[Host, ...]:
    """A host list: `a:4,b,node[01-16]:2,[::1]:2`. A name alone is one slot.

    Raises:
        LaunchError: It is none; the text says at which column.
    """
    try:
        return merge(host for column, part in split(text) for host in parse_entry(column, part))
    except Complaint as error:
        raise LaunchError(f"hosts {text!r}, column {error.column + 1}: {error}") from None


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
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found += parse_line(line.partition("#")[0])
        except Complaint as error:
            raise LaunchError(f"{path}:{number}:{error.column + 1}: {error}") from None
    if not found:
        raise LaunchError(f"the host file must name a host, got none in {path!r}")
    return merge(found)


def expand(text: str) -> list[str]:
    """The names of a range: `node[01-03,7]` is node01, node02, node03, node7."""
    try:
        return list(expand_name(0, text))
    except Complaint as error:
        raise LaunchError(f"host {text!r}: {error}") from None


def place(hosts: Sequence[Host], np: int | None) -> tuple[Placement, ...]:
    """Ranks for each host: its slots, in order; beyond those in turn, as `max_slots` allow.

    Raises:
        LaunchError: There are more ranks than slots.
    """
    total = sum(host.slots for host in hosts)
    left = total if np is None else np
    ranks = []
    for host in hosts:
        ranks.append(min(host.slots, left))
        left -= ranks[-1]
    while left:
        before = left
        for index, host in enumerate(hosts):
            if left and ranks[index] < (host.max_slots or host.slots):
                ranks[index] += 1
                left -= 1
        if left == before:
            raise LaunchError(
                f"-np must be at most the number of slots, got {np} for {np - left if np else 0}; "
                f"give hosts more slots, as in {hosts[0].name}:{hosts[0].slots + left}"
            )
    return tuple(Placement(h.name, n) for h, n in zip(hosts, ranks, strict=True) if n)


def split(text: str) -> Iterator[tuple[int, str]]:
    """The parts between commas, those within brackets left alone, each with its column."""
    start = depth = 0
    for column, letter in enumerate(text + ","):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and (depth <= 0 or column == len(text)):
            yield start, text[start:column]
            start = column + 1


def parse_entry(column: int, entry: str) -> Iterator[Host]:
    """`name`, `name:4`, `[::1]:4`, or a bare IPv6 address."""
    column += len(entry) - len(entry.lstrip())
    entry = entry.strip()
    if not entry:
        raise Complaint(column, "a host must have a name, got nothing")
    bracketed = re.fullmatch(r"\[([0-9A-Fa-f:.%\w-]*:[^\[\]]*)\](?::(.*))?", entry)
    if bracketed:
        name, count = bracketed.groups()
        names: Iterable[str] = [check_name(column + 1, name)]
    elif entry.count(":") > 1:
        name, count = entry, None
        names = [check_name(column, name)]
    else:
        name, colon, after = entry.partition(":")
        count = after if colon else None
        names = expand_name(column, name)
    slots = 1 if count is None else parse_count(column + len(entry) - len(count), "slots", count)
    for each in names:
        yield Host(each, slots)


def parse_line(line: str) -> Iterator[Host]:
    """One line of a host file: an entry, and counts behind it."""
    found = re.finditer(r"\S+(?:[ \t]*=[ \t]*\S+)?", line)
    words = [(each.start(), re.sub(r"[ \t]", "", each.group())) for each in found]
    if not words:
        return
    counts: dict[str, int] = {}
    for column, word in words[1:]:
        key, equals, text = word.partition("=")
        if not equals:
            key, text = "slots", word
        if key not in SLOT_WORDS:
            raise Complaint(column, f"a word must be slots=N or max-slots=N, got {word!r}")
        begin = column + (len(key) + 1 if equals else 0)
        counts[SLOT_WORDS[key]] = parse_count(begin, key, text)
    for host in parse_entry(*words[0]):
        yield Host(host.name, counts.get("slots", host.slots), counts.get("max_slots"))


def expand_name(column: int, name: str) -> Iterator[str]:
    """A name, or all names of a range, in order."""
    found = re.fullmatch(r"([^\[\]]*)\[([^\[\]]*)\](.*)", name, re.DOTALL)
    if found is None:
        yield check_name(column, name)
        return
    head, ranges, tail = found.groups()
    numbers = list(numbers_of(column + len(head) + 1, ranges))
    tails = list(expand_name(0, "x" + tail))
    if len(numbers) * len(tails) > MAX_NAMES:
        raise Complaint(column, f"a range must have at most {MAX_NAMES} names, got more")
    for number in numbers:
        for rest in tails:
            yield check_name(column, head + number + rest[1:])


def numbers_of(column: int, ranges: str) -> Iterator[str]:
    """`01-03,7` is 01, 02, 03, 7."""
    for part in ranges.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part, re.ASCII)
        first, last = found.groups() if found else ("", "")
        if found is None or int(last or first) < int(first):
            raise Complaint(column, f"a range must be as in [01-16,20], got {part!r}")
        if int(last or first) - int(first) >= MAX_NAMES:
            raise Complaint(column, f"a range must have at most {MAX_NAMES} names, got {part!r}")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}}"
        column += len(part) + 1


def check_name(column: int, name: str) -> str:
    """A name that is safe to hand to ssh and mpirun."""
    if "@" in name:
        user, _, host = name.partition("@")
        raise Complaint(
            column,
            f"a host must be a name alone, got {name!r}; "
            f"for the user write {host} and --ssh-args '-l {user}'",
        )
    if not NAME.fullmatch(name):
        raise Complaint(column, f"a host must be a name or an address, got {name!r}")
    return name


def parse_count(column: int, what: str, text: str) -> int:
    """Slots."""
    if not COUNT.fullmatch(text):
        raise Complaint(column, f"{what} must be a whole number, 1 or more, got {text!r}")
    return int(text)


def merge(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Each name once, where it came first, with all its slots."""
    found: dict[str, Host] = {}
    for host in hosts:
        if host.name in found:
            before = found[host.name]
            most = [m for m in (before.max_slots, host.max_slots) if m is not None]
            host = Host(host.name, before.slots + host.slots, sum(most) if most else None)
        found[host.name] = host
    return tuple(found.values())
