from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress import GatherV, Mean, Simulation, Threshold, bucket_of, simulate


def one_step(compressor, rows):
    """A simulation, and the mean and messages of its first step with one matrix of one row."""
    messages = []
    params = {"w": torch.empty(1, len(rows[0]))}
    simulation = Simulation(compressor, params, size=len(rows), tap=lambda _, m: messages.append(m))
    result = simulation.step([{"w": torch.tensor([row], dtype=torch.float32)} for row in rows])
    return simulation, result.means[0]["w"][0], messages


def residuals(simulation):
    return [state["residual"].flat.tolist() for state in simulation.groups[0].states]


def test_worked_example():
    rows = [[4, -1, 0.5, 3], [-1, -1, 2, 0.25]]
    simulation, mean, messages = one_step(Threshold(density=0.25, value=2.0), rows)
    assert mean.tolist() == [2, 0, 1, 1.5]
    assert residuals(simulation) == [[0, -1, 0.5, 0], [-1, -1, 0, 0.25]]
    assert [type(m) for m in messages] == [GatherV, GatherV]
    assert [m.num_bytes for m in messages] == [2 * (4 + 4), 1 * (4 + 4)]


def test_the_default_is_set_by_the_number_expected():
    """400 elements at a density of 0.01: k = 4, and 1 / (2 sqrt(4)) = 0.25."""
    row = [0.25, -0.25, 0.2499, 0.5] + [0.0] * 396
    _, mean, _ = one_step(Threshold(density=0.01), [row])
    assert mean.nonzero().flatten().tolist() == [0, 1, 3]


def test_nothing_is_sent_until_it_has_added_up():
    compressor = Threshold(density=0.1, value=1.0)
    row = [0.4, 0.0, -0.1] + [0.0] * 27
    simulation, mean, messages = one_step(compressor, [row, row])
    assert not mean.any()
    assert [m.num_bytes for m in messages] == [0, 0]
    grads = [{"w": torch.tensor([row])}] * 2
    assert not simulation.step(grads).means[0]["w"].any()
    third = simulation.step(grads).means[0]["w"][0]
    torch.testing.assert_close(third[0].item(), 1.2, rtol=1e-6, atol=0)
    assert not third[1:].any()


def test_a_jump_in_scale_meets_the_cap():
    """Everything is above, and only the largest travel."""
    row = [1e6 + i for i in range(200)]
    simulation, mean, messages = one_step(Threshold(density=0.02, headroom=2.5), [row, row])
    assert mean.nonzero().flatten().tolist() == list(range(190, 200))  # 2.5 times k = 4
    assert [m.num_bytes for m in messages] == [10 * 8] * 2
    assert residuals(simulation)[0] == row[:190] + [0.0] * 10


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=20, max_size=80),
    st.floats(0.01, 0.3),
    st.floats(1.0, 20.0),
    st.sampled_from([1e-40, 1e-3, 1.0, 1e20]),
)
def test_never_more_than_the_cap(values, density, headroom, value):
    compressor = Threshold(density=density, value=value, headroom=headroom)
    _, _, messages = one_step(compressor, [values])
    assert messages[0].num_bytes <= headroom * max(density * len(values), 1) * 8


def test_zeros_are_not_sent_however_low_the_threshold():
    row = [0.0, 1e-3, 0.0, -2.0, 0.0, 0.0, 0.0, 0.0]
    _, mean, messages = one_step(Threshold(density=0.2, value=1e-60), [row])
    assert messages[0].num_bytes == 2 * 8
    torch.testing.assert_close(mean, torch.tensor(row))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("headroom", [1.0, 10.0])
def test_a_bad_number_shows_without_feedback(bad, headroom):
    compressor = Threshold(density=0.1, value=1e30, headroom=headroom, error_feedback=False)
    buckets = [bucket_of({"w": torch.empty(1, 40)}, torch.float32, rank=r, size=2) for r in (0, 1)]
    buckets[1].flat[17] = bad
    assert not any(o.mean.is_finite() for o in simulate(compressor, buckets, [{}, {}]))


@pytest.mark.parametrize(
    ("density", "size", "kind"), [(0.49, 2, GatherV), (0.5, 2, Mean), (0.24, 4, GatherV)]
)
def test_dense_where_the_number_expected_makes_it_cheaper(density, size, kind):
    params = {"w": torch.empty(10, 10)}
    buckets = [bucket_of(params, torch.float32, rank=r, size=size) for r in range(size)]
    compressor, seen = Threshold(density), []
    simulate(compressor, buckets, [{}] * size, tap=lambda _, m: seen.append(type(m)))
    assert seen == [kind] * size
    assert compressor.helps((10, 10)) is (density < 0.5)
    assert not compressor.helps((100,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value": -1.0}, "value must be positive, or 0"),
        ({"value": float("nan")}, "value must be positive, or 0"),
        ({"value": float("inf")}, "value must be positive, or 0"),
        ({"headroom": 0.5}, "headroom must be a number from 1 up"),
        ({"headroom": float("inf")}, "headroom must be a number from 1 up"),
        ({"density": 0.0}, "density must be in"),
    ],
)
def test_settings_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=f"threshold: {message}"):
        Threshold(**options)
