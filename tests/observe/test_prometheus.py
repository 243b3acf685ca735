from __future__ import annotations

import dataclasses
import logging
import re
import socket
import sys
import urllib.error
import urllib.request

import pytest

from mpicomp.errors import MpicompError
from mpicomp.observe import prometheus
from mpicomp.profile import Stats

pytest.importorskip("prometheus_client")


@pytest.fixture
def serve():
    endpoints = []

    def start(where, stats=None):
        endpoints.append(prometheus.serve(where, Stats() if stats is None else stats))
        return endpoints[-1]

    yield start
    for endpoint in endpoints:
        endpoint.close()


def scrape(port, host="127.0.0.1"):
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def values(text):
    return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE)}


def test_every_total_is_a_counter_and_is_read_when_asked(serve):
    numbers = {field.name: 1.5 * i for i, field in enumerate(dataclasses.fields(Stats))}
    stats = Stats(**numbers)
    port = serve("0", stats).server.server_port
    text = scrape(port)
    assert values(text) == {f"mpicomp_{name}_total": value for name, value in numbers.items()}
    assert text.count("# TYPE") == text.count(" counter\n") == len(numbers)
    assert "# HELP mpicomp_bytes_sent_total bytes sent of rank 0 since its start\n" in text
    stats.steps += 7
    assert values(scrape(port))["mpicomp_steps_total"] == numbers["steps"] + 7


def test_port_0_says_which_and_a_given_port_does_not(serve, caplog):
    caplog.set_level(logging.WARNING, "mpicomp")
    port = serve("0").server.server_port
    assert caplog.messages == [
        f"mpicomp: Prometheus is answered at http://127.0.0.1:{port}/metrics"
    ]
    caplog.clear()
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()[1]
    assert serve(f"localhost:{free}").server.server_port == free
    assert caplog.messages == []


def test_it_listens_on_loopback_until_it_is_closed():
    endpoint = prometheus.serve("0", Stats())
    host, port = endpoint.server.server_address[:2]
    assert host == "127.0.0.1"
    scrape(port)
    endpoint.close()
    with pytest.raises(urllib.error.URLError):
        scrape(port)
    again = prometheus.serve(str(port), Stats())  # at once
    again.close()


def test_ipv6(serve):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6")
    assert "mpicomp_steps_total" in scrape(serve("[::1]:0").server.server_port, "[::1]")


@pytest.mark.parametrize(
    ("where", "host", "port"),
    [
        ("9100", "127.0.0.1", 9100),
        ("0.0.0.0:0", "0.0.0.0", 0),
        ("node-1.example:65535", "node-1.example", 65535),
        ("[fd00::1]:80", "fd00::1", 80),
    ],
)
def test_addresses(where, host, port):
    assert prometheus.parse(where) == (host, port)


@pytest.mark.parametrize(
    "where", ["x", "", ":80", "-1", "65536", "1.5", "host:", "host:http", "::1:80", "[]:80", "8 0"]
)
def test_addresses_that_are_none(where):
    with pytest.raises(ValueError, match="MPICOMP_PROMETHEUS must be PORT or HOST:PORT, got "):
        prometheus.serve(where, Stats())


def test_a_port_that_is_taken_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(MpicompError) as caught:
            prometheus.serve(str(port), Stats())
    assert str(caught.value) == (
        "environment: MPICOMP_PROMETHEUS must be an address of this host and a port that is free, "
        f"got '{port}': Address already in use; port 0 takes any that is free"
    )


@pytest.mark.parametrize("where", ["192.0.2.1:0", "no-such-host.invalid:0"])
def test_an_address_of_another_host_is_an_error(where):
    with pytest.raises(MpicompError, match=f"must be an address of this host .* got '{where}'"):
        prometheus.serve(where, Stats())


def test_the_package_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MpicompError, match=r"prometheus-client.*mpicomp\[prometheus\]"):
        prometheus.serve("0", Stats())
