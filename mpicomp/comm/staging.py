"""GPU tensors for an MPI that cannot read device memory: through pinned host memory, in pieces.

Two pieces are under way at a time: while MPI works on one, the next is copied down.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mpicomp.comm.buffers import pieces
from mpicomp.comm.waiting import Task

PIECE_BYTES = 8 << 20


class Staging:
    """Pinned buffers between one GPU and MPI; all copies are on the caller's current stream."""

    def __init__(self, device: torch.device, *, piece_bytes: int = PIECE_BYTES) -> None:
        pin = device.type == "cuda"
        self._halves = [
            torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)
        ]
        self._piece_bytes = piece_bytes

    def reduce_(self, flat: Tensor, reduce_host: Callable[[Tensor], Task[None]]) -> Task[None]:
        """Apply ``reduce_host``, in place on host memory, to the device tensor ``flat`` (n,)."""
        length = self._piece_bytes // flat.element_size()
        parts = [flat[piece] for piece in pieces(flat.numel(), length)]
        hosts = [self._halves[i % 2].view(flat.dtype)[: len(p)] for i, p in enumerate(parts)]
        ready = [self._down(hosts[0], parts[0])] if parts else []
        for i, part in enumerate(parts):
            if i + 1 < len(parts):
                # On the same stream as the copy up out of this half, so it comes after it.
                ready.append(self._down(hosts[i + 1], parts[i + 1]))
            while not ready[i].query():
                yield
            yield from reduce_host(hosts[i])
            part.copy_(hosts[i], non_blocking=True)

    def _down(self, host: Tensor, part: Tensor) -> torch.cuda.Event:
        host.copy_(part, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return event
