"""The peer in several benchmarks: torch.distributed with Gloo, in the same processes."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist

import mpicomp


def start_gloo() -> None:
    """Put the ranks into a torch process group, over loopback."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with socket.create_server(("localhost", 0)) as free:
        port = mpicomp.broadcast_object(free.getsockname()[1])
    where = f"tcp://localhost:{port}"
    rank, size = mpicomp.rank(), mpicomp.size()
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
