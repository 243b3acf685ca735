"""Sums of float16 and bfloat16, for which MPI has no portable type.

Each rank receives one segment from everybody, adds it up in float32 in rank order, scales, rounds
once, and hands the result round. The bytes on the wire are those of a ring all-reduce in 16 bits;
the error is that of one rounding, where a reduction in 16 bits rounds at every hop.
"""

from __future__ import annotations

import torch
from mpi4py import MPI
from torch import Tensor

from mpicomp.comm.buffers import Buffer, memory
from mpicomp.comm.node import reduce_rows
from mpicomp.comm.waiting import Task, until


def sum_(comm: MPI.Comm, flat: Tensor, scale: float | None) -> Task[None]:
    """``flat`` (n,) becomes the sum over ranks times ``scale``, in place."""
    segment = -(-flat.numel() // comm.size)
    outgoing = flat.new_zeros(comm.size, segment)
    outgoing.view(-1)[: flat.numel()].copy_(flat)
    incoming = torch.empty_like(outgoing)
    yield from until(comm.Ialltoall(_rows(outgoing), _rows(incoming)))
    reduce_rows(list(incoming), [outgoing[comm.rank]], torch.add, scale)
    yield from until(comm.Iallgather(MPI.IN_PLACE, _rows(outgoing)))
    flat.copy_(outgoing.view(-1)[: flat.numel()])


def _rows(table: Tensor) -> Buffer:
    """``table`` (ranks, segment) as bytes; for these calls the count is that of one rank."""
    return [memory(table), table[0].numel() * table.element_size(), MPI.BYTE]
