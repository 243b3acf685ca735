"""Config files, TOML or YAML: the options of the schema, with line and column of each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from mpicomp_launch.documents import Document, parse
from mpicomp_launch.errors import LaunchError
from mpicomp_launch.kinds import SECTION_KINDS
from mpicomp_launch.options import FIELDS
from mpicomp_launch.resolve import Value, accept, convert, nearest, shown, stack

INCLUDE = "include"
SECTIONS = "host"


def read(path: str, including: tuple[str, ...] = ()) -> dict[str, Value]:
    """The options of a file, those of the files it includes among them; its own win.

    Raises:
        LaunchError: The file cannot be read, a key is unknown, or a value will not do; the text
            begins with file, line and column.
    """
    chain = (*including, path)
    if os.path.realpath(path) in map(os.path.realpath, including):
        raise LaunchError(f"a config file must not include itself, got {' -> '.join(chain)}")
    document = parse(path)
    included: list[dict[str, Value]] = []
    own: dict[str, Value] = {}
    for name, key, value in named(document.values, document, (), (*FIELDS, INCLUDE), "an option"):
        if name == INCLUDE:
            for each in value if isinstance(value, list) else [value]:
                included.append(read(beside(path, each, document.where(key)), chain))
            continue
        if name == SECTIONS and isinstance(value, Mapping):
            check_sections(value, document, key)
        own[name] = convert(name, value, document.where(key))
        if FIELDS[name].metadata["is_input"]:
            own[name] = Value(beside(path, own[name].value, own[name].origin), own[name].origin)
    return stack(own, *reversed(included))


def named(
    table: Mapping[Any, Any],
    document: Document,
    above: tuple[object, ...],
    known: tuple[str, ...],
    what: str,
) -> Iterator[tuple[str, str, Any]]:
    """Name, key as it is written, and value of each entry; `-` in a key is as good as `_`."""
    found = set()
    for key, value in table.items():
        at = document.where(*above, key)
        name = str(key).replace("-", "_")
        if name not in known:
            text = key if str(key).isprintable() else repr(key)
            raise LaunchError(f"{at}: {text} is not {what}{nearest(name, known)}")
        if name in found:
            raise LaunchError(f"{at}: {name} must be given once, got it twice")
        found.add(name)
        yield name, key, value


def check_sections(sections: Mapping[Any, Any], document: Document, top: str) -> None:
    """Errors within the section of a host name the place in it."""
    for host, section in sections.items():
        if isinstance(section, Mapping):
            above = (top, host)
            keys = named(section, document, above, tuple(SECTION_KINDS), "a setting of a host")
            for name, key, value in keys:
                accept(SECTION_KINDS[name], value, f"{document.where(*above, key)}: {name}")


def beside(path: str, name: Any, origin: str) -> str:
    """A file's name as seen from the file that names it."""
    if not isinstance(name, str) or "\0" in name:
        raise LaunchError(f"{origin}: a file must be given by its name, got {shown(name)}")
    return os.path.join(os.path.dirname(path), name)
