"""Collectives on flat tensors, each by the shortest way there is between the ranks.

On one host the data moves through shared memory (node.py). Across hosts the owners of a segment
reduce it with their counterparts by MPI, all segments at once. Where shared memory cannot be had,
everything goes through MPI. All operations are generators that yield while they wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from enum import Enum

import torch
from mpi4py import MPI
from torch import Tensor

from mpicomp.comm import direct, halves
from mpicomp.comm.buffers import (
    HALVES,
    MAX_COUNT,
    NATIVE,
    Buffer,
    as_bytes,
    buffer,
    check,
    memory,
    pieces,
    raw,
)
from mpicomp.comm.node import (
    SHARED_DIRECTORY,
    Combine,
    Node,
    Refused,
    Window,
    exchange_texts,
    reduce_rows,
    same,
)
from mpicomp.comm.staging import Staging
from mpicomp.comm.waiting import Task, run, until

log = logging.getLogger("mpicomp")

ARENA_BYTES = 2 << 20  # per rank
_MPI_ONLY = frozenset({torch.uint16, torch.uint32, torch.uint64})  # torch cannot add them up
_SMALL_BYTES = 128 << 10  # below this every rank reads everything: one barrier instead of two


class Op(Enum):
    """How elements of different ranks are combined."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    PRODUCT = "product"


_COMBINE: dict[Op, Combine] = {
    Op.SUM: torch.add,
    Op.MAX: torch.maximum,
    Op.MIN: torch.minimum,
    Op.PRODUCT: torch.mul,
}
_MPI_OP = {Op.SUM: MPI.SUM, Op.MAX: MPI.MAX, Op.MIN: MPI.MIN, Op.PRODUCT: MPI.PROD}
_LOGICAL = {Op.SUM: Op.MAX, Op.MAX: Op.MAX, Op.MIN: Op.MIN, Op.PRODUCT: Op.MIN}


