"""TOML and YAML texts: their values, and where each key stands."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpicomp_launch.errors import LaunchError
from mpicomp_launch.toml_positions import Positions, locate

NOTED_DEPTH = 4  # host, its name, env, a variable
VALUE_TAGS = ("int", "float", "timestamp")


@dataclass(frozen=True)
class Document:
    """A file that was read.

    Attributes:
        path: The file.
        values: What it says.
        positions: Line and column of its keys, by the keys that lead to each.
    """

    path: str
    values: Mapping[Any, Any]
    positions: Positions

    def where(self, *keys: object) -> str:
        """`file:line:column` of a key."""
        line, column = self.positions.get(tuple(map(str, keys)), (1, 1))
        return f"{self.path}:{line}:{column}"


def parse(path: str) -> Document:
    """Reads a file by its suffix.

    Raises:
        LaunchError: It cannot be read, or is not what its suffix says.
    """
    readers = {".toml": parse_toml, ".yaml": parse_yaml, ".yml": parse_yaml}
    suffix = os.path.splitext(path)[1]
    if suffix not in readers:
        raise LaunchError(f"a config file must be .toml, .yaml or .yml, got {path!r}")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise LaunchError(f"a config file must be a readable text, got {path}: {error}") from None
    try:
        return readers[suffix](path, text)
    except RecursionError:
        raise LaunchError(f"{path}: a config file must not be nested so deeply") from None


def parse_toml(path: str, text: str) -> Document:
    """TOML; its parser tells positions of mistakes only, and those in English."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        values = tomllib.loads(text)
    except ValueError as error:
        found = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", str(error), re.DOTALL)
        at = f"{path}:{found[2]}:{found[3]}: {found[1]}" if found else f"{path}: {error}"
        raise LaunchError(at) from None

    def unquote(word: str) -> str:
        return str(tomllib.loads(f"a = {word}")["a"])

    return Document(path, values, locate(text, unquote))


def parse_yaml(path: str, text: str) -> Document:
    """YAML without tags of any language; a key that comes twice is a mistake."""
    try:
        import yaml
    except ImportError:
        raise LaunchError(
            f"{path}: YAML needs PyYAML; run `pip install pyyaml`, or write TOML"
        ) from None
    positions: Positions = {}
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        for keys, mark, value in entries(node, ()):
            if keys in positions:
                at = f"{path}:{mark.line + 1}:{mark.column + 1}"
                raise LaunchError(f"{at}: {keys[-1]} must be given once, got it twice")
            positions[keys] = (mark.line + 1, mark.column + 1)
            if keys[-2:-1] == ("env",) and is_number(value):
                value.tag = "tag:yaml.org,2002:str"  # a variable's value is what was written
        values = loader.construct_document(node) if node is not None else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise LaunchError(f"{at}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise LaunchError(f"{path}: a value must be what its tag says, got {error}") from None
    if not isinstance(values, Mapping):
        raise LaunchError(f"{path}:1:1: a config file must be a table of options")
    return Document(path, values, positions)


def entries(node: Any, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """The keys that lead to each entry of a YAML table, its place, and its value."""
    if getattr(node, "id", "") != "mapping" or len(above) == NOTED_DEPTH:
        return
    for key, value in node.value:
        inner = (*above, str(key.value))
        yield inner, key.start_mark, value
        yield from entries(value, inner)


def is_number(node: Any) -> bool:
    """Whether YAML takes a word for a number or a date."""
    return node.id == "scalar" and node.tag.rpartition(":")[2] in VALUE_TAGS
