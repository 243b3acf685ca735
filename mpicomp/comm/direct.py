"""All-reduce across hosts by messages straight between ranks, several pieces at a time.

Of each piece every rank owns a segment: it receives that segment from all others, combines them in
rank order, and sends the result to all. A rank sends 2 (n - 1) / n of the bytes, as in a ring, in
two rounds; while one piece is combined, others keep the network busy. MPI's own non-blocking
all-reduce works on one piece at a time, and some send every byte to every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from mpi4py import MPI
from torch import Tensor

from mpicomp.comm.buffers import pieces, raw
from mpicomp.comm.node import Combine, reduce_rows
from mpicomp.comm.waiting import Task, until

MOST_RANKS = 16  # each exchanges messages with all others
PIECE_BYTES = 2 << 20
_AT_ONCE = 8  # pieces under way: they cover the delays of the network and of looking at it
_TAGS = 1 << 14  # the standard promises twice as many


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
    tag = 2 * number % _TAGS  # pieces may finish in another order on another rank
    segments = flat.tensor_split(comm.size)
    own = segments[comm.rank]
    rows = [own if rank == comm.rank else torch.empty_like(own) for rank in range(comm.size)]
    yield from _swap(comm, list(segments), rows, tag)
    if own.numel() > 0:
        reduce_rows(rows, [own], combine, scale)
    yield from _swap(comm, [own] * comm.size, list(segments), tag + 1)


def _swap(comm: MPI.Comm, outgoing: list[Tensor], incoming: list[Tensor], tag: int) -> Task[None]:
    """Send ``outgoing[r]`` to rank r and receive ``incoming[r]`` from it, this rank left out."""
    others = [(comm.rank + shift) % comm.size for shift in range(1, comm.size)]
    requests = [comm.Irecv(raw(incoming[rank]), rank, tag) for rank in others]
    requests += [comm.Isend(raw(outgoing[rank]), rank, tag) for rank in others]
    for request in requests:
        yield from until(request)
