from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress.count_sketch import CountSketch, heaviest, median


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(numel, *, rows=5, columns, seed=0):
    return CountSketch.draw(numel, rows=rows, columns=columns, generator=rng(seed))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=rng(seed), dtype=torch.float64)


def pairs(sketch):
    """For each row the column and the sign of every element, by sketching one at a time."""
    tables = [sketch.encode(row) for row in torch.eye(sketch.numel, dtype=torch.float64)]
    stacked = torch.stack(tables, dim=1)  # (rows, numel, columns)
    assert torch.equal(stacked.abs().sum(-1), torch.ones(stacked.shape[:2], dtype=torch.float64))
    return stacked.abs().argmax(-1), stacked.sum(-1)


# ----------------------------------------------------------------------------- what it computes


@settings(max_examples=40, deadline=None)
@given(
    numel=st.integers(0, 70),
    rows=st.sampled_from([1, 3, 5]),
    columns=st.integers(1, 80),
    seed=st.integers(0, 99),
)
def test_every_row_adds_up_signed_elements_and_reads_their_median(numel, rows, columns, seed):
    sketch, x = draw(numel, rows=rows, columns=columns, seed=seed), normal(numel, seed=seed)
    table = sketch.encode(x)
    if numel == 0:
        assert not table.any()
        assert sketch.query(table).numel() == 0
        return
    place, sign = pairs(sketch)  # each (rows, numel)
    expected = torch.zeros(rows, columns, dtype=torch.float64)
    expected.scatter_add_(1, place, sign * x)
    torch.testing.assert_close(table, expected, rtol=1e-12, atol=1e-12)
    reads = (sign * table.gather(1, place)).median(0).values
    assert torch.equal(sketch.query(table), reads)


@settings(max_examples=30, deadline=None)
@given(a=st.floats(-3, 3), b=st.floats(-3, 3), seed=st.integers(0, 99))
def test_linear(a, b, seed):
    sketch = draw(1000, columns=70, seed=seed)
    x, y = normal(1000, seed=seed), normal(1000, seed=seed + 1)
    torch.testing.assert_close(
        sketch.encode(a * x + b * y),
        a * sketch.encode(x) + b * sketch.encode(y),
        rtol=1e-12,
        atol=1e-12,
    )


