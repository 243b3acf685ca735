"""Which compressor each parameter gets, from what the user passed as ``compression``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch

from .base import Compressor
from .dense import NoCompression
from .feedback import with_feedback
from .registry import METHODS
from .specs import CONTRACTS, kinds_of, parse
from .wrapper import innermost

Method: TypeAlias = Compressor | str | None
Compression: TypeAlias = Method | Mapping[str, Method]
Rules: TypeAlias = tuple[tuple[str, Compressor], ...]  # (pattern, compressor), first match wins


def resolve(compression: Compression) -> Rules:
    """The rules that an argument stands for, each compressor with its feedback around it.

    Args:
        compression: None or ``"none"``, a spec string, a compressor, or a mapping from patterns
            of parameter names (as in `fnmatch`) to any of these.

    Raises:
        ValueError: a spec string is not valid, or a pattern comes after ``"*"``.
        TypeError: the argument is of another type.
    """
    if not isinstance(compression, Mapping):
        return (("*", _method(compression)),)
    patterns = list(compression)
    if "*" in patterns[:-1]:
        late = patterns[patterns.index("*") + 1]
        raise ValueError(
            f"compression: patterns must come before '*', got {late!r} after it; the first "
            "match wins, so put '*' last"
        )
    return tuple((pattern, _method(method)) for pattern, method in compression.items())


def alone(compression: Compression) -> dict[str, Compressor]:
    """The rules for a single rank: nothing is compressed, momentum is applied where it was."""
    return {
        pattern: method.uncompressed() or NoCompression()
        for pattern, method in resolve(compression)
    }


def assign(
    compression: Compression, entries: Iterable[tuple[str, tuple[int, ...], torch.dtype]]
) -> dict[str, Compressor]:
    """The compressor of every parameter, by name; equal ones may share a bucket.

    Tensors that a method does not help, and those that are not real floating-point numbers, go
    without compression.

    Args:
        compression: as for `resolve`.
        entries: name, shape and dtype of each parameter.

    Raises:
        ValueError: a pattern matches no parameter, or a parameter is matched by no pattern.
    """
    rules = resolve(compression)
    params = list(entries)
    if isinstance(compression, Mapping) and params:
        for pattern, _ in rules:
            if not any(fnmatchcase(name, pattern) for name, _, _ in params):
                names = ", ".join(repr(name) for name, _, _ in params[:5])
                raise ValueError(
                    f"compression: every pattern must match a parameter, got {pattern!r}; "
                    f"the parameters are called {names}{', ...' if len(params) > 5 else ''} "
                    "(pass model= to DistributedOptimizer for the names in the model)"
                )
    return {name: _effective(_match(rules, name), shape, dtype) for name, shape, dtype in params}


def _method(method: object) -> Compressor:
    if method is None:
        return NoCompression()
    if isinstance(method, str):
        return with_feedback(parse(method))
    if isinstance(method, Compressor):
        _check_types(method)
        return with_feedback(method)
    hint = f"; did you mean {method.__name__}()?" if isinstance(method, type) else ""
    raise TypeError(
        "compression: argument must be None, a spec string, a compressor or a mapping from "
        f"patterns to these, got {method!r}{hint}"
    )


def _check_types(compressor: Compressor) -> None:
    """Raise unless the options of a registered method have the types that a spec gives them."""
    method = innermost(compressor)
    if type(method) not in METHODS.values():
        return
    for option, kind in kinds_of(type(method)).items():
        value = getattr(method, option)
        number = kind is float and type(value) is int
        if type(value) is not kind and not number:
            raise TypeError(
                f"compression: {type(method).__name__}.{option} must be {CONTRACTS[kind]}, "
                f"got {value!r}"
            )


def _match(rules: Rules, name: str) -> Compressor:
    for pattern, compressor in rules:
        if fnmatchcase(name, pattern):
            return compressor
    raise ValueError(
        f"compression: every parameter must match a pattern, got {name!r}; add a last "
        "pattern '*', for example {'*': 'none'}"
    )


def _effective(compressor: Compressor, shape: tuple[int, ...], dtype: torch.dtype) -> Compressor:
    return compressor if dtype.is_floating_point and compressor.helps(shape) else NoCompression()
