from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress import Broadcast, Mean, RandomK, Simulation, bucket_of, parse, simulate
from mpicomp.compress.draws import generator
from mpicomp.compress.randomk import distinct

# ------------------------------------------------------------------------------------- the draw


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 300))
def test_distinct_indices_in_order(data, numel):
    k = data.draw(st.integers(1, numel))
    indices = distinct(numel, k, generator("test", numel, k)).tolist()
    assert len(indices) == k
    assert indices == sorted(set(indices))
    assert 0 <= indices[0] <= indices[-1] < numel


def test_the_cost_does_not_depend_on_what_is_drawn_from():
    """A permutation of 2^50 numbers would not fit into any memory."""
    indices = distinct(2**50, 1000, generator("test"))
    assert indices.unique().numel() == 1000
    assert indices.max() > 2**49


@pytest.mark.parametrize(("numel", "k"), [(9, 2), (7, 1), (6, 2), (5, 3), (10, 2)])
def test_every_set_is_as_likely(numel, k):
    """Chi-square over all sets, at six standard deviations; both ways of drawing are in it."""
    sets = list(itertools.combinations(range(numel), k))
    draw, counts = generator("test", numel, k), dict.fromkeys(sets, 0)
    for _ in range(100 * len(sets)):
        counts[tuple(distinct(numel, k, draw).tolist())] += 1
    chi_square = sum((count - 100) ** 2 / 100 for count in counts.values())
    freedom = len(sets) - 1
    assert abs(chi_square - freedom) < 6 * math.sqrt(2 * freedom)


def test_large_and_small_indices_are_as_likely():
    """Of 3 * 2^30 numbers, those below 2^30 would come twice as often by a 32-bit remainder."""
    indices = distinct(3 * 2**30, 30_000, generator("test"))
    third = int((indices < 2**30).sum())
    assert abs(third - 10_000) < 5 * math.sqrt(30_000 * 2 / 9)


# --------------------------------------------------------------------------------- the exchange


def traced(spec, shape, size):
    """A simulation, and the list its messages go to."""
    messages = []
    simulation = Simulation(
        spec, {"w": torch.empty(shape)}, size=size, tap=lambda _, m: messages.append(m)
    )
    return simulation, messages


def ones(size, shape=(10, 10)):
    return [{"w": torch.ones(shape)} for _ in range(size)]


def test_values_only_and_a_seed_in_the_first_step():
    simulation, messages = traced("randomk:density=0.07", (10, 10), 3)
    simulation.step(ones(3))
    assert [type(m) for m in messages] == [Broadcast] * 3 + [Mean] * 3
    assert [m.num_bytes for m in messages] == [8] * 3 + [7 * 4] * 3
    messages.clear()
    simulation.step(ones(3))
    assert [type(m) for m in messages] == [Mean] * 3


def test_all_ranks_send_the_same_elements_and_new_ones_each_step():
    simulation, _ = traced("randomk:density=0.1,error_feedback=false", (10, 10), 2)
    seen = []
    for step in range(4):
        grads = [{"w": torch.full((10, 10), step + 1.0 + 2 * rank)} for rank in (0, 1)]
        mean = simulation.step(grads).means[0]["w"]
        chosen = mean.view(-1).nonzero().flatten()
        assert chosen.numel() == 10
        assert torch.equal(mean.view(-1)[chosen], torch.full((10,), step + 2.0))  # of both ranks
        seen.append(tuple(chosen.tolist()))
    assert len(set(seen)) == 4


def test_other_seeds_draw_other_elements_and_equal_seeds_the_same():
    def first(spec):
        simulation, _ = traced(spec, (10, 10), 1)
        return simulation.step(ones(1)).means[0]["w"]

    assert torch.equal(first("randomk:density=0.1"), first("randomk:density=0.1,seed=0"))
    assert not torch.equal(first("randomk:density=0.1"), first("randomk:density=0.1,seed=1"))


def test_with_feedback_everything_is_sent_in_the_end():
    simulation, _ = traced("randomk:density=0.1", (5, 8), 2)
    sent = torch.zeros(5, 8)
    for _ in range(150):  # the chance to miss any is below 40 * 0.9^150
        sent += simulation.step(ones(2, (5, 8))).means[0]["w"]
    assert sent.all()
    left = simulation.groups[0].states[0]["residual"]["w"]
    torch.testing.assert_close(sent + left, torch.full((5, 8), 150.0))


def test_with_feedback_nothing_is_scaled():
    simulation, _ = traced("randomk:density=0.25", (2, 8), 1)
    mean = simulation.step(ones(1, (2, 8))).means[0]["w"]
    assert sorted(mean.view(-1).tolist()) == [0.0] * 12 + [1.0] * 4


def test_rescaled_it_is_right_on_average():
    """Each element has the variance m^2 (n / k - 1): within four standard errors of 2000 steps."""
    spec = "randomk:density=0.25,error_feedback=false,rescale=true"
    simulation, _ = traced(spec, (3, 4), 2)
    grads = [{"w": torch.arange(12.0).view(3, 4) - 5 + 4 * rank} for rank in (0, 1)]
    mean = torch.arange(12.0).view(3, 4) - 3
    total = torch.zeros(3, 4)
    for _ in range(2000):
        total += simulation.step(grads).means[0]["w"]
    error = (total / 2000 - mean).abs()
    assert bool((error <= 4 * mean.abs() * math.sqrt((4 - 1) / 2000)).all())


@pytest.mark.parametrize(("value", "mean"), [(600.0, 60_000.0), (1000.0, float("inf"))])
def test_rescaling_shows_what_the_type_of_the_gradient_cannot_hold(value, mean):
    compressor = RandomK(0.01, error_feedback=False, rescale=True)
    bucket = bucket_of({"w": torch.empty(1, 100)}, torch.float16, rank=0, size=1)
    bucket.flat.fill_(value)
    outcome = simulate(compressor, [bucket], [compressor.init(bucket)])[0]
    assert outcome.mean.values.tolist() == [mean]
    assert outcome.mean.is_finite() == (mean < 65504)


def test_a_bad_step_is_drawn_again():
    simulation, _ = traced("randomk:density=0.1", (10, 10), 1)
    twin, _ = traced("randomk:density=0.1", (10, 10), 1)
    assert not simulation.step([{"w": torch.full((10, 10), float("nan"))}]).good
    first = simulation.step(ones(1)).means[0]["w"]
    assert torch.equal(first, twin.step(ones(1)).means[0]["w"])


@pytest.mark.parametrize(("density", "kinds"), [(1.0, [Mean]), (0.99, [Broadcast, Mean])])
def test_dense_only_where_everything_is_kept(density, kinds):
    bucket = bucket_of({"w": torch.empty(10, 10)}, torch.float32, rank=0, size=1)
    compressor, seen = RandomK(density), []
    state = compressor.init(bucket)
    simulate(compressor, [bucket], [state], tap=lambda _, m: seen.append(type(m)))
    assert seen == kinds
    assert compressor.helps((10, 10)) is (density < 1.0)
    assert not compressor.helps((100,))


def test_rescaling_and_feedback_exclude_each_other():
    with pytest.raises(ValueError, match=r"rescale must be false .* set error_feedback=false"):
        RandomK(rescale=True)
    assert not parse("randomk:rescale=true,error_feedback=false").capabilities.biased
    assert parse("randomk:error_feedback=false").capabilities.biased
    with pytest.raises(ValueError, match=r"randomk: density must be in \(0, 1\], got 0"):
        RandomK(density=0.0)
