from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress import Gather, Mean, Natural, Simulation
from mpicomp.compress.draws import generator
from mpicomp.compress.natural import decode, encode


def rounded(values, *key):
    return decode(*encode(torch.as_tensor(values), generator("test", *key)))


def test_powers_of_two_and_zero_are_exact():
    values = torch.tensor([0.0, -0.0, *(2.0**e for e in range(-126, 128)), -1.0, -(2.0**-126)])
    assert torch.equal(rounded(values), values)


@pytest.mark.parametrize(
    ("value", "below", "above", "chance"),
    [(1.5, 1, 2, 0.5), (-1.25, -1, -2, 0.25), (3.5, 2, 4, 0.75), (0.3, 0.25, 0.5, 0.2),
     (2.0**-127, 0.0, 2.0**-126, 0.5), (-(2.0**-128), 0.0, -(2.0**-126), 0.25)],
)  # fmt: skip
def test_the_way_up_is_taken_as_often_as_makes_the_average_right(value, below, above, chance):
    out = rounded(torch.full((100_000,), value), value)
    assert set(out.tolist()) == {below, above}
    share = (out == above).double().mean().item()
    assert share == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / len(out)))


def test_the_smallest_number_is_rounded_up_once_in_8_million_draws():
    """Its mantissa of 1 carries only with the largest of 2**23 random numbers."""
    assert not rounded(torch.full((1000,), 2.0**-149)).any()
    largest = rounded(torch.full((1000,), 2.0**-126 - 2.0**-149))
    assert (largest == 2.0**-126).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_a_value_becomes_one_of_the_powers_of_two_around_it(values):
    for value, out in zip(values, rounded(torch.tensor(values)).tolist(), strict=True):
        if value == 0.0 or abs(value) < 2.0**-126:
            assert abs(out) in (0.0, 2.0**-126)
        else:
            below = 2.0 ** (math.frexp(abs(value))[1] - 1)
            assert abs(out) in (below, math.inf if below == 2.0**127 else 2 * below)
        assert math.copysign(1.0, out) == math.copysign(1.0, value)


def test_what_is_not_finite_stays_so():
    values = torch.tensor([math.inf, -math.inf, math.nan, -math.nan]).repeat(1000)
    out = rounded(values)
    assert out.isinf().all()
    assert (out[1::4] < 0).all()
    assert rounded(torch.tensor([1e300, -1e39], dtype=torch.float64)).isinf().all()


def test_the_variance_is_at_most_an_eighth():
    """It is largest at 4/3 of a power of two: (v - 1) (2 - v) / v^2 = 1 / 8."""
    for value in (1.1, 4 / 3, 1.5, 1.9):
        out = rounded(torch.full((200_000,), value), value).double()
        share = (out - value).square().mean().item() / value**2
        assert share == pytest.approx((value - 1) * (2 - value) / value**2, rel=0.02)
        assert share <= 1 / 8 * 1.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_mean_over_ranks(dtype):
    rows = [torch.tensor([[1.0, -2.0, 0.5]], dtype=dtype), torch.tensor([[1, 4, 0]], dtype=dtype)]
    mean = Simulation("natural", {"w": rows[0]}, size=2).step([{"w": row} for row in rows]).means[0]
    assert mean["w"].dtype == dtype
    assert mean["w"].tolist() == [[1, 1, 0.25]]


def test_nine_bits_for_an_element():
    result = Simulation("natural", {"w": torch.empty(9, 11)}, size=2).step([{}, {}])
    assert result.bytes_sent == [99 + 13] * 2


@pytest.mark.parametrize(
    ("size", "dtype", "kind"),
    [(7, torch.float32, Gather), (8, torch.float32, Mean), (3, torch.bfloat16, Gather),
     (4, torch.bfloat16, Mean), (14, torch.float64, Gather), (15, torch.float64, Mean)],
)  # fmt: skip
def test_dense_where_that_moves_fewer_bytes(size, dtype, kind):
    messages = []
    params = {"w": torch.empty(4, 4, dtype=dtype)}
    simulation = Simulation(Natural(), params, size=size, tap=lambda r, m: messages.append(m))
    simulation.step([{}] * size)
    assert type(messages[0]) is kind
