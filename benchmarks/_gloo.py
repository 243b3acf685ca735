"""The peer in several benchmarks: torch.distributed with Gloo, in the same processes."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist

import mpicomp
from mpicomp_launch import network

LOOPBACK = network.Interface("lo", "127.0.0.1", "127.0.0.0/8")


def start_gloo() -> None:
    """Put the ranks into a torch process group: over loopback, or the network between their hosts.

    The variable ``GLOO_SOCKET_IFNAME`` names another interface; without it each rank takes its way
    to another host.
    """
    where, rank, size = meeting_point(), mpicomp.rank(), mpicomp.size()
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)


def meeting_point() -> str:
    """Where rank 0 will listen for the others; every rank then names its interface to Gloo."""
    interface = interface_to_use()
    os.environ["GLOO_SOCKET_IFNAME"] = interface.name
    with socket.create_server((interface.address, 0)) as free:
        own = f"{interface.address}:{free.getsockname()[1]}"
    return f"tcp://{mpicomp.broadcast_object(own)}"


def interface_to_use() -> network.Interface:
    """The interface of this rank by which all others reach it."""
    names = mpicomp.allgather_object(os.uname().nodename)
    others = [name for name in names if name != os.uname().nodename]
    wanted = os.environ.get("GLOO_SOCKET_IFNAME")
    if wanted is not None:
        found = [each for each in network.interfaces() if each.name == wanted]
    elif others:
        way = network.interface_towards(others[0])
        found = [] if way is None else [way]
    else:
        found = [LOOPBACK]
    for each in found:
        if "." in each.address:
            return each
    raise ValueError(
        "start_gloo: GLOO_SOCKET_IFNAME must name an interface with an IPv4 address by which "
        f"other hosts reach this one, got {wanted}; see `ip -br address`"
    )
