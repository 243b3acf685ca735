from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress import GatherV, GaussianK, Mean, Simulation, bucket_of, simulate
from mpicomp.compress.gaussiank import mean_and_deviation, normal_threshold


def bell(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def double_exponential(numel, seed=0):
    draw = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, (numel,), generator=draw) * 2.0 - 1.0
    return torch.empty(numel).exponential_(generator=draw) * sign


def chosen(compressor, flat):
    """The indices that one rank sends."""
    bucket = bucket_of({"w": flat.view(1, -1)}, flat.dtype, rank=0, size=1)
    bucket.flat.copy_(flat)
    (outcome,) = simulate(compressor, [bucket], [compressor.init(bucket)])
    return outcome.sent.indices.long()


# ------------------------------------------------------------------------------------ statistics


def test_mean_and_deviation_by_hand():
    assert mean_and_deviation(torch.tensor([1.0, 2.0, 3.0, 4.0])) == (2.5, math.sqrt(1.25))
    mean, deviation = mean_and_deviation(torch.full((200_001,), 0.1))  # several blocks
    assert mean == pytest.approx(0.1, rel=1e-7)
    assert deviation < 1e-8


def test_squares_beyond_fp32():
    assert mean_and_deviation(torch.tensor([1e30, -1e30])) == pytest.approx((0.0, 1e30), rel=1e-6)
    assert mean_and_deviation(torch.tensor([1e-30, -1e-30])) == pytest.approx((0, 1e-30), rel=1e-6)


@pytest.mark.parametrize(
    ("ratio", "quantile"), [(0.3173105, 1.0), (0.05, 1.959964), (0.01, 2.575829), (0.001, 3.290527)]
)
def test_two_sided_quantiles(ratio, quantile):
    assert normal_threshold(0.0, 1.0, ratio) == pytest.approx(quantile, rel=1e-6)
    assert normal_threshold(0.0, 2.5, ratio) == pytest.approx(2.5 * quantile, rel=1e-6)
    assert normal_threshold(-1.0, 1.0, ratio) == pytest.approx(1.0 + quantile, rel=1e-6)
    assert normal_threshold(3.0, 0.0, ratio) == 3.0


# ------------------------------------------------------------------------------------- selection


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("draw", [bell, double_exponential])
@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_two_thirds_to_four_thirds(draw, density, shift):
    flat = draw(100_000) * 3e-4 + 3e-4 * shift
    k = GaussianK(density).num_kept(flat.numel())
    indices = chosen(GaussianK(density), flat)
    assert 2 / 3 * k <= indices.numel() <= 4 / 3 * k
    smallest = flat[indices].abs().min()
    assert int((flat.abs() >= smallest).sum()) == indices.numel()  # they are the largest


@pytest.mark.parametrize("density", [0.1, 0.01])
def test_no_correction_is_needed_for_a_normal_distribution(density):
    count = chosen(GaussianK(density, corrections=0), bell(100_000)).numel()
    assert count == pytest.approx(density * 100_000, rel=0.1)


@pytest.mark.parametrize("density", [0.3, 0.1, 0.01])
def test_bound_for_bell_shapes(density):
    """What is left has at most (1 - k / n)^2 of the squared norm, k the number sent."""
    flat = bell(50_000, seed=3).double()
    indices = chosen(GaussianK(density), flat)
    left = flat.clone()
    left[indices] = 0.0
    assert left.square().sum() <= (1 - indices.numel() / 50_000) ** 2 * flat.square().sum()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=5, max_size=60),
    st.floats(0.01, 0.45),
    st.integers(0, 4),
)
def test_never_above_the_bound_and_never_nothing(values, density, corrections):
    flat = torch.tensor(values)
    compressor = GaussianK(density, corrections=corrections)
    count = chosen(compressor, flat).numel()
    assert 3 * count <= 4 * compressor.num_kept(flat.numel())
    assert count > 0 or not flat.any()


def test_magnitudes_all_alike_give_exactly_k():
    for flat in (torch.full((1000,), -0.1), torch.full((1000,), 0.1) * bell(1000).sign()):
        indices = chosen(GaussianK(0.05), flat)
        assert indices.unique().numel() == indices.numel() == 50


def test_a_jump_in_scale_does_not_widen_the_message():
    """Half of the elements a million times larger than the others: a threshold hits neither."""
    flat = bell(10_000)
    flat[::2] *= 1e6
    count = chosen(GaussianK(0.01), flat).numel()
    assert 3 * count <= 4 * 100


def test_an_outlier_is_sent_and_the_rest_follows():
    """One huge element hides the others for one step only."""
    flat = bell(10_000).view(100, 100)
    flat[3, 7] = 1e9
    simulation = Simulation(GaussianK(0.01), {"w": flat}, size=1)
    first = simulation.step([{"w": flat}])
    assert first.means[0]["w"].nonzero().tolist() == [[3, 7]]
    second = simulation.step([{"w": torch.zeros(100, 100)}])
    assert 67 <= second.bytes_sent[0] / 8 <= 133


def test_no_threshold_found_means_the_largest():
    """+1 and -1: the quantile 1.15 is above them all, and no correction is allowed."""
    flat = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert normal_threshold(0.0, 1.0, 0.25) > 1.0
    assert chosen(GaussianK(0.25, corrections=0), flat).numel() == 1


def test_zeros_send_nothing():
    assert chosen(GaussianK(0.1), torch.zeros(100)).numel() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_shows_without_feedback(bad):
    compressor = GaussianK(0.1, error_feedback=False)
    buckets = [bucket_of({"w": torch.empty(1, 40)}, torch.float32, rank=r, size=2) for r in (0, 1)]
    for bucket in buckets:
        bucket.flat.copy_(bell(40))
    buckets[1].flat[17] = bad
    assert not any(o.mean.is_finite() for o in simulate(compressor, buckets, [{}, {}]))


@pytest.mark.parametrize(
    ("density", "size", "kind"), [(0.49, 2, GatherV), (0.5, 2, Mean), (0.24, 4, GatherV)]
)
def test_dense_where_the_number_aimed_at_makes_it_cheaper(density, size, kind):
    buckets = [
        bucket_of({"w": torch.empty(100)}, torch.float32, rank=r, size=size) for r in range(size)
    ]
    compressor, seen = GaussianK(density), []
    simulate(compressor, buckets, [{}] * size, tap=lambda _, m: seen.append(type(m)))
    assert seen == [kind] * size


@pytest.mark.parametrize("corrections", [-1, 1.5])
def test_settings_that_make_no_sense(corrections):
    with pytest.raises(ValueError, match="gaussiank: corrections must be an integer from 0 up"):
        GaussianK(corrections=corrections)
