from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress.blocks import dequantize_blocks, quantize_blocks
from mpicomp.compress.tiles import block_tiles, merged, num_rows, split, views


def normal(numel, seed=0, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def round_trip(x, bits, block, generator=None):
    codes, scales = quantize_blocks(x, bits, block, generator)
    kept = codes.clone(), scales.clone()
    codes.fill_(255)
    scales.fill_(math.nan)
    return dequantize_blocks(*kept, bits, block, x.numel())


@pytest.mark.parametrize(
    ("bits", "values", "expected"),
    [
        (8, [127.0, -127.0, 3.4, -3.6, 0.0], [127.0, -127.0, 3.0, -4.0, 0.0]),
        (4, [7.0, -7.0, 3.4, -3.6, 0.0], [7.0, -7.0, 3.0, -4.0, 0.0]),
        (2, [2.0, -2.0, 0.9, -1.1, 0.0], [2.0, -2.0, 0.0, -2.0, 0.0]),
    ],
)
def test_by_hand(bits, values, expected):
    assert round_trip(torch.tensor(values), bits, 256).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([2, 4, 8]),
    st.integers(0, 700),
    st.integers(1, 300),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_sizes_and_errors(bits, numel, block, dtype, stochastic, seed):
    x = normal(numel, seed, dtype)
    generator = torch.Generator().manual_seed(seed) if stochastic else None
    codes, scales = quantize_blocks(x, bits, block, generator)
    assert (codes.dtype, codes.numel()) == (torch.uint8, -(-numel * bits // 8))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (scales.dtype, scales.numel()) == (wide, -(-numel // block))
    error = (dequantize_blocks(codes, scales, bits, block, numel, torch.float64) - x.double()).abs()
    bound = scales.double().repeat_interleave(block)[:numel] * (1.0 if stochastic else 0.5)
    assert bool((error <= bound * (1 + 1e-4)).all())


def test_a_short_last_block_has_a_scale_of_its_own():
    x = torch.cat([torch.full((256,), 1e6), torch.tensor([1.0, -1.0, 0.5])])
    torch.testing.assert_close(round_trip(x, 8, 256)[-3:], x[-3:], rtol=0.01, atol=0)


def test_zeros_stay_zeros():
    x = normal(600)
    x[256:512] = 0.0
    assert not round_trip(x, 4, 256)[256:512].any()
    generator = torch.Generator().manual_seed(0)
    assert not round_trip(x, 4, 256, generator)[256:512].any()


@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-38, 1e-36, 1.0, 1e30, 3.3e38])
@pytest.mark.parametrize("stochastic", [False, True])
def test_any_size(size, stochastic):
    x = torch.tensor([1.0, -1.0, 0.5, 0.0, 0.001]) * size
    generator = torch.Generator().manual_seed(0) if stochastic else None
    out = round_trip(x, 8, 256, generator)
    assert bool(out.isfinite().all())
    assert float((out - x).double().abs().max()) <= max(size / 127 * 1.01, 2e-38)
    assert out[3] == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("stochastic", [False, True])
def test_what_is_not_finite_shows_in_its_block_alone(bad, bits, stochastic):
    x = normal(600)
    x[300] = bad
    out = round_trip(x, bits, 256, torch.Generator().manual_seed(0) if stochastic else None)
    assert not out[256:512].isfinite().any()
    assert out[:256].isfinite().all()
    assert out[512:].isfinite().all()


def test_rounding_at_random_is_unbiased():
    x = normal(300)
    draws = torch.stack(
        [
            round_trip(x, 4, 128, torch.Generator().manual_seed(seed)).double()
            for seed in range(2000)
        ]
    )
    step = quantize_blocks(x, 4, 128)[1].repeat_interleave(128)[:300].double()
    position = x.double() / step
    up = position - position.floor()  # how likely it is to be rounded up
    error = step * ((up * (1 - up) + 1e-3) / len(draws)).sqrt()
    assert bool(((draws.mean(0) - x).abs() <= 4.5 * error).all())
    assert not torch.equal(round_trip(x, 4, 128).double(), draws[0])


# --------------------------------------------------------------------------------------- tiles


def test_tiles_by_hand():
    assert block_tiles(700, 256) == ((2, 256), (1, 188))
    assert block_tiles(512, 256) == ((2, 256),)
    assert block_tiles(0, 256) == ()
    assert merged([(1, 4), (2, 4), (0, 9), (3, 0), (1, 5)]) == ((3, 4), (1, 5))
    assert split(((3, 10),), [0, 16, 24, 30]) == [
        ((1, 10), (1, 6)),
        ((2, 4),),
        ((1, 6),),
    ]
    assert split(((3, 10), (1, 2)), [0, 0, 32, 32]) == [(), ((3, 10), (1, 2)), ()]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=5),
    st.lists(st.integers(0, 400), max_size=4),
)
def test_split_cuts_rows_at_bounds_only(tiles, cuts):
    tiles = merged(tiles)
    numel = sum(rows * width for rows, width in tiles)
    bounds = sorted({0, numel, *(min(cut, numel) for cut in cuts)})
    bounds = bounds if numel else [0, 0]

    def starts(tiles, begin=0):
        found = []
        for rows, width in tiles:
            found += [begin + row * width for row in range(rows)]
            begin += rows * width
        return found

    chunks = split(tiles, bounds)
    for start, stop, chunk in zip(bounds[:-1], bounds[1:], chunks, strict=True):
        assert sum(rows * width for rows, width in chunk) == stop - start
        expected = {s for s in starts(tiles) if start <= s < stop}
        assert set(starts(chunk, start)) == expected | ({start} if stop > start else set())
        assert num_rows(chunk) == len(starts(chunk))


def test_views_share_memory():
    flat = torch.zeros(7)
    first, last = views(flat, ((2, 3), (1, 1)))
    first[1, 2], last[0, 0] = 1.0, 2.0
    assert flat.tolist() == [0, 0, 0, 0, 0, 1, 2]
