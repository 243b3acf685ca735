from __future__ import annotations

import pytest
import torch

from mpicomp.compress import Simulation, TopK, Values, Warmup, parse

PARAMS = {"w": torch.empty(20, 20)}


def test_densities_follow_the_list_and_then_the_option():
    simulation = Simulation("topk:density=0.01,warmup=0.25/0.05,warmup_steps=2", PARAMS, size=1)
    counts = []
    for step in range(6):
        draw = torch.Generator().manual_seed(step)
        result = simulation.step([{"w": torch.randn(20, 20, generator=draw)}])
        counts.append(int(result.means[0]["w"].count_nonzero()))
    assert counts == [100, 100, 20, 20, 4, 4]


def test_nothing_is_lost_on_the_way():
    simulation = Simulation("topk:density=0.01,warmup=0.25/0.05,warmup_steps=1", PARAMS, size=2)
    given, got = torch.zeros(20, 20), torch.zeros(20, 20)
    for step in range(4):
        draw = torch.Generator().manual_seed(step)
        grads = [{"w": torch.randn(20, 20, generator=draw)} for _ in range(2)]
        given += (grads[0]["w"] + grads[1]["w"]) / 2
        got += simulation.step(grads).means[0]["w"]
    (group,) = simulation.groups
    rest = sum(state["residual"]["w"] for state in group.states) / 2
    torch.testing.assert_close(got + rest, given)


@pytest.mark.parametrize("spec", ["none", "powersgd"])
def test_a_density_is_needed(spec):
    with pytest.raises(ValueError, match="warmup: inner must have an option density"):
        parse(f"{spec}:warmup=0.5,warmup_steps=1")


@pytest.mark.parametrize(
    ("densities", "steps", "contract"),
    [
        ([0.1, 0.2], 5, "densities must be a tuple"),
        ((), 5, "densities must be a tuple"),
        ((0.5,), 2.5, "steps must be an integer"),
        ((0.5,), 0, "steps must be an integer"),
    ],
)
def test_what_would_fail_in_the_first_step_fails_at_once(densities, steps, contract):
    with pytest.raises(ValueError, match=contract):
        Warmup(TopK(), densities, steps)


def test_the_order_of_wrappers_is_named():
    with pytest.raises(ValueError, match="put Warmup around the method itself"):
        Warmup(Values(TopK(), "int8"), (0.1,), 2)
