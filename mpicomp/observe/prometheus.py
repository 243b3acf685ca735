"""The totals of rank 0 for Prometheus, which asks for them over HTTP whenever it likes."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from mpicomp.errors import MpicompError
from mpicomp.profile import Stats

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.core import CounterMetricFamily

log = logging.getLogger("mpicomp")

_LOOPBACK = "127.0.0.1"
_WHERE = re.compile(r"(?:(?P<host>[^:\[\]]+|\[[^\[\]]+\]):)?(?P<port>\d{1,5})")
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where Prometheus is answered, from `serve` to `close`."""

    server: WSGIServer
    thread: threading.Thread

    def close(self) -> None:
        """Stop listening; what was asked before is answered or dropped."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@dataclass(frozen=True, slots=True, eq=False)
class Collector:
    """Makes counters of ``stats`` at each scrape; costs nothing in between."""

    stats: Stats

    def collect(self) -> Iterator[CounterMetricFamily]:
        """One counter for each field: ``mpicomp_steps_total``, and so on."""
        from prometheus_client.core import CounterMetricFamily

        for field in fields(Stats):
            help = f"{field.name.replace('_', ' ')} of rank 0 since its start"
            value = getattr(self.stats, field.name)
            yield CounterMetricFamily(f"mpicomp_{field.name}", help, value=value)


def serve(where: str, stats: Stats) -> Endpoint:
    """Answer at ``http://HOST:PORT/metrics`` with what ``stats`` holds then.

    Args:
        where: ``PORT`` or ``HOST:PORT``; the host is 127.0.0.1 by default, an IPv6 address stands
            in brackets. Port 0 is one that is free, which is logged.
        stats: totals that others go on adding to.

    Raises:
        ValueError: ``where`` has another form.
        MpicompError: prometheus-client is missing, or the port cannot be had.
    """
    host, port = parse(where)
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise MpicompError(
            "environment: MPICOMP_PROMETHEUS must be used with the package prometheus-client, "
            "which is missing; pip install 'mpicomp[prometheus]', or unset it"
        ) from None
    registry = CollectorRegistry()
    registry.register(Collector(stats))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise MpicompError(
            "environment: MPICOMP_PROMETHEUS must be an address of this host and a port that is "
            f"free, got {where!r}: {error.strerror}; port 0 takes any that is free"
        ) from None
    address = f"[{host}]" if ":" in host else host
    say = log.info if port else log.warning  # nobody could know it otherwise
    say("mpicomp: Prometheus is answered at http://%s:%d/metrics", address, server.server_port)
    return Endpoint(server, thread)


def parse(where: str) -> tuple[str, int]:
    """Host and port of ``[HOST:]PORT``."""
    match = _WHERE.fullmatch(where)
    if match is None or int(match["port"]) > _MAX_PORT:
        raise ValueError(
            f"environment: MPICOMP_PROMETHEUS must be PORT or HOST:PORT, got {where!r}; an IPv6 "
            "address stands in brackets"
        )
    return (match["host"] or _LOOPBACK).strip("[]"), int(match["port"])
