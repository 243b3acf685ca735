"""Writes the options of a job as a config file, with what each means as a comment."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from mpicomp_launch.errors import LaunchError
from mpicomp_launch.kinds import SECTION_KINDS, HostSection
from mpicomp_launch.options import FIELDS
from mpicomp_launch.resolve import Resolved

ASSIGN = {".toml": " = ", ".yaml": ": ", ".yml": ": "}


def write(path: str, resolved: Resolved) -> None:
    """Writes a new file that only the user can read.

    Raises:
        LaunchError: The suffix is none of ours, the file exists, or cannot be written.
    """
    suffix = os.path.splitext(path)[1]
    if suffix not in ASSIGN:
        raise LaunchError(f"--write-config must name a .toml, .yaml or .yml file, got {path!r}")
    text = render(seen_from(os.path.dirname(path), resolved), suffix)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise LaunchError(
            f"--write-config must name a file that can be made, got {path!r}: {error.strerror}"
        ) from None
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def seen_from(directory: str, resolved: Resolved) -> Resolved:
    """With relative names of files that options read as seen from the new file's directory."""
    options = resolved.options
    for name, field in FIELDS.items():
        file = getattr(options, name)
        if field.metadata["is_input"] and file is not None and not os.path.isabs(file):
            real = os.path.realpath(directory)  # `..` leads out of it, not out of a link to it
            changed: dict[str, Any] = {name: os.path.relpath(file, real)}
            options = replace(options, **changed)
    return replace(resolved, options=options)


def render(resolved: Resolved, suffix: str) -> str:
    """The text: what was given as it is, and what was not as a comment with its default."""
    lines = ["# Options of mpicomp-launch. The command line and MPICOMP_* variables win over them."]
    assign = ASSIGN[suffix]
    for name, field in FIELDS.items():
        if name == "host":
            continue
        origin = resolved.origins.get(name, "")
        place = origin if origin.isprintable() else repr(origin)  # it must stay one line
        lines += ["", f"# {field.metadata['help']}" + (f" (from {place})" if origin else "")]
        value = getattr(resolved.options, name)
        given = "" if origin else "# "
        shown = render_value(value) if origin or value not in (None, ()) else ""
        lines.append(f"{given}{name}{assign}{shown}".rstrip())
    if resolved.options.host:
        lines += ["", f"# {FIELDS['host'].metadata['help']}", *render_sections(resolved, suffix)]
    return "\n".join(lines) + "\n"


def render_sections(resolved: Resolved, suffix: str) -> list[str]:
    """The sections of hosts, which end a file: in TOML all that follows belongs to the last."""
    is_toml = suffix == ".toml"
    lines = [] if is_toml else ["host:"]
    for section in resolved.options.host:
        lines.append(f"[host.{quote(section.name)}]" if is_toml else f"  {quote(section.name)}:")
        pairs = [
            f"{key}{ASSIGN[suffix]}{render_value(value)}"
            for key, value in section_values(section).items()
        ]
        lines += pairs if is_toml else [f"    {pair}" for pair in pairs]
    return lines


def section_values(section: HostSection) -> dict[str, Any]:
    """What a section says."""
    values = {key: getattr(section, key) for key in SECTION_KINDS}
    return {key: value for key, value in values.items() if value not in (None, ())}


def render_value(value: Any) -> str:
    """A value in the syntax that both kinds of file have in common."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return quote(value)
    words = [
        word if isinstance(word, str) else word[0] if word[1] is None else "=".join(word)
        for word in value
    ]
    return "[" + ", ".join(map(quote, words)) + "]"


def quote(text: str) -> str:
    """A double-quoted text, in printable ASCII."""
    return '"' + "".join(map(escape, text)) + '"'


def escape(letter: str) -> str:
    """One letter of it."""
    code = ord(letter)
    if 0xD800 <= code < 0xE000:
        raise LaunchError("a config file must hold Unicode texts, got bytes that are none")
    if letter in '"\\':
        return "\\" + letter
    if 0x20 <= code < 0x7F:
        return letter
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
