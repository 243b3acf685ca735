"""All-reduce across hosts by messages straight between ranks, several pieces at a time.

Of each piece every rank owns a segment: partial results travel around a ring until the owner has
its segment from all, and results go around once more. A rank sends 2 (n - 1) / n of the bytes, and
hears from one other rank alone: where many send to one at a time, a link drops what does not fit.
Floats of 16 bits go to the owner directly, to be rounded once. While one piece is combined, others
keep the network busy. MPI's own non-blocking all-reduce works on one piece at a time, and some send
every byte to every rank.

Reference: P. Patarasuk and X. Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of
Workstations", Journal of Parallel and Distributed Computing, 2009.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from mpi4py import MPI
from torch import Tensor

from mpicomp.comm.buffers import HALVES, pieces, raw
from mpicomp.comm.node import Combine, reduce_rows
from mpicomp.comm.waiting import Task, until

MOST_RANKS = 16  # the rounds grow with the ranks
PIECE_BYTES = 4 << 20
_AT_ONCE = 4  # pieces under way: they cover the delays of the network and of looking at it
_TAGS = 1 << 15  # as many as the standard promises


def reduce_(comm: MPI.Comm, flat: Tensor, combine: Combine, scale: float | None) -> Task[None]:
    """``flat`` (n,) becomes the combination over ranks times ``scale``, in place."""
    length = PIECE_BYTES // flat.element_size()
    slices = enumerate(pieces(flat.numel(), length))
    tasks = (_reduce_piece(comm, flat[piece], combine, scale, number) for number, piece in slices)
    return side_by_side(tasks, limit=_AT_ONCE)


def side_by_side(tasks: Iterator[Task[None]], *, limit: int) -> Task[None]:
    """Run ``tasks``, as many as ``limit`` of them at a time; they begin in order."""
    live: list[Task[None]] = []
    while live := [*live, *itertools.islice(tasks, limit - len(live))]:
        live = [task for task in live if next(task, _OVER) is not _OVER]
        yield


_OVER = object()


def _reduce_piece(
    comm: MPI.Comm, flat: Tensor, combine: Combine, scale: float | None, number: int
) -> Task[None]:
    tag = number % _TAGS  # pieces may finish in another order on another rank
    segments = flat.tensor_split(comm.size)
    if flat.dtype in HALVES:
        yield from _send_to_owners(comm, segments, combine, scale, tag)
    else:
        yield from _combine_around(comm, segments, combine, scale, tag)
    for step in range(comm.size - 1):
        outgoing, incoming = (segments[(comm.rank - step - i) % comm.size] for i in (0, 1))
        yield from _pass_on(comm, outgoing, incoming, tag)


def _combine_around(
    comm: MPI.Comm, segments: Sequence[Tensor], combine: Combine, scale: float | None, tag: int
) -> Task[None]:
    """Every rank adds what it has to what comes around, and ends with its own segment."""
    for step in range(1, comm.size):
        outgoing, own = (segments[(comm.rank - step - i) % comm.size] for i in (0, 1))
        partial = torch.empty_like(own)
        yield from _pass_on(comm, outgoing, partial, tag)
        if own.numel() > 0:
            reduce_rows([own, partial], [own], combine, scale if step == comm.size - 1 else None)


def _send_to_owners(
    comm: MPI.Comm, segments: Sequence[Tensor], combine: Combine, scale: float | None, tag: int
) -> Task[None]:
    """As `_combine_around`, in one round: partial sums of 16 bits would be rounded every time."""
    own = segments[comm.rank]
    rows = [own if rank == comm.rank else torch.empty_like(own) for rank in range(comm.size)]
    others = [(comm.rank + shift) % comm.size for shift in range(1, comm.size)]
    requests = [comm.Irecv(raw(rows[rank]), rank, tag) for rank in others]
    requests += [comm.Isend(raw(segments[rank]), rank, tag) for rank in others]
    for request in requests:
        yield from until(request)
    if own.numel() > 0:
        reduce_rows(rows, [own], combine, scale)


def _pass_on(comm: MPI.Comm, outgoing: Tensor, incoming: Tensor, tag: int) -> Task[None]:
    """Send to the next rank while receiving from the one before."""
    behind, ahead = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for request in [comm.Irecv(raw(incoming), behind, tag), comm.Isend(raw(outgoing), ahead, tag)]:
        yield from until(request)
