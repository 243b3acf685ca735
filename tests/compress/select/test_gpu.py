"""The way to CuPy and back, with NumPy in the place of CuPy and of the kernel."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mpicomp.compress.select import gpu, search

FUNCTIONS = "arange bitwise_and concatenate empty flatnonzero from_dlpack iinfo int64 partition"
FUNCTIONS += " sort uint64 zeros"


@pytest.fixture
def launches(monkeypatch):
    """A module called cupy that has only what is used here; the kernels it was asked for."""
    seen = []

    class RawModule:
        def __init__(self, *, code):
            self.code = code

        def get_function(self, name):
            assert f"ABOVE({name.removeprefix('above_')}, " in self.code
            return lambda grid, block, args: kernel(name, grid, block, *args)

    def kernel(name, grid, block, bits, numel, floor, found, capacity, count):
        seen.append((name, grid, block))
        assert (numel, capacity) == (len(bits), len(found))
        assert (numel.dtype, capacity.dtype) == (np.int64, np.int64)
        assert (floor.dtype, found.dtype, count.dtype) == (bits.dtype, np.int64, np.uint64)
        passed = np.flatnonzero(search.magnitudes(bits, np) > floor)[::-1]
        found[: len(passed)] = passed[:capacity]
        count += np.uint64(len(passed))

    def no_context(*args):
        return nullcontext()

    cuda = SimpleNamespace(Device=no_context, ExternalStream=no_context, is_available=lambda: True)
    names = {name: getattr(np, name) for name in FUNCTIONS.split()}
    cupy = SimpleNamespace(cuda=cuda, RawModule=RawModule, **names)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    gpu._module.cache_clear()
    yield seen
    gpu._module.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "integers", "name"),
    [(torch.bfloat16, torch.int16, "above_16"), (torch.float32, torch.int32, "above_32"),
     (torch.float64, torch.int64, "above_64")],
)  # fmt: skip
def test_largest_by_the_kernel_of_the_width(launches, dtype, integers, name):
    assert gpu.available()
    flat = torch.randn(50_000, 2, generator=torch.Generator().manual_seed(0)).to(dtype)[:, 1]
    indices = gpu.largest(flat.view(integers), 40)
    assert isinstance(indices, torch.Tensor)
    expected = torch.topk(flat.abs(), 40).values
    assert torch.equal(flat.abs()[indices].sort(descending=True).values, expected)
    assert launches == [(name, (25,), (256,))]  # 50,000 / (256 * 8), rounded up
