"""The network around this host: which names mean it, and which way leads to another one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))
SIOCGIFADDR = 0x8915
SIOCGIFNETMASK = 0x891B
ANY_PORT = 9  # connecting a datagram socket sends nothing, it only asks for the route


@dataclass(frozen=True)
class Interface:
    """One of this host's interfaces: `eth0`, its address, and its network as in 10.0.0.0/24."""

    name: str
    address: str
    network: str


def is_here(name: str) -> bool:
    """Whether a host's name means this one."""
    own = os.uname().nodename
    if name in LOCAL_NAMES or name in (own, own.partition(".")[0]):
        return True
    address = address_of(name)
    if address is None:
        return False
    return address.startswith("127.") or address in [each.address for each in interfaces()]


def address_of(name: str) -> str | None:
    """The address of a name, None if there is none."""
    import socket

    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return None


def interface_towards(host: str) -> Interface | None:
    """The interface on the way to a host, None where that cannot be told."""
    import socket

    address = address_of(host)
    if address is None or ":" in address:
        return None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect((address, ANY_PORT))
            own = asking.getsockname()[0]
    except OSError:
        return None
    return next((each for each in interfaces() if each.address == own), None)


def interfaces() -> list[Interface]:
    """All interfaces with an IPv4 address."""
    import fcntl
    import ipaddress
    import socket
    import struct

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                address, mask = (
                    socket.inet_ntoa(fcntl.ioctl(asking, question, request)[20:24])
                    for question in (SIOCGIFADDR, SIOCGIFNETMASK)
                )
            except OSError:  # it has none
                continue
            network = ipaddress.ip_network(f"{address}/{mask}", strict=False)
            found.append(Interface(name, address, str(network)))
    return found


def has_rdma() -> bool:
    """Whether this host has a network that MPI can use better than by TCP."""
    kinds = (Path("/sys/class/infiniband"), Path("/sys/class/cxi"))
    return any(any(kind.iterdir()) for kind in kinds if kind.is_dir())
