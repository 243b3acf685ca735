"""The ranks of one host: shared memory, and reductions straight out of each other's buffers.

Every rank owns one segment of the elements. It reads that segment from all ranks, reduces it in
rank order in a block that stays in its cache, and writes the result back to all of them: each
element crosses the memory bus twice, whatever the number of ranks, and all ranks get the same
bits because only one of them computed it.

Two kinds of memory are shared. A *window* holds the buckets of a training run, which are reduced
where they lie. The *arena* is small; other tensors pass through it piece by piece.
"""

from __future__ import annotations

import itertools
import mmap
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from mpicomp.comm.buffers import HALVES, buffer
from mpicomp.comm.waiting import Task, run, until

SHARED_DIRECTORY = "/dev/shm"
BLOCK_ELEMENTS = 1 << 17  # what is reduced at a time: a few blocks fit in a core's cache
_TEXT_BYTES = 255
_LOOKS = 40  # at a flag before giving others a turn: a few microseconds
_MOST_ROWS = 256  # views of the arena that are kept: making them takes longer than using them
_LINE_BYTES = 64  # each rank writes to cache lines of its own

Combine = Callable[..., Any]  # combine(a, b, out=result)


class Refused(Exception):
    """Shared memory could not be had; the reason, as text."""


def share(comm: MPI.Comm, rank_bytes: int, directory: str) -> Task[list[Tensor] | Refused]:
    """Memory that all ranks of ``comm`` see: one uint8 tensor (rank_bytes,) per rank.

    The file behind it has no name once this returns, so nothing is left behind however the job
    ends; the memory lives as long as a tensor that uses it. The answer is `Refused` on every rank
    if any rank could not map or reserve it.
    """
    path, trouble = "", ""
    if comm.rank == 0:
        try:
            descriptor, path = tempfile.mkstemp(prefix="mpicomp-", dir=directory)
            os.ftruncate(descriptor, comm.size * _stride(rank_bytes))
            os.close(descriptor)
        except OSError as error:
            trouble = str(error)
    shared_path = (yield from exchange_texts(comm, path))[0]
    parts: list[Tensor] = []
    if shared_path:
        try:
            parts = _map(shared_path, comm, rank_bytes)
        except OSError as error:
            trouble = str(error)
    troubles = yield from exchange_texts(comm, trouble)
    if path:
        os.unlink(path)
    reasons = [text for text in troubles if text]
    return Refused(reasons[0]) if reasons else parts


def exchange_texts(comm: MPI.Comm, text: str) -> Task[list[str]]:
    """The short texts (up to 255 bytes) of all ranks."""
    own = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    every = bytearray(_TEXT_BYTES * comm.size)
    yield from until(comm.Iallgather([own, MPI.BYTE], [every, _TEXT_BYTES, MPI.BYTE]))
    return [
        every[start : start + _TEXT_BYTES].rstrip(b"\0").decode(errors="replace")
        for start in range(0, len(every), _TEXT_BYTES)
    ]


def same(comm: MPI.Comm, digest: int) -> Task[bool]:
    """Whether all ranks of ``comm`` came with the same ``digest``: its largest is its least."""
    extremes = torch.tensor([digest, -digest])
    yield from until(comm.Iallreduce(MPI.IN_PLACE, buffer(extremes), MPI.MAX))
    return bool(extremes[0] == -extremes[1])


