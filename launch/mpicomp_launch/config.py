"""Config files, TOML or YAML: the options of the schema, with line and column of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpicomp_launch import toml_positions
from mpicomp_launch.errors import LaunchError
from mpicomp_launch.options import FIELDS
from mpicomp_launch.resolve import Value, convert, nearest

INCLUDE = "include"
SECTION_KEYS = ("slots", "max_slots", "env")

Path_ = tuple[str, ...]  # of keys, from the top


@dataclass(frozen=True)
class Document:
    """A file that was read: its values, and where each key stands, as `file:line:column`."""

    values: Mapping[str, Any]
    where: Callable[[Path_], str]


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
    found: dict[str, Value] = {}
    own: dict[str, Value] = {}
    for key, value in document.values.items():
        origin = document.where((key,))
        name = str(key).replace("-", "_")
        if name == INCLUDE:
            for each in value if isinstance(value, list) else [value]:
                found |= read(beside(path, each, origin), chain)
        elif name in own:
            raise LaunchError(f"{origin}: {name} must be given once, got it twice")
        elif name in FIELDS:
            own[name] = convert_key(name, value, document, path, key)
        else:
            known = [*FIELDS, INCLUDE]
            raise LaunchError(f"{origin}: {key} is not an option{nearest(name, known)}")
    return found | own


def convert_key(name: str, value: Any, document: Document, path: str, key: str) -> Value:
    """One option; errors within a host's section name the place in it."""
    if name == "host" and isinstance(value, Mapping):
        for host, section in value.items():
            for inner in section if isinstance(section, Mapping) else ():
                if str(inner).replace("-", "_") not in SECTION_KEYS:
                    raise LaunchError(
                        f"{document.where((key, host, inner))}: {inner} is not a setting of a host"
                        f"{nearest(str(inner), SECTION_KEYS)}"
                    )
    found = convert(name, value, document.where((key,)))
    if FIELDS[name].metadata["is_input"]:
        return Value(beside(path, found.value, found.origin), found.origin)
    return found


def beside(path: str, name: Any, origin: str) -> str:
    """A file's name as seen from the file that names it."""
    if not isinstance(name, str) or "\0" in name:
        raise LaunchError(f"{origin}: a file must be given by its name, got {name!r}")
    return os.path.join(os.path.dirname(path), name)


def parse(path: str) -> Document:
    """Reads a file by its suffix."""
    readers = {".toml": parse_toml, ".yaml": parse_yaml, ".yml": parse_yaml}
    suffix = os.path.splitext(path)[1]
    if suffix not in readers:
        raise LaunchError(f"a config file must be .toml, .yaml or .yml, got {path!r}")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise LaunchError(f"a config file must be a readable text, got {path}: {error}") from None
    return readers[suffix](path, text)


def parse_toml(path: str, text: str) -> Document:
    """TOML; its parser tells positions of mistakes only."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise LaunchError(f"{path}: {error}") from None
    positions = toml_positions.locate(text)

    def where(keys: Path_) -> str:
        line, column = positions.get(keys, (1, 1))
        return f"{path}:{line}:{column}"

    return Document(values, where)


def parse_yaml(path: str, text: str) -> Document:
    """YAML without tags of any language; a key that comes twice is a mistake."""
    try:
        import yaml
    except ImportError:
        raise LaunchError(
            f"{path}: YAML needs PyYAML; run `pip install pyyaml`, or write TOML"
        ) from None
    positions: dict[Path_, tuple[int, int]] = {}

    def note(node: Any, keys: Path_) -> None:
        """Notes the place of each key, down to those of a host."""
        if not isinstance(node, yaml.MappingNode) or len(keys) > len(SECTION_KEYS):
            return
        for key, value in node.value:
            inner = (*keys, str(key.value))
            mark = key.start_mark
            if inner in positions:
                at = f"{path}:{mark.line + 1}:{mark.column + 1}"
                raise LaunchError(f"{at}: {key.value} must be given once, got it twice")
            positions[inner] = (mark.line + 1, mark.column + 1)
            note(value, inner)

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        note(node, ())
        values = loader.construct_document(node) if node is not None else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise LaunchError(f"{at}: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, AttributeError) as error:
        raise LaunchError(f"{path}: {error}") from None
    if not isinstance(values, Mapping):
        raise LaunchError(
            f"{path}:1:1: a config file must be a table of options, got another thing"
        )

    def where(keys: Path_) -> str:
        line, column = positions.get(tuple(map(str, keys)), (1, 1))
        return f"{path}:{line}:{column}"

    return Document(values, where)
