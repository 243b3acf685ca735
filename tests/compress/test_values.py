from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpicomp.compress import Feedback, Gather, Simulation, TopK, Values

PARAMS = {"w": torch.empty(100, 100)}


def step(simulation, seed=0, factor=1.0):
    draw = torch.Generator().manual_seed(seed)
    grads = [{"w": factor * torch.randn(100, 100, generator=draw)} for _ in range(simulation.size)]
    return grads, simulation.step(grads)


@pytest.mark.parametrize(("dtype", "value_bytes"), [("fp16", 200), ("bf16", 200), ("int8", 104)])
def test_bytes(dtype, value_bytes):
    """100 values, their int32 indices, and one fp32 scale for int8."""
    simulation = Simulation(f"topk:density=0.01,values={dtype}", PARAMS, size=2)
    assert step(simulation)[1].bytes_sent == [value_bytes + 400] * 2


@pytest.mark.parametrize(("dtype", "error"), [("fp16", 2**-11), ("bf16", 2**-8), ("int8", 1 / 254)])
def test_the_same_elements_with_rounded_values(dtype, error):
    narrow = Simulation(f"topk:density=0.01,values={dtype}", PARAMS, size=1)
    exact = Simulation("topk:density=0.01", PARAMS, size=1)
    got, want = (step(s)[1].means[0]["w"] for s in (narrow, exact))
    assert torch.equal(got != 0, want != 0)
    assert not torch.equal(got, want)
    assert (got - want).abs().max() <= error * want.abs().max()


@given(st.sampled_from(["fp16", "bf16", "int8"]), st.integers(1, 4))
def test_what_rounding_takes_away_stays_in_the_residual(dtype, size):
    simulation = Simulation(Feedback(Values(TopK(0.02), dtype)), PARAMS, size=size)
    given, got = torch.zeros(100, 100), torch.zeros(100, 100)
    for seed in range(3):
        grads, result = step(simulation, seed)
        given += sum(g["w"] for g in grads) / size
        got += result.means[-1]["w"]
    (group,) = simulation.groups
    rest = sum(state["residual"]["w"] for state in group.states) / size
    torch.testing.assert_close(got + rest, given, rtol=1e-5, atol=1e-5)


def test_indices_are_not_touched():
    seen = []
    simulation = Simulation(
        "topk:density=0.01,values=int8", PARAMS, size=2, tap=lambda _, m: seen.append(m.tensors)
    )
    step(simulation)
    assert [t.dtype for t in seen[0]] == [torch.uint8, torch.float32, torch.int32]


def test_it_is_one_gather():
    kinds = []
    simulation = Simulation(
        "topk:density=0.01,values=bf16", PARAMS, size=1, tap=lambda _, m: kinds.append(type(m))
    )
    step(simulation)
    assert kinds == [Gather]


@pytest.mark.parametrize("spec", ["topk:density=0.02", "dgc:density=0.02,momentum=0"])
def test_what_is_above_the_range_waits_in_the_residual(spec):
    """A loss scale could not help: a memory is in unscaled units."""
    simulation = Simulation(f"{spec},values=fp16", PARAMS, size=2)
    for seed in range(3):
        result = step(simulation, seed, factor=1e6)[1]
        assert result.good
        assert result.means[0]["w"].abs().max() == 65504


def test_without_a_residual_a_scaler_has_to_see_it():
    simulation = Simulation("topk:density=0.02,error_feedback=false,values=fp16", PARAMS, size=2)
    assert not step(simulation, factor=1e6)[1].good
