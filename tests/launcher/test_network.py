"""Which names mean this host, and which way leads to others: here, and in a network made for it."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp_launch import network
from mpicomp_launch.network import Interface

NAMESPACE = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]
# Two interfaces, one with a second address; one that stands alone; a router behind it; IPv6.
LINKS = """
ip link set lo up
for name in docker0 eth0 wg0; do
  ip link add $name type veth peer name $name-end; ip link set $name-end up
  ip link set $name addrgenmode none up
done
ip addr add 172.17.0.1/16 dev docker0
ip addr add 10.99.7.1/24 dev eth0; ip addr add 10.99.7.9/24 dev eth0
ip addr add 10.99.8.1/23 dev eth0
ip addr add fd00:99::1/64 dev eth0 nodad
ip addr add fe80::7/64 dev eth0 nodad
ip addr add 10.50.0.1/32 dev wg0
ip route add 10.60.0.0/16 via 10.99.7.254; ip route add 10.50.0.0/24 dev wg0 src 10.50.0.1
"""
ASK = """
import json, sys
from dataclasses import astuple
from mpicomp_launch import network
ways = {name: network.interface_towards(name) for name in sys.argv[1:]}
shared = [
    ["10.99.7.2"], ["10.99.7.2", "10.99.7.3"], ["10.99.7.2", "10.99.9.2"], ["10.60.0.1"],
    ["10.50.0.2"], ["fd00:99::2"], ["10.99.7.2", "none.invalid"], [],
]
print(json.dumps({
    "here": [name for name in sys.argv[1:] if network.is_here(name)],
    "ways": {name: way and astuple(way) for name, way in ways.items()},
    "shared": [found and found.network for found in map(network.shared_network, shared)],
    "all": [astuple(each) for each in network.interfaces()],
}))
"""
HERE = ["127.0.0.1", "127.0.0.7", "::1", "10.99.7.1", "10.99.7.9", "10.99.8.1", "fd00:99::1"]
HERE += ["172.17.0.1", "10.50.0.1", "fd00:99:0::0:1", "fe80::7%eth0"]
WAYS = {
    "10.99.7.2": ["eth0", "10.99.7.1", "10.99.7.0/24"],
    "10.99.9.2": ["eth0", "10.99.8.1", "10.99.8.0/23"],
    "10.60.0.1": ["eth0", "10.99.7.1", "10.99.7.0/24"],
    "10.50.0.2": ["wg0", "10.50.0.1", "10.50.0.1/32"],
    "172.17.3.4": ["docker0", "172.17.0.1", "172.17.0.0/16"],
    "fd00:99::2": ["eth0", "fd00:99::1", "fd00:99::/64"],
    "fe80::8%eth0": ["eth0", "fe80::7", "fe80::/64"],
    "fd00:98::2": None,
    "10.70.0.1": None,
    "none.invalid": None,
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What is found in a network namespace with the links above."""
    if not all(shutil.which(name) for name in ("unshare", "ip", "sh")):
        pytest.skip("no unshare and ip")
    if subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("network namespaces are not allowed here")
    made = subprocess.run([*NAMESPACE, "sh", "-ec", LINKS], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no such links here: {made.stderr}")
    launch = os.path.dirname(os.path.dirname(network.__file__))
    ask = [sys.executable, "-c", ASK, *HERE, *WAYS]
    ran = subprocess.run(
        [*NAMESPACE, "sh", "-ec", LINKS + 'exec "$@"', "sh", *ask],
        env={**os.environ, "PYTHONPATH": launch},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stderr == ""
    return json.loads(ran.stdout)


def test_own_addresses(said):
    assert said["here"] == HERE
    assert ["lo", "127.0.0.1", "127.0.0.0/8"] in said["all"]
    assert ["eth0", "10.99.7.9", "10.99.7.0/24"] in said["all"]


@pytest.mark.parametrize("name", WAYS)
def test_ways(said, name):
    assert said["ways"][name] == WAYS[name]


def test_shared_networks(said):
    one = "10.99.7.0/24"
    assert said["shared"] == [one, one, None, None, None, None, None, None]


def test_names_of_this_host():
    own = socket.gethostname()
    for name in ("localhost", "LOCALHOST", "127.0.0.1", "127.1.2.3", own, own.upper()):
        assert network.is_here(name)
    assert network.is_here(own.partition(".")[0])
    for name in ("192.0.2.1", "none.invalid", "", ".", "x" * 300, "a..b", "2001:db8::1", "0.0.0.0"):
        assert not network.is_here(name)


def test_the_way_to_this_host():
    assert network.interface_towards("127.0.0.1") == Interface("lo", "127.0.0.1", "127.0.0.0/8")
    assert network.interface_towards("none.invalid") is None
    names = {name for _, name in socket.if_nameindex()}
    assert {each.name for each in network.interfaces()} <= names


def test_what_the_kernel_does_not_tell(monkeypatch):
    gone = (socket.AF_INET, 8, 999_999, b"1234")
    monkeypatch.setattr(network, "address_table", lambda: iter([gone]))
    assert network.interfaces() == []
    monkeypatch.undo()
    monkeypatch.setattr(socket, "AF_NETLINK", 999)
    assert network.interfaces() == []
    assert network.interface_towards("127.0.0.1") is None
    assert network.is_here("127.0.0.1")


def test_rdma(tmp_path, monkeypatch):
    ib, cxi = tmp_path / "infiniband", tmp_path / "cxi"
    monkeypatch.setattr(network, "RDMA", (ib, cxi))
    assert not network.has_rdma()
    ib.mkdir()
    assert not network.has_rdma()
    (ib / "mlx5_0").mkdir()
    assert network.has_rdma()


@given(st.binary(max_size=64))
@settings(deadline=None)
def test_any_attributes(data):
    assert all(len(value) <= len(data) for value in network.attributes(data).values())
