"""Passes over device memory with CuPy, on the stream that PyTorch uses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from .search import Array, magnitudes, search

SOURCE = Path(__file__).with_name("above.cu")
THREADS, LOADS, MAX_BLOCKS = 256, 8, 2048  # LOADS for each thread, as in above.cu

Collect: TypeAlias = Callable[[Array, Array, Array, Array], None]
"""Called with bits (n,), floor (0-d), and what to fill: found (limit,) and count (1,)."""


def available() -> bool:
    """Whether CuPy is installed and finds a device."""
    try:
        import cupy
    except ImportError:
        return False
    return bool(cupy.cuda.is_available())


def largest(bits: Tensor, k: int) -> Tensor:
    """`search` on a CUDA tensor (n,) of integers."""
    import cupy

    index = bits.device.index
    stream = torch.cuda.current_stream(bits.device).cuda_stream
    with cupy.cuda.Device(index), cupy.cuda.ExternalStream(stream, index):
        array = cupy.from_dlpack(bits.contiguous())
        found = search(array, k, Device(cupy, run_kernel))
        # a copy: memory of CuPy's pool must not be seen by other streams of PyTorch
        return from_dlpack(found).clone()


@dataclass(frozen=True, slots=True)
class Device:
    """See `search.Passes`.

    Args:
        xp: the module of the arrays, cupy.
        collect: the pass itself: `run_kernel`.
    """

    xp: Any
    collect: Collect

    def above(self, bits: Array, floor: Array, limit: int) -> Array | None:
        found = self.xp.empty(limit, dtype=self.xp.int64)
        count = self.xp.zeros(1, dtype=self.xp.uint64)
        self.collect(bits, floor, found, count)
        total = int(count[0])  # waits for the device: the length of the result depends on it
        return None if total > limit else self.xp.sort(found[:total])

    def equal(self, bits: Array, value: Array, count: int) -> Array:
        return self.xp.flatnonzero(magnitudes(bits, self.xp) == value)[:count]


def run_kernel(bits: Array, floor: Array, found: Array, count: Array) -> None:
    """The kernel of ``above.cu`` for the width of ``bits``, on CuPy's current stream."""
    blocks = min(-(-len(bits) // (THREADS * LOADS)), MAX_BLOCKS)
    kernel = _module().get_function(f"above_{8 * bits.itemsize}")
    numel, capacity = np.int64(len(bits)), np.int64(len(found))
    kernel((blocks,), (THREADS,), (bits, numel, floor, found, capacity, count))


@functools.cache
def _module() -> Any:
    import cupy

    return cupy.RawModule(code=SOURCE.read_text())  # compiled once for each kind of device