def _stride(rank_bytes: int) -> int:
    """From one rank's part to the next: every part begins at a cache line."""
    return -(-rank_bytes // _LINE_BYTES) * _LINE_BYTES


def _map(path: str, comm: MPI.Comm, rank_bytes: int) -> list[Tensor]:
    stride = _stride(rank_bytes)
    descriptor = os.open(path, os.O_RDWR)
    try:
        # Reserve now: a full tmpfs is an error here and a bus error on first touch. Every rank
        # reserves its own part, so that the pages lie near the processor that uses them most.
        os.posix_fallocate(descriptor, comm.rank * stride, stride)
        mapping = mmap.mmap(descriptor, comm.size * stride)
    finally:
        os.close(descriptor)
    return [
        torch.frombuffer(mapping, dtype=torch.uint8, count=rank_bytes, offset=rank * stride)
        for rank in range(comm.size)
    ]


@dataclass(frozen=True, slots=True)
class Window:
    """The same stretch of memory of each rank of the host; ``parts[i]`` is rank i's, in bytes."""

    parts: list[Tensor]
    own: Tensor

    def find(self, tensor: Tensor) -> int | None:
        """Where in ``own`` the memory of ``tensor`` begins, in bytes; None if it lies outside."""
        offset = tensor.data_ptr() - self.own.data_ptr()
        inside = offset >= 0 and offset + tensor.numel() * tensor.element_size() <= len(self.own)
        return offset if inside else None

    def peers(self, offset: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """The tensor (numel,) at byte ``offset``, as each rank of the host has it."""
        end = offset + numel * dtype.itemsize
        return [part[offset:end].view(dtype) for part in self.parts]


class Node:
    """The ranks of one host, with flags and an arena in shared memory.

    Args:
        comm: the ranks of the host; used for set-up, and for barriers where flags cannot be.
        arena_bytes: per rank; half of it is in use at a time.
        directory: a memory file system.
        owners: how many of the ranks, from 0, own a segment (all, unless hosts differ in size).

    Raises:
        Refused: on every rank, if the shared memory cannot be had.
    """

    def __init__(
        self, comm: MPI.Comm, *, arena_bytes: int, directory: str, owners: int | None = None
    ) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.owners = owners or comm.size
        self._directory = directory
        parts = run(share(comm, _LINE_BYTES + arena_bytes, directory))
        if isinstance(parts, Refused):
            raise parts
        # Flags rely on stores becoming visible in program order, which x86 promises.
        self._use_flags = platform.machine() in ("x86_64", "AMD64")
        self._flags = [part[:_LINE_BYTES].numpy().data.cast("q") for part in parts]
        self._arena = Window([p[_LINE_BYTES:] for p in parts], parts[self.rank][_LINE_BYTES:])
        self.half_bytes = arena_bytes // 2
        self._half = 0
        self._rows: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}
        self._turn = 0

    def window(self, num_bytes: int) -> Task[Window | Refused]:
        """Shared memory of ``num_bytes`` for each rank."""
        parts = yield from share(self.comm, num_bytes, self._directory)
        return parts if isinstance(parts, Refused) else Window(parts, parts[self.rank])

    def barrier(self) -> Task[None]:
        """Return when every rank of the host has come here; what they wrote before is visible."""
        if not self._use_flags:
            yield from until(self.comm.Ibarrier())
            return
        self._turn += 1
        self._flags[self.rank][0] = turn = self._turn
        for flags in self._flags:
            looks = _LOOKS
            while flags[0] < turn:
                looks -= 1
                if looks < 0:
                    yield

    def same(self, digest: int) -> Task[bool]:
        """A barrier that tells whether all ranks came with the same ``digest``."""
        if not self._use_flags:
            return (yield from same(self.comm, digest))
        slot = 1 + (self._turn + 1) % 2  # a rank can be one turn ahead, never two
        self._flags[self.rank][slot] = digest
        yield from self.barrier()
        return all(flags[slot] == digest for flags in self._flags)

    def segments(self, numel: int) -> list[slice]:
        """Which elements each rank owns; ranks that own none have an empty slice."""
        length = -(-numel // self.owners)
        edges = [min(rank * length, numel) for rank in range(self.owners + 1)]
        edges += [numel] * (self.size - self.owners)
        return [slice(start, stop) for start, stop in itertools.pairwise(edges)]

    def segment(self, numel: int) -> slice:
        """The elements that this rank owns."""
        return self.segments(numel)[self.rank]

    def next_half(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """The first ``numel`` elements of the other half of the arena, as each rank has them.

        Ranks may still read the half used last, but not the one before: to come this far, all
        have passed a barrier since.
        """
        self._half = 1 - self._half
        key = (self._half, dtype, numel)
        rows = self._rows.get(key)
        if rows is None:
            if len(self._rows) >= _MOST_ROWS:
                self._rows.clear()
            rows = self._arena.peers(self._half * self.half_bytes, numel, dtype)
            self._rows[key] = rows
        return rows


def reduce_rows(
    rows: Sequence[Tensor], targets: Sequence[Tensor], combine: Combine, scale: float | None
) -> None:
    """Combine ``rows`` in order, times ``scale``, into all ``targets``; all of equal length.

    The first row is used as scratch memory: accumulating where the data lies is faster than beside
    it. 16-bit floats are accumulated and scaled in float32 and rounded once, at the end.
    """
    numel, dtype = rows[0].numel(), rows[0].dtype
    widened = dtype in HALVES
    scratch = torch.empty(min(BLOCK_ELEMENTS, numel) if widened else 0)
    others = [t for t in targets if widened or t.data_ptr() != rows[0].data_ptr()]
    for start in range(0, numel, BLOCK_ELEMENTS):
        block = slice(start, min(start + BLOCK_ELEMENTS, numel))
        total = rows[0][block]
        if widened:
            total = scratch[: len(total)].copy_(total)
        for row in rows[1:]:
            combine(total, row[block], out=total)
        if scale is not None:
            total.mul_(scale)
        for target in others:
            target[block].copy_(total)
