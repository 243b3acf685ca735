from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress import SIDCo, Simulation
from mpicomp.compress.sidco import (
    Moments,
    choose,
    exponential_quantile,
    gamma_quantile,
    moments,
    pareto_quantile,
)

FITS = ["exponential", "gamma", "pareto"]
EULER = 0.5772156649


def uniform(numel, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(numel, generator=draw, dtype=torch.float64)


def bell(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def signed(magnitudes, seed=9):
    return (magnitudes * (uniform(magnitudes.numel(), seed) - 0.5).sign()).float()


def double_exponential(numel):
    return signed(-uniform(numel).log())


def double_gamma(numel):
    """Shape 1/2: the square of a normal variable."""
    return signed(bell(numel).square())


def double_pareto(numel):
    """Shape 0.2 and scale 1."""
    return signed((uniform(numel) ** -0.2 - 1.0) / 0.2)


# ------------------------------------------------------------------------------------- quantiles


def test_moments_by_hand():
    flat = torch.tensor([1.0, -2.0, 0.0, 4.0])
    whole = moments(flat, 0.0, logs=True)  # of 1, 2, 4
    assert (whole.count, whole.mean) == (3, 7 / 3)
    assert whole.variance == pytest.approx(21 / 3 - 49 / 9)
    assert whole.mean_log == pytest.approx(math.log(2.0))
    assert moments(flat, 1.0, logs=False) == pytest.approx(Moments(2, 2.0, 1.0), nan_ok=True)
    assert moments(flat, 4.0, logs=False).count == 0
    assert flat.tolist() == [1.0, -2.0, 0.0, 4.0]


def test_moments_of_several_blocks_and_of_large_numbers():
    flat = torch.full((200_001,), 2e30)
    flat[::2] = -1e30
    found = moments(flat, 0.0, logs=False)
    assert found.count == 200_001
    assert found.mean == pytest.approx(1.5e30, rel=1e-4)
    assert found.variance == pytest.approx(0.25e60, rel=1e-4)


@pytest.mark.parametrize("ratio", [0.25, 0.01, 0.001])
def test_quantiles_of_an_exponential_distribution(ratio):
    """All three contain it; the gamma fit's shape is an approximation."""
    of = Moments(1, 2.0, 4.0, math.log(2.0) - EULER)
    exact = 2.0 * math.log(1 / ratio)
    assert exponential_quantile(of, ratio) == pytest.approx(exact)
    assert pareto_quantile(of, ratio) == pytest.approx(exact)
    assert gamma_quantile(of, ratio) == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize(("ratio", "exact"), [(0.05, 3.841459), (0.01, 6.634897), (0.5, 0.454936)])
def test_quantiles_of_a_gamma_distribution(ratio, exact):
    """Chi-square with one degree of freedom."""
    of = Moments(1, 1.0, 2.0, math.log(2.0) - EULER - 2 * math.log(2.0))
    assert gamma_quantile(of, ratio) == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("shape", [-1.0, -0.3, 0.2, 0.4])
@pytest.mark.parametrize("ratio", [0.25, 0.01])
def test_quantiles_of_a_pareto_distribution(shape, ratio):
    mean, variance = 1 / (1 - shape), 1 / ((1 - shape) ** 2 * (1 - 2 * shape))
    exact = (ratio**-shape - 1) / shape
    assert pareto_quantile(Moments(1, mean, variance), ratio) == pytest.approx(exact)


def test_pareto_with_shape_minus_one_is_uniform():
    assert pareto_quantile(Moments(1, 0.5, 1 / 12), 0.1) == pytest.approx(0.9)


@pytest.mark.parametrize("quantile", [pareto_quantile, gamma_quantile])
def test_numbers_all_alike_are_their_own_quantiles(quantile):
    assert quantile(Moments(5, 3.0, 0.0, math.log(3.0)), 0.01) == 3.0
    assert quantile(Moments(5, 3.0, -1e-15, math.log(3.0) + 1e-15), 0.01) == 3.0


# ------------------------------------------------------------------------------------- selection


@pytest.mark.parametrize(
    ("draw", "fit"),
    [(double_exponential, "exponential"), (double_exponential, "gamma"),
     (double_exponential, "pareto"), (double_gamma, "gamma"), (double_pareto, "pareto")],
)  # fmt: skip
@pytest.mark.parametrize("density", [0.1, 0.01])
def test_one_stage_suffices_for_the_right_distribution(draw, fit, density):
    flat = draw(200_000)
    k = int(200_000 * density)
    assert choose(flat, k, stages=1, fit=fit).numel() == pytest.approx(k, rel=0.12)


@pytest.mark.parametrize("draw", [bell, double_exponential, double_gamma, double_pareto])
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_four_stages_suffice_for_others(draw, fit, density):
    flat = draw(200_000) * 1e-4
    k = int(200_000 * density)
    indices = choose(flat, k, stages=4, fit=fit)
    assert indices.numel() == pytest.approx(k, rel=0.2)
    smallest = flat[indices].abs().min()
    assert int((flat.abs() >= smallest).sum()) == indices.numel()  # they are the largest


def test_two_stages_by_hand():
    """Mean 9/4 of eight: t = 9/4 ln 4 = 3.1; excess of 4 and 6, mean 1.9; k = 1 of 2: + ln 2."""
    flat = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0, 2.0, -4.0, 6.0])
    first = 2.25 * math.log(4.0)
    second = first + (5.0 - first) * math.log(2.0)
    assert 4.0 < second < 6.0
    assert choose(flat, 1, stages=2, fit="exponential").tolist() == [7]
    assert choose(flat, 1, stages=1, fit="exponential").tolist() == [7]  # 2.25 ln 8 = 4.7


