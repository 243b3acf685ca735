from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress.bits import WIDTHS, pack, packed_numel, unpack


def draw(bits, numel, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**bits, (numel,), generator=generator).to(torch.uint8)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(WIDTHS), st.integers(0, 100), st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_round_trip(bits, numel, skipped, seed):
    codes = draw(bits, numel + skipped, seed)[skipped:]  # a view, anywhere in its memory
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.numel() == packed_numel(numel, bits) == -(-numel * bits // 8)
    assert torch.equal(unpack(packed, bits, numel), codes)
    longer = torch.cat([packed, torch.full((3,), 255, dtype=torch.uint8)])
    assert torch.equal(unpack(longer, bits, numel), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_layout(bits):
    codes = draw(bits, 101)
    expected = [0] * packed_numel(101, bits)
    for i, code in enumerate(codes.tolist()):
        expected[i * bits // 8] |= code << i * bits % 8
    assert pack(codes, bits).tolist() == expected


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_padding_is_zero_and_never_read(bits):
    codes = torch.full((9,), 2**bits - 1, dtype=torch.uint8)
    packed = pack(codes, bits)
    assert int(packed[-1]) == 2**bits - 1  # one code and zeros
    packed[-1] = 255
    assert torch.equal(unpack(packed, bits, 9), codes)


def test_strided_codes():
    codes = draw(1, 64)
    assert torch.equal(pack(codes[::2], 1), pack(codes[::2].clone(), 1))
