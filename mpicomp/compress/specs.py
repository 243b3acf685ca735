"""Spec strings, such as ``"topk:density=0.01,values=int8,start_after=100"``.

The options of a method and those of the wrappers around it stand side by side: `Warmup` goes
around the method, then `Values`, `StartAfter` and `Feedback`, each if one of its options is given.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable
from typing import Any, NoReturn

from .base import Compressor
from .feedback import Feedback
from .registry import METHODS, available
from .start_after import StartAfter
from .values import Values
from .warmup import Warmup
from .wrapper import Wrapper, innermost

WRAPPERS: tuple[type[Wrapper], ...] = (Warmup, Values, StartAfter, Feedback)  # from the inside

_TRUTH = {"true": True, "false": False}
_LIST = tuple[float, ...]
CONTRACTS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    _LIST: "numbers with / between them",
}


def parse(spec: str) -> Compressor:
    """The compressor that a spec string describes: ``name`` or ``name:option=value,...``.

    Raises:
        ValueError: the name, an option or a value is not valid.
    """
    name, colon, rest = spec.partition(":")
    name = name.strip()
    if name not in METHODS:
        _fail("name", "one of " + ", ".join(available()), name, METHODS)
    method = METHODS[name]
    kinds = kinds_of(method)
    for wrapper in WRAPPERS:
        kinds |= kinds_of(wrapper)
    given: dict[str, Any] = {}
    for item in rest.split(",") if colon else []:
        option, equals, text = (part.strip() for part in item.partition("="))
        if given and option[:1].isdigit() and isinstance(last := [*given.values()][-1], tuple):
            joined = "/".join(map(str, (*last, option)))  # what was meant, not 0.25,0.1
            _fail(f"{name} {[*given][-1]}", f"{CONTRACTS[_LIST]}, as in {joined}", item, ())
        if option not in kinds:
            _fail(f"{name} option", "one of " + ", ".join(kinds), option, kinds)
        if not equals or option in given:
            _fail(f"{name} option", f"{option}=<value>, once", item, ())
        given[option] = _convert(text, kinds[option], f"{name} {option}")
    return _build(method, given)


def spec_of(compressor: Compressor) -> str:
    """The shortest spec string that `parse` turns into an equal compressor.

    Raises:
        ValueError: the compressor is of no registered kind, or its wrappers are in another order.
    """
    method = innermost(compressor)
    names = [name for name, cls in METHODS.items() if cls is type(method)]
    if not names:
        raise ValueError(f"spec_of: compressor must be of a registered kind, got {compressor!r}")
    items: list[str] = []
    layer = compressor
    while isinstance(layer, Wrapper):
        items = _items(layer) + items
        layer = layer.inner
    items = _items(method) + items
    spec = f"{names[0]}:{','.join(items)}" if items else names[0]
    if parse(spec) != compressor:
        raise ValueError(
            f"spec_of: wrappers must be in the order that a spec gives them, got {compressor!r}"
        )
    return spec


def _build(method: type[Compressor], given: dict[str, Any]) -> Compressor:
    compressor = method(**{option: given[option] for option in kinds_of(method) if option in given})
    for wrapper in WRAPPERS:
        options = {f: given[o] for f, o in wrapper.spec_options.items() if o in given}
        if not options:
            continue
        for field in _fields(wrapper):
            if field.default is dataclasses.MISSING and field.name not in options:
                here, there = (wrapper.spec_options[f] for f in (next(iter(options)), field.name))
                _fail("option", f"{here} and {there} together", here, ())
        build: Any = wrapper
        compressor = build(compressor, **options)
    return compressor


def _items(compressor: Compressor) -> list[str]:
    """What is not by default, as ``option=value``."""
    names = _spec_options(type(compressor))
    values = ((field, getattr(compressor, field.name)) for field in _fields(type(compressor)))
    return [f"{names[f.name]}={_text(value)}" for f, value in values if value != f.default]


def _fields(cls: type[Compressor]) -> list[dataclasses.Field[Any]]:
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # all are dataclasses
    return [field for field in fields if field.name in _spec_options(cls)]


def _spec_options(cls: type[Compressor]) -> dict[str, str]:
    """The name in a spec of each field that has one."""
    if issubclass(cls, Wrapper):
        return dict(cls.spec_options)
    return {f.name: f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]


def kinds_of(cls: type[Compressor]) -> dict[str, Any]:
    """The type of each option."""
    hints = typing.get_type_hints(cls)
    return {option: hints[field] for field, option in _spec_options(cls).items()}


def _convert(text: str, kind: Any, what: str) -> Any:
    try:
        if kind is bool:
            return _TRUTH[text.lower()]
        return tuple(map(float, text.split("/"))) if kind == _LIST else kind(text)
    except (KeyError, ValueError):
        _fail(what, CONTRACTS[kind], text, _TRUTH if kind is bool else ())


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fail(argument: str, contract: str, got: str, valid: Iterable[str]) -> NoReturn:
    near = difflib.get_close_matches(got.lower(), list(valid), n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"compression: {argument} must be {contract}, got {got!r}{hint}")
