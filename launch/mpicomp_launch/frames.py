r"""The lines by which ranks talk to the launcher, through the MPI's own forwarding of output.

A frame is one line, `\x1e<rank> <kind> <payload>`, of at most `MAX_FRAME` bytes. Lines that are no
frames come from the MPI's launcher itself.

| kind | payload |
|---|---|
| `o`, `e` | a line of standard output or error, without its end |
| `O`, `E` | a piece of such a line |
| `s` | the rank has started: JSON with `host`, `pid`, `python` |
| `f` | it has failed: JSON with `status` and `text` |
| `F` | a piece of such a record |
| `x` | it has ended: JSON with `status`, `signal`, and whether it was `stopped` from outside |
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

# Set by a launcher that reads frames; a command copied from --dry-run has none to hear it.
LISTENED_TO = "MPICOMP_FRAMES"
MARK = b"\x1e"
MAX_FRAME = 1024
MAX_PAYLOAD = 480  # every byte of it may need two

_ESCAPES = {b"\x1d": b"\x1dd", b"\x1e": b"\x1de", b"\n": b"\x1dn"}
_UNESCAPES = {escaped: plain for plain, escaped in _ESCAPES.items()}
_FRAME = re.compile(rb"(\d{1,9}) ([oeOEsfFx]) (.*)", re.DOTALL)


class Frame(NamedTuple):
    """What a rank says, in one line."""

    rank: int
    kind: str
    payload: bytes


def encode(rank: int, kind: str, payload: bytes) -> bytes:
    """A frame as bytes; the payload is at most `MAX_PAYLOAD` long."""
    escaped = re.sub(rb"[\x1d\x1e\n]", lambda found: _ESCAPES[found.group()], payload)
    return b"%s%d %s %s\n" % (MARK, rank, kind.encode(), escaped)


def encode_long(rank: int, kind: str, payload: bytes) -> Iterator[bytes]:
    """Frames for a payload of any length: pieces, whose kind is in capitals, and the end."""
    for start in range(0, len(payload) - MAX_PAYLOAD, MAX_PAYLOAD):
        yield encode(rank, kind.upper(), payload[start : start + MAX_PAYLOAD])
    rest = len(payload) % MAX_PAYLOAD or min(len(payload), MAX_PAYLOAD)
    yield encode(rank, kind, payload[len(payload) - rest :])


class Decoder:
    """Takes a stream apart into frames and lines that are none."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Frame | bytes]:
        """What is complete with these bytes; the last line waits for its end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield from decode(line)

    def flush(self) -> Iterator[Frame | bytes]:
        """The last line, if the stream ended without a line's end."""
        rest, self._rest = self._rest, b""
        if rest:
            yield from decode(rest)


def decode(line: bytes) -> Iterator[Frame | bytes]:
    """One line: a frame, a text, or a text that a frame was appended to.

    No frame has a second mark in it, so that what stands before the last one is text.
    """
    before, mark, frame = line.rpartition(MARK)
    found = _FRAME.fullmatch(frame) if mark else None
    if found is None:
        yield line
        return
    if before:
        yield before
    rank, kind, payload = found.groups()
    payload = re.sub(rb"\x1d[den]", lambda escaped: _UNESCAPES[escaped.group()], payload)
    yield Frame(int(rank), kind.decode(), payload)
