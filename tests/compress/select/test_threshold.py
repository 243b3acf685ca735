from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress.select import above, above_at_most, blocks

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BLOCK = 2**16
nan, inf = math.nan, math.inf


@given(
    st.lists(st.integers(-8, 8), max_size=40),
    st.sampled_from([0.25, 1.0, 2.5, 4.0, 9.0]),
    st.sampled_from(DTYPES),
)
def test_the_same_as_looking_at_every_element(values, threshold, dtype):
    indices = above(torch.tensor(values, dtype=dtype), threshold)
    assert indices.dtype == torch.int64
    assert indices.tolist() == [i for i, v in enumerate(values) if abs(v) >= threshold]


@pytest.mark.parametrize("numel", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_vectors_of_several_blocks(numel, dtype):
    flat = torch.zeros(numel, dtype=dtype)
    places = [0, BLOCK - 2, *(p for p in (BLOCK, 2 * BLOCK, numel - 1) if p < numel)]
    flat[places] = -2.0
    assert above(flat, 2.0).tolist() == sorted(set(places))
    assert sum(block.numel() for _, block in blocks(flat)) == numel
    assert all(torch.equal(block, flat[start : start + BLOCK]) for start, block in blocks(flat))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threshold", [0.0, -1.0, 1e-60, 5e-324])
def test_zeros_are_never_above(threshold, dtype):
    """A threshold of zero, or one that rounds to it, must not select everything."""
    flat = torch.tensor([0.0, -0.0, 1.0, 0.0, -0.5], dtype=dtype)
    assert above(flat, threshold).tolist() == [2, 4]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_a_number_is_found(dtype):
    flat = torch.tensor([1.0, nan, -3.0, inf, -inf], dtype=dtype)
    assert above(flat, 2.0).tolist() == [1, 2, 3, 4]
    assert above(flat, inf).tolist() == [1, 3, 4]
    assert above(flat, 1e300).tolist()[-2:] == [3, 4]
    assert above(flat, nan).tolist() == [0, 1, 2, 3, 4]


def test_the_threshold_is_compared_in_the_precision_of_the_tensor():
    assert above(torch.tensor([0.1, 0.3, 0.7]), 0.3).tolist() == [1, 2]
    below = torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16)  # neighbours
    assert above(below, 1.001).tolist() == [1]  # rounded to bfloat16 it would be 1


@settings(max_examples=50)
@given(st.lists(st.integers(-8, 8), max_size=40), st.integers(0, 12))
def test_at_most_so_many_and_then_the_largest(values, most):
    flat = torch.tensor(values, dtype=torch.float32)
    indices = above_at_most(flat, 3.0, most).tolist()
    large = sorted((abs(v) for v in values if abs(v) >= 3), reverse=True)
    assert len(set(indices)) == len(indices)
    assert sorted((abs(values[i]) for i in indices), reverse=True) == large[:most]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_selection_can_be_seen_as_bytes(dtype):
    """As it is before it travels; an empty tensor that NumPy made has a stride of 0."""
    assert above(torch.ones(5, dtype=dtype), 2.0).view(torch.uint8).numel() == 0


def test_nothing_in_nothing():
    assert above(torch.empty(0), 1.0).tolist() == []
    assert above(torch.empty(0, dtype=torch.bfloat16), 1.0).tolist() == []
    assert list(blocks(torch.empty(0))) == []
