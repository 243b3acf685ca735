"""The two levels of a cluster: ranks of one host, and hosts."""

from __future__ import annotations

from collections.abc import Iterator

from mpi4py import MPI

from mpicomp.comm.communicator import Communicator


def levels(communicator: Communicator) -> Iterator[Communicator | None]:
    """Collective: first the ranks of the first host, then the first ranks of all hosts.

    Each communicator is freed when the next is asked for; ranks that are not in it get None.
    """
    local = communicator.local
    leaders = communicator.comm.Split(
        0 if local.rank == 0 else MPI.UNDEFINED, key=communicator.rank
    )
    place = leaders.rank if leaders != MPI.COMM_NULL else -1
    within = Communicator(local, shared_memory=communicator.node is not None)
    yield within if local.bcast(place) == 0 else None
    within.free()
    if leaders == MPI.COMM_NULL:
        yield None
        return
    across = Communicator(leaders, shared_memory=False)
    yield across
    across.free()
    leaders.Free()


def library() -> str:
    """Name and version of the MPI in use, on one line."""
    return MPI.Get_library_version().split("\n")[0].strip("\0 ")
