from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpicomp.compress.select import largest


@given(st.lists(st.integers(-4, 4), max_size=40), st.data())
def test_the_same_magnitudes_as_sorting_whatever_the_ties(values, data):
    k = data.draw(st.integers(0, len(values)))
    flat = torch.tensor(values, dtype=torch.float32)
    indices = largest(flat, k).tolist()
    assert len(set(indices)) == len(indices) == k
    magnitudes = sorted((abs(values[i]) for i in indices), reverse=True)
    assert magnitudes == sorted((abs(v) for v in values), reverse=True)[:k]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_signs_do_not_count(dtype):
    flat = torch.tensor([0.5, -3.0, 2.0, 0.0, -1.0], dtype=dtype)
    indices = largest(flat, 2)
    assert sorted(indices.tolist()) == [1, 2]
    assert indices.dtype == torch.int64
