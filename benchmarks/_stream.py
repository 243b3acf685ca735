"""One TCP stream between two hosts, timed where it arrives: `receive`, or `send ADDRESS PORT`.

The receiver prints its port, and later bits per second.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time

WARM_SECONDS = 0.25  # bursts that a limit lets through, and TCP's slow start
SECONDS = 1.0
CHUNK = 1 << 20
PATIENCE_SECONDS = 30


def receive() -> None:
    """Takes all that comes, and counts it for a second."""
    with socket.create_server(("", 0)) as server:
        server.settimeout(PATIENCE_SECONDS)
        print(server.getsockname()[1], flush=True)
        stream, _ = server.accept()
    with stream:
        stream.settimeout(PATIENCE_SECONDS)
        rate_of(stream, WARM_SECONDS)
        print(rate_of(stream, SECONDS), flush=True)


def rate_of(stream: socket.socket, seconds: float) -> float:
    """Bits per second that arrive in this time."""
    buffer = bytearray(CHUNK)
    count = 0
    started = now = time.perf_counter()
    while now - started < seconds:
        count += stream.recv_into(buffer)
        now = time.perf_counter()
    return 8 * count / (now - started)


def send(address: str, port: int) -> None:
    """Sends until the receiver has seen enough."""
    chunk = bytes(CHUNK)
    with socket.create_connection((address, port)) as stream, contextlib.suppress(ConnectionError):
        while True:
            stream.send(chunk)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive()
    else:
        send(sys.argv[2], int(sys.argv[3]))
