from __future__ import annotations

import pytest
import torch

from mpicomp.compress.hadamard import hadamard


def test_size_4_by_hand():
    row = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    # half of: all added; signs + - + -; signs + + - -; signs + - - +
    assert hadamard(row).tolist() == [[5.0, -1.0, -2.0, 0.0]]


@pytest.mark.parametrize("size", [1, 2, 4, 8, 32, 64, 128])
def test_the_matrix_is_sylvesters(size):
    matrix = hadamard(torch.eye(size, dtype=torch.float64)) * size**0.5
    expected = torch.tensor(
        [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)],
        dtype=torch.float64,
    )
    torch.testing.assert_close(matrix, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 16, 512, 1024, 4096])
def test_norms_stay_and_twice_is_the_identity(size, dtype):
    rows = torch.randn(3, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = rows.clone()
    out = hadamard(rows)
    assert torch.equal(rows, before)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(out.norm(dim=1), rows.norm(dim=1), rtol=tolerance, atol=0.0)
    torch.testing.assert_close(hadamard(out), rows, rtol=tolerance, atol=tolerance)


def test_no_rows():
    assert hadamard(torch.empty(0, 8)).shape == (0, 8)
