"""What ranks print: whole lines, each with the rank it comes from, and a file for each rank."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import BinaryIO

from mpicomp_launch.errors import LaunchError

COLOURS = (36, 33, 32, 35, 34, 31)  # cyan, yellow, green, magenta, blue, red
CLEAR_LINE = b"\r\x1b[K"


class Printer:
    """Writes lines of many ranks to two streams and to files.

    Methods raise OSError, once for each stream, when nobody reads it or its disk is full.

    On a terminal the last line can be a passing one: the state of the start, or of a rank's
    progress bar. Whatever is printed takes its place.
    """

    def __init__(
        self,
        out: BinaryIO,
        err: BinaryIO,
        *,
        tag: str = "none",
        num_ranks: int = 1,
        timestamps: bool = False,
        directory: str | None = None,
    ) -> None:
        self._streams = {"o": out, "e": err}
        self._tag = tag
        self._width = len(str(num_ranks - 1))
        self._timestamps = timestamps
        self._directory = Path(directory) if directory else None
        self._files: dict[int, BinaryIO] = {}
        if self._directory is not None:
            make_writable(self._directory)
        self._pieces: dict[tuple[int, str], bytes] = {}
        self._passing = b""
        self._terminal = err if err.isatty() else None
        self._coloured = {
            kind: stream.isatty() and not os.environ.get("NO_COLOR")
            for kind, stream in self._streams.items()
        }

    def line(self, rank: int, host: str, stream: str, text: bytes) -> None:
        """A line of a rank, without its end; what was held back of it comes first."""
        text = self._pieces.pop((rank, stream), b"") + text
        self._write_file(rank, text + b"\n")
        if self._tag == "none":
            self._write(stream, text + b"\n")
        else:
            shown = text.rstrip(b"\r").rpartition(b"\r")[2]  # what a terminal would have left of it
            self._write(stream, self._prefix(rank, host, stream) + shown + b"\n")

    def piece(self, rank: int, host: str, stream: str, text: bytes) -> None:
        """A part of a line whose end has not come yet, such as a progress bar."""
        if self._tag == "none":
            self._write_file(rank, text)
            self._write(stream, text)
            return
        whole = self._pieces.get((rank, stream), b"") + text
        self._pieces[rank, stream] = whole
        if self._terminal and b"\r" in whole:
            shown = whole.rstrip(b"\r").rpartition(b"\r")[2]
            self.pass_by(self._prefix(rank, host, "e") + shown)

    def say(self, text: str) -> None:
        """A line of the launcher itself."""
        self.plain(f"mpicomp-launch: {text}".encode(errors="surrogateescape"))

    def plain(self, text: bytes) -> None:
        """A line of nobody in particular, on the second stream."""
        self._write("e", text + b"\n")

    def pass_by(self, text: bytes) -> None:
        """Shows a passing line on a terminal, an empty one to take it away."""
        if self._terminal is not None and text != self._passing:
            self._passing = text
            self._terminal.write(CLEAR_LINE + text)
            self._terminal.flush()

    def close(self) -> None:
        """Writes what ranks left without an end, and closes the files."""
        for (rank, stream), text in list(self._pieces.items()):
            if text:
                self.line(rank, "", stream, b"")
        self.pass_by(b"")
        for file in self._files.values():
            file.close()

    def _prefix(self, rank: int, host: str, stream: str) -> bytes:
        where = f"{host}:" if self._tag == "host:rank" else ""
        tag = f"[{where}{rank:>{self._width}}]"
        if self._coloured[stream]:
            tag = f"\x1b[{COLOURS[rank % len(COLOURS)]}m{tag}\x1b[0m"
        return f"{self._time()}{tag} ".encode()

    def _time(self) -> str:
        if not self._timestamps:
            return ""
        now = time.time()
        return time.strftime("%H:%M:%S", time.localtime(now)) + f".{int(now * 1000) % 1000:03} "

    def _write(self, stream: str, data: bytes) -> None:
        if self._passing and self._terminal is not None:
            self._passing = b""
            self._terminal.write(CLEAR_LINE)
            self._terminal.flush()
        try:
            self._streams[stream].write(data)
            self._streams[stream].flush()
        except OSError:
            self._close_stream(stream)
            raise

    def _close_stream(self, stream: str) -> None:
        """Drops what cannot be written, or Python would try again at its end."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._streams[stream].fileno())
        os.close(null)

    def _write_file(self, rank: int, data: bytes) -> None:
        if self._directory is None:
            return
        if rank not in self._files:
            path = self._directory / f"rank-{rank:0{self._width}}.log"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            self._files[rank] = os.fdopen(descriptor, "wb", buffering=0)
        self._files[rank].write(data)


def make_writable(directory: Path) -> None:
    """Finds out now, not after hours, that nothing can be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise LaunchError(
            f"--output-dir must be a directory that can be written, got {str(directory)!r}: "
            f"{error.strerror}"
        ) from None
