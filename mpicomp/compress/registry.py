"""Compressors by name, and spec strings such as ``"topk:density=0.01,error_feedback=false"``."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

from .base import Compressor

C = TypeVar("C", bound=Compressor)

_METHODS: dict[str, type[Compressor]] = {}
_TRUTH = {"true": True, "false": False}
_CONTRACTS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def register(name: str) -> Callable[[type[C]], type[C]]:
    """Class decorator: make a frozen dataclass of hyper-parameters available under ``name``.

    Every field needs a default and one of the types bool, int, float and str, so that a spec
    string can set it.
    """

    def add(cls: type[C]) -> type[C]:
        if name in _METHODS:
            raise ValueError(f"register: name must be new, got {name!r}")
        hints = typing.get_type_hints(cls)
        for field in _options(cls):
            if field.default is dataclasses.MISSING or hints[field.name] not in _CONTRACTS:
                raise TypeError(
                    f"register: {name}.{field.name} must have a default and be a bool, an int, "
                    f"a float or a str, got {hints[field.name]!r}"
                )
        _METHODS[name] = cls
        return cls

    return add


def available() -> list[str]:
    """The registered names, sorted."""
    return sorted(_METHODS)


def parse(spec: str) -> Compressor:
    """The compressor that a spec string describes: ``name`` or ``name:option=value,...``.

    Raises:
        ValueError: the name, an option or a value is not valid.
    """
    name, colon, rest = spec.partition(":")
    name = name.strip()
    if name not in _METHODS:
        _fail("name", "one of " + ", ".join(available()), name, _METHODS)
    cls = _METHODS[name]
    options: dict[str, Any] = {}
    for item in rest.split(",") if colon else []:
        option, equals, text = (part.strip() for part in item.partition("="))
        valid = [field.name for field in _options(cls)]
        if option not in valid:
            contract = "one of " + ", ".join(valid) if valid else "absent, there are none"
            _fail(f"{name} option", contract, option, valid)
        if not equals or option in options:
            _fail(f"{name} option", f"{option}=<value>, once", item, ())
        options[option] = _convert(text, typing.get_type_hints(cls)[option], f"{name} {option}")
    return cls(**options)


def spec_of(compressor: Compressor) -> str:
    """The shortest spec string that `parse` turns into an equal compressor.

    Raises:
        ValueError: the compressor is of no registered kind.
    """
    cls = type(compressor)
    names = [name for name, method in _METHODS.items() if method is cls]
    if not names:
        raise ValueError(f"spec_of: compressor must be of a registered kind, got {compressor!r}")
    values = ((field, getattr(compressor, field.name)) for field in _options(cls))
    options = [f"{field.name}={_text(value)}" for field, value in values if value != field.default]
    return f"{names[0]}:{','.join(options)}" if options else names[0]


def _options(cls: type[Compressor]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)  # type: ignore[arg-type]  # registered classes are dataclasses


def _convert(text: str, kind: type, what: str) -> Any:
    try:
        value = _TRUTH[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        valid = _TRUTH if kind is bool else ()
    else:
        return value
    _fail(what, _CONTRACTS[kind], text, valid)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fail(argument: str, contract: str, got: str, valid: Iterable[str]) -> NoReturn:
    near = difflib.get_close_matches(got.lower(), list(valid), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"compression: {argument} must be {contract}, got {got!r}{hint}")
