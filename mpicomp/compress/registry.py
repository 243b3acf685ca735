"""Compressors by name."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import TypeVar

from .base import Compressor

C = TypeVar("C", bound=Compressor)

METHODS: dict[str, type[Compressor]] = {}


def register(name: str) -> Callable[[type[C]], type[C]]:
    """Class decorator: make a frozen dataclass of hyper-parameters available under ``name``.

    Every field needs a default and one of the types bool, int, float and str, so that a spec
    string can set it.
    """

    def add(cls: type[C]) -> type[C]:
        if name in METHODS:
            raise ValueError(f"register: name must be new, got {name!r}")
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # it is a dataclass
            missing = field.default is dataclasses.MISSING
            if missing or hints[field.name] not in (bool, int, float, str):
                raise TypeError(
                    f"register: {name}.{field.name} must have a default and be a bool, an int, "
                    f"a float or a str, got {hints[field.name]!r}"
                )
        METHODS[name] = cls
        return cls

    return add


def available() -> list[str]:
    """The registered names, sorted."""
    return sorted(METHODS)