def test_zeros_take_no_part_in_the_fit():
    flat = torch.zeros(200_000)
    flat[::10] = double_exponential(20_000)
    assert choose(flat, 200, stages=1, fit="exponential").numel() == pytest.approx(200, rel=0.2)


def test_fewer_non_zeros_than_wanted_are_all_sent():
    flat = torch.zeros(1000)
    flat[[3, 500, 999]] = torch.tensor([1.0, -5.0, 1e-6])
    for fit in FITS:
        assert choose(flat, 10, stages=3, fit=fit).tolist() == [3, 500, 999]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=5, max_size=60),
    st.floats(0.01, 0.45),
    st.integers(1, 4),
    st.sampled_from(FITS),
)
def test_never_more_than_twice_as_many_and_never_nothing(values, density, stages, fit):
    flat = torch.tensor(values)
    k = SIDCo(density).num_kept(flat.numel())
    indices = choose(flat, k, stages=stages, fit=fit)
    assert indices.unique().numel() == indices.numel() <= 2 * k
    assert indices.numel() > 0 or not flat.any()


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_jump_in_scale_does_not_widen_the_message(stages, fit):
    flat = bell(10_000)
    flat[::2] *= 1e6
    assert 1 <= choose(flat, 100, stages=stages, fit=fit).numel() <= 200


@pytest.mark.parametrize("fit", FITS)
def test_magnitudes_all_alike(fit):
    indices = choose(bell(1000).sign() * 0.1, 50, stages=1, fit=fit)
    assert 25 <= indices.numel() <= 100
    assert choose(torch.zeros(1000), 50, stages=2, fit=fit).numel() == 0


# ------------------------------------------------------------------------------------ adaptation


def stages_after(spec, steps, draw, size=2):
    """The number of stages after each of ``steps``, the same on all ranks."""
    simulation = Simulation(spec, {"w": torch.empty(100, 200), "v": torch.empty(1, 9)}, size=size)
    found = []
    for step in range(max(steps)):
        grads = [
            {"w": draw(step * size + rank).view(100, 200), "v": torch.zeros(1, 9)}
            for rank in range(size)
        ]
        simulation.step(grads)
        stages = {float(t) for s in simulation.groups[0].states for t in s["stages"].values()}
        assert len(stages) == 1
        found.append(stages.pop())
    return [found[step - 1] for step in steps]


def test_stages_are_added_every_five_steps_until_the_count_is_right():
    """One exponential finds 3 % of the wanted tail of a bell, two find 57 %, three all of it."""
    spec = "sidco:density=0.01,error_feedback=false"
    found = stages_after(spec, [4, 5, 9, 10, 25], lambda seed: bell(20_000, seed))
    assert found == [1, 2, 2, 3, 3]


def test_no_stage_is_added_where_the_fit_is_right():
    spec = "sidco:density=0.01,error_feedback=false"
    draw = double_exponential(20_000)
    assert stages_after(spec, [5, 10], lambda seed: draw) == [1, 1]


def test_too_many_are_a_reason_too():
    spec = "sidco:density=0.01,error_feedback=false"
    draw = double_gamma(20_000)
    assert stages_after(spec, [5], lambda seed: draw) == [2]


def test_stages_stop_at_the_limit():
    spec = "sidco:density=0.01,max_stages=2"
    assert stages_after(spec, [10, 15], lambda seed: bell(20_000, seed)) == [2, 2]


def test_what_no_rank_used_keeps_its_memory():
    params = {"used": torch.empty(50, 50), "unused": torch.empty(50, 50)}
    simulation = Simulation("sidco:density=0.01", params, size=2)
    for step in range(5):
        simulation.step([{"used": bell(2500, step).view(50, 50)}] * 2)
    (state, _) = simulation.groups[0].states
    assert {slot: float(state[slot]["unused"]) for slot in ("stages", "filled", "step")} == {
        "stages": 1, "filled": 0, "step": 0,
    }  # fmt: skip
    assert int(state["step"]["used"]) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fit": "normal"}, "fit must be one of exponential, gamma, pareto, got 'normal'"),
        ({"max_stages": 0}, "max_stages must be an integer from 1 up, got 0"),
        ({"density": 2.0}, "density must be in"),
    ],
)
def test_settings_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=f"sidco: {message}"):
        SIDCo(**options)