class Communicator:
    """A group of ranks and the ways between them. Building one is collective.

    Args:
        comm: duplicated, so that nothing else can get in between.
        shared_memory: whether ranks of one host may share memory.
        directory: the memory file system used for it.
        host: ranks with the same number count as one host; None asks MPI.
        max_count: elements that one MPI call may move.
        device_pointers: whether MPI may be given addresses of GPU memory, for moves.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        *,
        shared_memory: bool = True,
        directory: str = SHARED_DIRECTORY,
        host: int | None = None,
        max_count: int = MAX_COUNT,
        device_pointers: bool = False,
    ) -> None:
        self.comm = comm.Dup()
        self.rank, self.size = comm.rank, comm.size
        self._max_count = max_count
        self._device_pointers = device_pointers
        if host is None:
            self.local = self.comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        else:
            self.local = self.comm.Split(host, key=self.rank)
        self.hosts = self.comm.allreduce(int(self.local.rank == 0))
        owners = self.comm.allreduce(self.local.size, op=MPI.MIN)
        self.node: Node | None = None
        self._windows: list[Window] = []
        self._too_small = False  # shared memory could not hold what was asked for
        self._stagings: dict[torch.device, Staging] = {}
        self._cross: MPI.Comm | None = None
        if shared_memory and self.size > 1 and self.comm.allreduce(self.local.size, MPI.MAX) > 1:
            self._share(directory, owners)

    def _share(self, directory: str, owners: int) -> None:
        node: Node | Refused
        try:
            node = Node(self.local, arena_bytes=ARENA_BYTES, directory=directory, owners=owners)
        except Refused as refused:
            node = refused
        trouble = run(self._first_trouble(node))
        if trouble or isinstance(node, Refused):
            if self.rank == 0:
                log.warning(
                    "mpicomp: no shared memory between ranks of a host (%s): using MPI", trouble
                )
            return
        self.node = node
        if self.hosts > 1:
            color = self.local.rank if self.local.rank < owners else MPI.UNDEFINED
            self._cross = self.comm.Split(color, key=self.rank)

    def free(self) -> None:
        """Collective: give the communicators back to MPI. Shared memory goes with its tensors."""
        self._windows.clear()
        self.node = None
        for comm in (self._cross, self.local, self.comm):
            if comm is not None and comm != MPI.COMM_NULL:
                comm.Free()

    # ------------------------------------------------------------------------------- memory

    def allocate(self, num_bytes: int) -> Task[Tensor]:
        """Host memory (num_bytes,) uint8 in which reductions are fastest.

        Ordinary memory where no shared memory can be had, with one line in the log.
        """
        if self.node is not None and num_bytes > 0 and not self._too_small:
            window = yield from self.node.window(num_bytes)
            trouble = yield from self._first_trouble(window)
            if not trouble and isinstance(window, Window):
                self._windows.append(window)
                return window.own
            self._too_small = True
            if self.rank == 0:
                log.warning(
                    "mpicomp: shared memory is too small for %d MB of gradients (%s): "
                    "copying through a small part of it",
                    num_bytes >> 20,
                    trouble,
                )
        return torch.empty(num_bytes, dtype=torch.uint8)

    def _first_trouble(self, outcome: Window | Node | Refused) -> Task[str]:
        """Why some host has no shared memory; empty if all have."""
        own = str(outcome) if isinstance(outcome, Refused) else ""
        return next(filter(None, (yield from exchange_texts(self.comm, own))), "")

    def release(self, block: Tensor) -> None:
        """Forget a block from `allocate`; its memory is returned with the last tensor in it."""
        self._windows = [w for w in self._windows if w.own.data_ptr() != block.data_ptr()]

    # --------------------------------------------------------------------------- reductions

    def reduce_(self, flat: Tensor, op: Op = Op.SUM, scale: float | None = None) -> Task[None]:
        """All-reduce of ``flat`` (n,), in place and times ``scale``; the same bits on all ranks.

        Sums of 16-bit floats are accumulated in float32 and rounded once per host and once more
        across hosts. A sum of bool is *or*, a product *and*.
        """
        if not flat.is_cpu:
            yield from self._staging(flat.device).reduce_(
                flat, lambda host: self.reduce_(host, op, scale)
            )
            return
        check(flat)
        if flat.dtype == torch.bool:
            flat, op = flat.view(torch.uint8), _LOGICAL[op]
        known = flat.dtype in NATIVE or flat.dtype in HALVES
        if not known or (flat.is_complex() and op in (Op.MAX, Op.MIN)):
            raise TypeError(f"comm: dtype must be one that has a {op.value}, got {flat.dtype}")
        if self.size == 1 or flat.numel() == 0:
            if scale is not None:
                flat.mul_(scale)
            return
        if self.node is None or flat.dtype in _MPI_ONLY:
            yield from self._reduce_mpi(self.comm, flat, op, scale)
            return
        num_bytes = flat.numel() * flat.element_size()
        if num_bytes <= _SMALL_BYTES:
            if self.hosts == 1:
                yield from self._reduce_small(self.node, flat, op, scale)
            else:
                yield from self._reduce_mpi(self.comm, flat, op, scale)
            return
        for window in self._windows:
            offset = window.find(flat)
            if offset is not None:
                rows = window.peers(offset, flat.numel(), flat.dtype)
                yield from self._reduce_window(self.node, rows, op, scale)
                return
        yield from self._reduce_arena(self.node, flat, op, scale)

    def _staging(self, device: torch.device) -> Staging:
        if device not in self._stagings:
            self._stagings[device] = Staging(device)
        return self._stagings[device]

    def _reduce_window(
        self, node: Node, rows: list[Tensor], op: Op, scale: float | None
    ) -> Task[None]:
        segment = node.segment(rows[0].numel())
        mine = [row[segment] for row in rows]
        yield from node.barrier()
        yield from self._reduce_segment(node, mine, mine, op, scale)
        yield from node.barrier()

    def _reduce_arena(self, node: Node, flat: Tensor, op: Op, scale: float | None) -> Task[None]:
        length = node.half_bytes // flat.element_size()
        for piece in pieces(flat.numel(), length):
            own = flat[piece]
            rows = node.next_half(flat.dtype, own.numel())
            segment = node.segment(own.numel())
            shared = rows[node.rank]
            shared[: segment.start].copy_(own[: segment.start])
            shared[segment.stop :].copy_(own[segment.stop :])
            mine = [own[segment] if r == node.rank else row[segment] for r, row in enumerate(rows)]
            yield from node.barrier()
            yield from self._reduce_segment(node, mine, [own[segment], shared[segment]], op, scale)
            yield from node.barrier()
            for rank, other in enumerate(node.segments(own.numel())):
                if rank != node.rank:
                    own[other].copy_(rows[rank][other])

    def _reduce_segment(
        self,
        node: Node,
        rows: Sequence[Tensor],
        targets: Sequence[Tensor],
        op: Op,
        scale: float | None,
    ) -> Task[None]:
        if self._cross is None:
            reduce_rows(rows, targets, _COMBINE[op], scale)
        elif self._cross != MPI.COMM_NULL and rows[0].numel() > 0:
            total = targets[node.rank if len(targets) == node.size else 0]
            reduce_rows(rows, [total], _COMBINE[op], None)
            yield from self._reduce_mpi(self._cross, total, op, scale)
            for target in targets:
                if target is not total:
                    target.copy_(total)

    def _reduce_small(self, node: Node, flat: Tensor, op: Op, scale: float | None) -> Task[None]:
        # Every rank combines all rows, in the same order, and must not write to them.
        rows = node.next_half(flat.dtype, flat.numel())
        rows[node.rank].copy_(flat)
        yield from node.barrier()
        if flat.dtype in HALVES:
            reduce_rows(rows, [flat], _COMBINE[op], scale)  # reads the rows only: others do too
            return
        combine = _COMBINE[op]
        combine(rows[0], rows[1], out=flat)
        for row in rows[2:]:
            combine(flat, row, out=flat)
        if scale is not None:
            flat.mul_(scale)

    def _reduce_mpi(self, comm: MPI.Comm, flat: Tensor, op: Op, scale: float | None) -> Task[None]:
        if flat.dtype in HALVES and op is not Op.SUM:
            wide = flat.float()
            yield from self._reduce_mpi(comm, wide, op, scale)
            flat.copy_(wide)
            return
        large = flat.numel() * flat.element_size() > _SMALL_BYTES
        if large and comm.size <= direct.MOST_RANKS and flat.dtype not in _MPI_ONLY:
            yield from direct.reduce_(comm, flat, _COMBINE[op], scale)
            return
        for piece in pieces(flat.numel(), self._max_count):
            part = flat[piece]
            if part.dtype in HALVES:
                yield from halves.sum_(comm, part, scale)
                continue
            yield from until(comm.Iallreduce(MPI.IN_PLACE, buffer(part), _MPI_OP[op]))
            if scale is not None:
                part.mul_(scale)

    # -------------------------------------------------------------------------------- moves

    def readable(self, tensor: Tensor) -> Tensor:
        """``tensor`` where MPI can read it: itself, complete, or a copy in host memory."""
        if tensor.is_cuda and self._device_pointers:
            torch.cuda.current_stream(tensor.device).synchronize()
            return tensor
        return tensor.cpu()

    def _raw(self, tensor: Tensor) -> Buffer:
        return raw(tensor, device_pointers=self._device_pointers)

    def broadcast_(self, tensor: Tensor, root: int) -> Task[None]:
        """``tensor`` of rank ``root`` replaces the contents of ``tensor`` everywhere."""
        flat = as_bytes(tensor)
        for piece in pieces(flat.numel(), self._max_count):
            if flat.is_cuda:  # MPIs differ in what they can do with device memory unless they block
                self.comm.Bcast(self._raw(flat[piece]), root)
            else:
                yield from until(self.comm.Ibcast(self._raw(flat[piece]), root))

    def gather(self, tensor: Tensor, lengths: Sequence[int]) -> Task[list[Tensor]]:
        """The 1-d tensors of all ranks, in rank order; ``lengths[r]`` elements from rank r."""
        result = tensor.new_empty(sum(lengths))
        parts = list(result.split(list(lengths)))
        counts = [part.numel() * part.element_size() for part in parts]
        if sum(counts) <= self._max_count:
            receive: Buffer = [memory(result), (counts, None), MPI.BYTE]
            if tensor.is_cuda:
                self.comm.Allgatherv(self._raw(tensor), receive)
            else:
                yield from until(self.comm.Iallgatherv(self._raw(tensor), receive))
            return parts
        parts[self.rank].copy_(tensor)
        for rank, part in enumerate(parts):
            yield from self.broadcast_(part, rank)
        return parts

    def all_to_all(self, outgoing: Sequence[Tensor], lengths: Sequence[int]) -> Task[list[Tensor]]:
        """Send ``outgoing[r]`` (1-d) to rank r; returns what each rank sent here."""
        incoming = [outgoing[0].new_empty(length) for length in lengths]
        requests: list[MPI.Request] = []
        incoming[self.rank].copy_(outgoing[self.rank])  # MPI would send it in small pieces
        for shift in range(1, self.size):
            to, origin = (self.rank + shift) % self.size, (self.rank - shift) % self.size
            requests += self._each_piece(incoming[origin], self.comm.Irecv, origin)
            requests += self._each_piece(outgoing[to], self.comm.Isend, to)
        for request in requests:
            yield from until(request)
        return incoming

    def _each_piece(
        self, tensor: Tensor, call: Callable[[Buffer, int], MPI.Request], rank: int
    ) -> list[MPI.Request]:
        flat = as_bytes(tensor)
        return [
            call(self._raw(flat[piece]), rank) for piece in pieces(flat.numel(), self._max_count)
        ]

    def lengths(self, length: int) -> Task[list[int]]:
        """Every rank's ``length``, in rank order."""
        own = torch.tensor([length])
        every = yield from self.gather(own, [1] * self.size)
        return [int(value) for value in every]

    # ------------------------------------------------------------------------ synchronising

    def barrier(self) -> Task[None]:
        """Return when every rank has come here."""
        yield from until(self.comm.Ibarrier())

    def same(self, digest: int) -> Task[bool]:
        """A barrier that tells whether all ranks came with the same ``digest`` (63 bits)."""
        if self.size == 1:
            return True
        if self.node is not None and self.hosts == 1:
            return (yield from self.node.same(digest))
        return (yield from same(self.comm, digest))
