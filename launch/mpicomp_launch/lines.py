"""One stream of a rank as frames."""

from __future__ import annotations

import time
from collections.abc import Iterator

from mpicomp_launch import frames

MAX_LINE_BYTES = 4096  # of which a longer one is passed on in pieces
PIECE_SECONDS = 0.05  # after which the beginning of a line is passed on without its end


class Lines:
    """One stream of the rank, cut into lines, and into pieces where a line does not end."""

    def __init__(self, rank: int, kind: str) -> None:
        self._rank = rank
        self._kind = kind
        self._rest = b""
        self._since = 0.0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Frames of the lines that are complete."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = self._rest + lines[0]
            self._rest = b""
        if not self._rest:
            self._since = time.monotonic()
        self._rest += rest
        for line in lines:
            yield from frames.encode_long(self._rank, self._kind, line)
        if len(self._rest) > MAX_LINE_BYTES:
            yield from self.take_piece()

    def seconds_to_piece(self) -> float | None:
        """When the beginning of a line is due, None if there is none."""
        return self._since + PIECE_SECONDS - time.monotonic() if self._rest else None

    def take_piece(self) -> Iterator[bytes]:
        """Frames of a line that has not ended yet."""
        rest, self._rest = self._rest, b""
        for start in range(0, len(rest), frames.MAX_PAYLOAD):
            piece = rest[start : start + frames.MAX_PAYLOAD]
            yield frames.encode(self._rank, self._kind.upper(), piece)