def test_merged_sketches_are_the_sketch_of_the_sum():
    sketch, parts = draw(40_000, columns=1500), [normal(40_000, seed=s) for s in range(7)]
    merged = sum(sketch.encode(part) for part in parts)
    torch.testing.assert_close(merged, sketch.encode(sum(parts)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("numel", [1, 99, 100, 40_000])
def test_a_table_as_wide_as_the_vector_is_exact(numel):
    sketch, x = draw(numel, rows=1, columns=max(numel, 100)), normal(numel)
    assert torch.equal(sketch.query(sketch.encode(x)), x)


def test_few_elements_without_a_collision_come_back_exactly():
    sketch, x = draw(1000, columns=100), torch.zeros(1000)
    place, _ = pairs(sketch)
    x[3], x[704] = 5.0, -2.0
    assert (place[:, 3] == place[:, 704]).sum() <= 2  # else choose other elements
    estimates = sketch.query(sketch.encode(x))
    assert (estimates[3], estimates[704]) == (5.0, -2.0)


def test_equal_seeds_give_equal_sketches_and_others_do_not():
    assert draw(500, columns=40) == draw(500, columns=40)
    assert draw(500, columns=40) != draw(500, columns=40, seed=1)
    before = torch.get_rng_state()
    draw(500, columns=40)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_vectors_add_up_in_fp32(dtype):
    sketch = draw(6400, columns=64, rows=1)
    ones = torch.ones(6400, dtype=dtype)
    table = sketch.encode(ones)
    assert table.dtype == torch.float32
    assert torch.equal(table, sketch.encode(ones.float()))


def test_more_elements_than_32_bits_count():
    """On the meta device nothing is computed, but all places and lengths are."""
    numel = 2**32 + 5
    sketch = draw(numel, columns=2**24)
    assert sketch.block * (len(sketch.places) - 1) < numel <= sketch.block * len(sketch.places)
    table = sketch.encode(torch.empty(numel, device="meta"))
    assert table.shape == (5, 2**24)
    assert sketch.query(table).shape == (numel,)


# --------------------------------------------------------------------------- how good it is


def test_places_and_signs_are_as_the_analysis_needs_them():
    """Over many draws: no collision within a block, 1 in 10 between, and signs that cancel."""
    near, far, product = 0, 0, 0.0
    draws = 2000
    for seed in range(draws):
        place, sign = pairs(draw(30, rows=1, columns=10, seed=seed))
        near += int(place[0, :10].unique().numel() < 10)
        far += int(place[0, 3] == place[0, 17])
        product += float(sign[0, 3] * sign[0, 17])
    assert near == 0
    assert abs(far / draws - 0.1) < 4 * math.sqrt(0.1 * 0.9 / draws)
    assert abs(product / draws) < 4 / math.sqrt(draws)


def test_one_row_is_unbiased_with_the_variance_of_the_analysis():
    """Mean x_i and variance (|x|^2 - |block of x_i|^2) / columns, over draws."""
    x, columns, draws = normal(200), 20, 4000
    sketches = (draw(200, rows=1, columns=columns, seed=seed) for seed in range(draws))
    reads = torch.stack([sketch.query(sketch.encode(x)) for sketch in sketches])
    blocks = x.view(-1, columns).square().sum(1).repeat_interleave(columns)
    variance = (x.square().sum() - blocks) / columns
    errors = reads - x
    assert (errors.mean(0).abs() < 5 * (variance / draws).sqrt()).all()
    torch.testing.assert_close(errors.square().mean(0), variance, rtol=0.15, atol=0.0)
    assert (variance <= (x.square().sum() - x.square()) / columns).all()


@pytest.mark.parametrize("together", [False, True])
def test_heavy_elements_are_found(together):
    """50 of 20,000 elements stand out, scattered or side by side; 5 rows of 2,000 columns."""
    recall, worst = 0.0, 0.0
    for seed in range(10):
        x = normal(20_000, seed=seed)
        order = torch.randperm(20_000, generator=rng(seed))
        heavy = torch.arange(5000, 5050) if together else order[:50]
        x[heavy] = 10.0 * (1 + torch.rand(50, generator=rng(seed), dtype=torch.float64))
        sketch = draw(20_000, columns=2000, seed=seed)
        estimates = sketch.query(sketch.encode(x))
        found = heaviest(estimates, 50)
        recall += torch.isin(heavy, found).double().mean() / 10
        worst = max(worst, float((estimates - x).abs().max() / x.norm() * math.sqrt(2000)))
    assert recall > 0.95
    assert worst < 4.0


def test_more_rows_make_outliers_rare():
    x = normal(20_000)
    errors = []
    for rows in (1, 5):
        sketch = draw(20_000, rows=rows, columns=1000)
        errors.append(float((sketch.query(sketch.encode(x)) - x).abs().quantile(0.999)))
    assert errors[1] < 0.7 * errors[0]


# ------------------------------------------------------------------------- median and heaviest


@settings(max_examples=50, deadline=None)
@given(rows=st.sampled_from([1, 3, 5, 7, 9]), seed=st.integers(0, 999))
def test_median(rows, seed):
    x = torch.randint(-3, 4, (rows, 40), generator=rng(seed)).float()
    before = x.clone()
    assert torch.equal(median(list(x)), x.median(0).values)
    assert torch.equal(x, before)


def test_median_lets_nan_through():
    x = torch.tensor([[1.0, 2.0], [math.nan, 3.0], [0.0, 5.0]])
    assert median(list(x)).isnan().tolist() == [True, False]


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.integers(-3, 3), max_size=30), data=st.data())
def test_heaviest_takes_the_first_among_equals_in_order(values, data):
    k = data.draw(st.integers(0, len(values)))
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    indices = heaviest(torch.tensor(values, dtype=torch.float32), k)
    assert indices.dtype == torch.int64
    assert indices.tolist() == sorted(order[:k])


def test_heaviest_counts_what_is_not_finite_as_infinite():
    values = torch.tensor([1.0, math.nan, 3.0, -math.inf, 2.0])
    assert heaviest(values, 2).tolist() == [1, 3]
    assert heaviest(torch.full((5,), math.nan), 3).tolist() == [0, 1, 2]
