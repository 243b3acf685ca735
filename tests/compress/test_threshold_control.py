from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress.threshold_control import (
    UNKNOWN,
    best,
    caught_up,
    corrected,
    dummy,
    even_bounds,
    limited,
    middle,
    passing,
    topped_up,
)

# ------------------------------------------------------------------------------------- control


def test_the_table_of_the_papers():
    for symmetric in (False, True):
        for ratio, factor in ((2.0, 1.005), (1.0, 1.00125), (0.5, 0.995), (1.1, 1.00125)):
            assert corrected(1.0, ratio, symmetric=symmetric) == factor
    assert corrected(1.0, 0.95, symmetric=False) == 1.00125
    assert corrected(1.0, 0.95, symmetric=True) == 0.99875
    assert corrected(1.0, 0.909, symmetric=True) == 0.995


@pytest.mark.parametrize(("scale", "steps"), [(1.0, 1312), (0.1, 851), (0.01, 389), (0.001, 73)])
def test_steps_to_lock_in_with_the_rule_of_the_papers(scale, steps):
    """Normal accumulators, d = 11 173 962, density 0.001: |ln(end / start)| / ln 1.005."""
    threshold, taken = 1 / (2 * math.sqrt(11_173)), 0
    assert threshold == pytest.approx(0.004730, abs=1e-6)
    while not 0.909 < (ratio := math.erfc(threshold / scale / math.sqrt(2)) / 0.001) <= 1.1:
        threshold, taken = corrected(threshold, ratio, symmetric=False), taken + 1
    assert abs(taken - steps) <= 3


def test_catching_up_is_exact_for_an_exponential_tail():
    """Of exp(-x / 3), exp(1) times too many pass 4, so 7 is right, whatever the sign."""
    assert caught_up(4.0, math.e, excess=3.0) == pytest.approx(7.0)
    assert caught_up(7.0, 1 / math.e, excess=3.0) == pytest.approx(4.0)
    assert caught_up(1.0, 1e9, excess=1e9) == 8.0
    assert caught_up(1.0, 1e-9, excess=1e9) == 1 / 8


def test_the_first_threshold_is_the_middle_of_what_ranks_measured():
    assert middle([3.0, 0.0, 1.0, 2.0]) == 2.0
    assert middle([4.0, 1.0]) == 1.0
    assert middle([0.0, 0.0]) == UNKNOWN


# ----------------------------------------------------------------------------------- selection


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=9), st.integers(0, 2000))
def test_limit_holds_with_dummies(counts, more):
    limit = len(counts) + more
    kept = limited(counts, limit)
    assert all(0 <= k <= n and (k > 0 or n == 0) for k, n in zip(kept, counts, strict=True))
    assert sum(max(k, 1) for k in kept) <= limit
    if sum(max(n, 1) for n in counts) <= limit:
        assert kept == counts


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(0, 500))
def test_what_is_missing_is_spread(counts, missing):
    more = topped_up(counts, sum(counts) + missing)
    assert sum(more) == sum(counts) + missing
    added = [m - n for m, n in zip(more, counts, strict=True)]
    assert max(added) - min(added) <= 1


def test_even_bounds():
    assert even_bounds(10, 4) == [0, 3, 6, 8, 10]
    assert even_bounds(2, 3) == [0, 1, 2, 2]
    assert even_bounds(0, 2) == [0, 0, 0]


def test_zeros_are_not_among_the_best():
    chosen, level = best(torch.tensor([0.0, 2.0, 0.0, 3.0]), 3)
    assert sorted(chosen.tolist()) == [1, 3]
    assert level == 2.0
    assert best(torch.zeros(3), 2)[0].numel() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_thresholds_out_of_range(dtype):
    part = torch.tensor([0.0, 1.0], dtype=dtype)
    assert passing(part, 1e300)[0].tolist() == []
    assert passing(part, 1e-320)[0].tolist() == [1]


def test_dummies_move_on():
    assert [dummy(torch.zeros(3), step).item() for step in range(4)] == [0, 1, 2, 0]
    assert dummy(torch.zeros(0), 5).numel() == 0
