from __future__ import annotations

import pytest
import torch
from mpi4py import MPI

from mpicomp.comm.buffers import NATIVE, as_bytes, buffer, check, memory, pieces, raw


@pytest.mark.parametrize("numel", [0, 1, 6, 7, 8])
@pytest.mark.parametrize("limit", [1, 3, 7, 100])
def test_pieces_cover_everything_once(numel, limit):
    slices = list(pieces(numel, limit))
    assert [i for piece in slices for i in range(numel)[piece]] == list(range(numel))
    assert all(0 < piece.stop - piece.start <= limit for piece in slices)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.empty(0, 3), b""),
        (torch.empty(3, 0).t(), b""),
        (torch.tensor(7, dtype=torch.int16), b"\7\0"),
        (torch.tensor([1, 2, 3, 4], dtype=torch.int32)[1::2][:1], b"\2\0\0\0"),  # its stride is 2
        (torch.arange(4, dtype=torch.int16).view(2, 2)[1:], b"\2\0\3\0"),
        (torch.tensor([True, False]), b"\1\0"),
    ],
)
def test_bytes_whatever_the_strides(tensor, expected):
    flat = as_bytes(tensor)
    assert bytes(flat.tolist()) == expected
    assert not expected or flat.data_ptr() == tensor.data_ptr()


def test_bytes_of_what_is_not_contiguous():
    with pytest.raises(ValueError, match="must be dense and contiguous"):
        as_bytes(torch.zeros(4, 4).t())


def test_memory_is_not_copied():
    tensor = torch.arange(6, dtype=torch.int16)[2:]
    bytes(memory(tensor))
    memory(tensor)[0] = 9
    assert tensor.tolist() == [9, 3, 4, 5]
    assert memory(tensor).nbytes == 8
    assert memory(torch.empty(0)).nbytes == 0


@pytest.mark.parametrize("dtype", NATIVE)
def test_each_type_has_an_mpi_type_of_its_size(dtype):
    _, count, datatype = buffer(torch.zeros(3, dtype=dtype))
    assert (count, datatype.Get_size()) == (3, dtype.itemsize)


def test_everything_can_be_moved():
    for dtype in [*NATIVE, torch.bool, torch.bfloat16, torch.float16, torch.float8_e4m3fn]:
        _, count, datatype = raw(torch.zeros(3, dtype=dtype))
        assert (count, datatype) == (3 * dtype.itemsize, MPI.BYTE)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_what_mpi_cannot_reduce_is_refused(dtype):
    with pytest.raises(TypeError, match=f"one that MPI can reduce, got {dtype}"):
        buffer(torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4).t(),
        torch.zeros(3, 4)[:, ::2],
        torch.zeros(1).expand(3),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.eye(3).to_sparse(),
    ],
)
@pytest.mark.parametrize("gate", [check, buffer, raw])
def test_memory_with_gaps_or_in_another_order_is_refused(gate, tensor):
    with pytest.raises(ValueError, match="must be dense and contiguous"):
        gate(tensor)


@pytest.mark.parametrize("gate", [check, buffer, raw])
def test_device_memory_is_refused_unless_this_mpi_reads_it(gate):
    with pytest.raises(ValueError, match="must be in host memory for this MPI, got meta"):
        gate(torch.zeros(3, device="meta"))
