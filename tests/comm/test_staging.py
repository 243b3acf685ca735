"""Staging and CUDA-awareness without a GPU: host tensors stand for those of a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from mpicomp.comm import cuda
from mpicomp.comm.staging import Staging
from mpicomp.comm.waiting import run


class SlowEvent:
    """Done at the third look."""

    made = 0

    def __init__(self) -> None:
        SlowEvent.made += 1
        self._looks = 0

    def record(self) -> None:
        pass

    def query(self) -> bool:
        self._looks += 1
        return self._looks > 2


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_piece_is_reduced_on_the_host_and_copied_back(
    numel: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", SlowEvent)
    SlowEvent.made = 0
    staging = Staging(torch.device("cpu"), piece_bytes=64)
    lengths = []

    def double(host: Tensor) -> Iterator[None]:
        lengths.append(len(host))
        yield
        host.mul_(2)

    flat = torch.arange(numel).to(dtype)
    run(staging.reduce_(flat, double))
    assert torch.equal(flat, (torch.arange(numel) * 2).to(dtype))
    assert sum(lengths) == numel
    assert all(length <= 64 // dtype.itemsize for length in lengths)
    assert SlowEvent.made == len(lengths)


def test_no_gpu_no_device_pointers() -> None:
    assert torch.cuda.is_available() or not cuda.reads_device_memory(MPI.COMM_SELF)


@pytest.mark.parametrize("claims", [False, True])
@pytest.mark.parametrize("passes", [False, True])
def test_a_claim_counts_only_with_a_passed_test(
    claims: bool, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "_claims_to", lambda: claims)
    monkeypatch.setattr(cuda, "_passes_test", lambda: passes)
    assert cuda.reads_device_memory(MPI.COMM_SELF) == (claims and passes)


def test_the_library_is_really_asked() -> None:
    """No MPI from PyPI or Debian can: the answer is no, and not an error."""
    assert cuda._claims_to() is False


def test_a_test_that_crashes_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_SELF_TEST", "import os; os.abort()")
    assert not cuda._passes_test()
    monkeypatch.setattr(cuda, "_SELF_TEST", "import time; time.sleep(60)")
    monkeypatch.setattr(cuda, "_TEST_SECONDS", 0.5)
    assert not cuda._passes_test()
    monkeypatch.setattr(
        cuda, "_SELF_TEST", "from mpi4py import MPI; assert MPI.COMM_WORLD.size == 1"
    )
    monkeypatch.setattr(cuda, "_TEST_SECONDS", 60)
    monkeypatch.setenv("PMI_SIZE", "7")  # the launcher's variables are kept from it
    assert cuda._passes_test()
