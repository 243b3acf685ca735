"""On one rank; tests/mpi/test_communicator.py has several."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI

from mpicomp.comm import halves
from mpicomp.comm.buffers import HALVES
from mpicomp.comm.waiting import run


@pytest.mark.parametrize("dtype", sorted(HALVES, key=str))
@pytest.mark.parametrize("scale", [None, 1.0, 0.1])
def test_one_rank(dtype, scale):
    flat = torch.randn(1001).to(dtype)
    expected = (flat.float() * (1.0 if scale is None else scale)).to(dtype)
    run(halves.sum_(MPI.COMM_SELF, flat, scale))
    assert torch.equal(flat, expected)
