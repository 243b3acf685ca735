"""The network around this host: which names mean it, and which way leads to another one."""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANY_PORT = 9  # connecting a datagram socket sends nothing, it only asks for the route
NETLINK_SECONDS = 2.0
RDMA = (Path("/sys/class/infiniband"), Path("/sys/class/cxi"))
# Of rtnetlink(7), which has all addresses of all interfaces, and both families.
RTM_NEWADDR, RTM_GETADDR = 20, 22
NLM_F_REQUEST_DUMP = 0x301
IFA_ADDRESS, IFA_LOCAL = 1, 2
HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
ADDRESS = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, index
ATTRIBUTE = struct.Struct("=HH")  # length, type


@dataclass(frozen=True)
class Interface:
    """One of this host's interfaces: `eth0`, its address, and its network as in 10.0.0.0/24."""

    name: str
    address: str
    network: str


def is_here(name: str) -> bool:
    """Whether a host's name means this one."""
    own = os.uname().nodename.lower()
    if name.lower() in ("localhost", own, own.partition(".")[0]):
        return True
    ours = {each.address for each in interfaces()}
    return any(
        address.startswith("127.") or address in ours for _, address, _ in addresses_of(name)
    )


def interface_towards(host: str) -> Interface | None:
    """The interface on the way to a host, by IPv4 if there is one; None where it is not known."""
    for family, _, target in addresses_of(host):
        source = source_towards(family, target)
        found = next((each for each in interfaces() if each.address == source), None)
        if found is not None:
            return found
    return None


def shared_network(hosts: Iterable[str]) -> Interface | None:
    """Our interface to the one IPv4 network which all these hosts are in; None if there is none.

    Where a router is between them, or addresses stand alone (10.0.0.5/32, as some clouds have it),
    the other hosts have no interface in the network that is ours.
    """
    import ipaddress
    import socket

    found: Interface | None = None
    for host in hosts:
        way = interface_towards(host)
        if way is None or found not in (None, way):
            return None
        network = ipaddress.ip_network(way.network)
        theirs = [each for family, each, _ in addresses_of(host) if family == socket.AF_INET]
        if not any(ipaddress.ip_address(each) in network for each in theirs):
            return None
        found = way
    return found


def has_rdma() -> bool:
    """Whether this host has a network that MPI can use better than by TCP."""
    return any(any(kind.iterdir()) for kind in RDMA if kind.is_dir())


@functools.cache  # a launch asks several times for each of its hosts
def addresses_of(name: str) -> list[tuple[int, str, Any]]:
    """Family, address and socket address of all that a name stands for, IPv4 first."""
    import socket

    try:
        found = socket.getaddrinfo(name, ANY_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    found.sort(key=lambda each: each[0] != socket.AF_INET)
    return [(family, address_in(target), target) for family, _, _, _, target in found]


def source_towards(family: int, target: Any) -> str | None:
    """The address which packets to a target come from."""
    import socket

    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect(target)
            return address_in(asking.getsockname())
    except OSError:
        return None


def address_in(target: Any) -> str:
    """The address in a socket address, without the interface of a link-local one."""
    return str(target[0]).partition("%")[0]


def interfaces() -> list[Interface]:
    """All addresses of all interfaces; empty where the kernel does not tell."""
    import ipaddress
    import socket

    found = []
    try:
        for family, prefix, index, packed in address_table():
            address = socket.inet_ntop(family, packed)
            network = ipaddress.ip_network(f"{address}/{prefix}", strict=False)
            found.append(Interface(socket.if_indextoname(index), address, str(network)))
    except OSError:  # an interface has just gone, or the kernel has no netlink
        return found
    return found


def address_table() -> Iterator[tuple[int, int, int, bytes]]:
    """Family, prefix length, interface's index and address, of each that the kernel has."""
    import socket

    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as asking:
        asking.settimeout(NETLINK_SECONDS)
        size = HEADER.size + ADDRESS.size
        question = HEADER.pack(size, RTM_GETADDR, NLM_F_REQUEST_DUMP, 1, 0)
        asking.send(question + ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
        kind = RTM_NEWADDR
        while kind == RTM_NEWADDR:
            answer = asking.recv(65536)
            while answer:
                length, kind, *_ = HEADER.unpack_from(answer)
                if kind != RTM_NEWADDR:
                    break
                family, prefix, _, _, index = ADDRESS.unpack_from(answer, HEADER.size)
                found = attributes(answer[size:length])
                packed = found.get(IFA_LOCAL) or found.get(IFA_ADDRESS)
                if packed and family in (socket.AF_INET, socket.AF_INET6):
                    yield family, prefix, index, packed
                answer = answer[aligned(length) :]


def attributes(data: bytes) -> dict[int, bytes]:
    """The values of a netlink message by type."""
    found = {}
    while len(data) >= ATTRIBUTE.size:
        length, kind = ATTRIBUTE.unpack_from(data)
        found[kind] = data[ATTRIBUTE.size : length]
        data = data[max(aligned(length), ATTRIBUTE.size) :]
    return found


def aligned(length: int) -> int:
    """Netlink's parts begin at multiples of four."""
    return (length + 3) & ~3
