from __future__ import annotations

import pytest
import torch

from mpicomp.compress import DGC, Mean, Simulation, StartAfter

PARAMS = {"w": torch.empty(6, 5), "v": torch.empty(1, 4)}


def grads(step, size=2):
    draw = torch.Generator().manual_seed(step)
    return [
        {n: torch.randn(p.shape, generator=draw) for n, p in PARAMS.items()} for _ in range(size)
    ]


def test_dense_first_then_the_method_as_if_it_began_there():
    late = Simulation("powersgd:rank=1,start_after=3", PARAMS, size=2)
    fresh = Simulation("powersgd:rank=1", PARAMS, size=2)
    for step in range(3):
        mine = grads(step)
        mean = late.step(mine).means[1]["w"]
        torch.testing.assert_close(mean, (mine[0]["w"] + mine[1]["w"]) / 2)
    for step in range(3, 6):
        after, expected = (s.step(grads(step)).means[0]["w"] for s in (late, fresh))
        assert torch.equal(after, expected)
        assert not torch.allclose(after, (grads(step)[0]["w"] + grads(step)[1]["w"]) / 2)


def test_messages_change_at_that_step():
    seen = []
    simulation = Simulation(
        "topk:density=0.1,start_after=2", PARAMS, size=2, tap=lambda _, m: seen.append(type(m))
    )
    for step in range(4):
        simulation.step(grads(step))
    assert seen[:2] == [Mean, Mean]
    assert Mean not in seen[4:]


def test_a_bad_step_is_not_counted():
    simulation = Simulation("topk:density=0.1,start_after=1", PARAMS, size=1)
    bad = {name: torch.full(p.shape, float("nan")) for name, p in PARAMS.items()}
    assert not simulation.step([bad]).good
    mine = grads(0, 1)
    assert torch.equal(simulation.step(mine).means[0]["w"], mine[0]["w"])


def test_inner_with_momentum_is_refused():
    with pytest.raises(ValueError, match=r"use its density warm-up \(warmup=1,warmup_steps=4\)"):
        StartAfter(DGC(), 4)


def test_steps_are_an_integer():
    with pytest.raises(ValueError, match="steps must be an integer"):
        StartAfter(DGC(), 1.5)
