from __future__ import annotations

import pytest
import torch

from mpicomp.compress import Simulation
from mpicomp.compress.residual import rounded_to_bfloat16

PARAMS = {"w": torch.empty(30, 40), "v": torch.empty(7, 9).T}


def grads(step, size=2):
    draw = torch.Generator().manual_seed(step)
    return [
        {n: torch.randn(p.shape, generator=draw) for n, p in PARAMS.items()} for _ in range(size)
    ]


def memory_bytes(spec):
    state = Simulation(spec, PARAMS, size=1).groups[0].states[0]
    slots = [slot for name, slot in state.items() if name in ("residual", "residual_scale")]
    return sum(t.numel() * t.element_size() for slot in slots for t in slot.values())


def test_bytes_of_memory():
    assert memory_bytes("topk") == 4 * (1200 + 63)
    assert memory_bytes("topk:residual=bf16") == 2 * (1200 + 63)
    assert memory_bytes("topk:residual=int8") == 1200 + 63 + 4 * (5 + 1)


@pytest.mark.parametrize(("residual", "error"), [("bf16", 2**-7), ("int8", 1 / 127)])
def test_a_narrow_residual_is_the_exact_one_rounded(residual, error):
    narrow, exact = (
        Simulation(spec, PARAMS, size=2)
        for spec in (f"topk:density=0.1,residual={residual}", "topk:density=0.1")
    )
    zeros = [{n: torch.zeros(p.shape) for n, p in PARAMS.items()}] * 2
    for simulation in (narrow, exact):
        simulation.step(grads(0))
    want = exact.groups[0].states[1]["residual"]
    group = narrow.groups[0]
    group.compressor.load_(group.buckets[1], group.states[1], "w", None)
    group.compressor.load_(group.buckets[1], group.states[1], "v", None)
    for name, got in group.buckets[1].items():
        assert (got - want[name]).abs().max() <= error * want[name].abs().max()
        assert not torch.equal(got, want[name])
    assert narrow.step(zeros).good


@pytest.mark.parametrize("residual", ["bf16", "int8"])
def test_small_remainders_arrive_on_average(residual):
    """Beside 512, a remainder of 0.25 a step is far below what either type can hold."""
    params = {"w": torch.empty(1, 4096)}
    simulation = Simulation(f"topk:density=0.0003,residual={residual}", params, size=1)
    row = torch.full((1, 4096), 0.25)
    row[0, 0] = 1e6  # the one element that is sent
    row[0, 1::256] = 512.0
    steps = 40
    for step in range(steps):
        simulation.step([{"w": row if step == 0 else torch.where(row == 0.25, row, 0.0)}])
    group = simulation.groups[0]
    group.compressor.load_(group.buckets[0], group.states[0], "w", None)
    rest = group.buckets[0].flat[(row == 0.25).view(-1)]
    error = rest.std() / len(rest) ** 0.5
    assert (rest.mean() - 0.25 * steps).abs() <= 4 * error + 0.3  # what was sent meanwhile


def test_rounding_is_unbiased_and_keeps_what_fits():
    draw = torch.Generator().manual_seed(0)
    x = torch.full((100_000,), 1.0 + 2**-10)
    rounded = rounded_to_bfloat16(x, draw).double()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    error = rounded.std() / len(x) ** 0.5
    assert (rounded.mean() - x[0]).abs() <= 4 * error
    fits = torch.tensor([0.0, -0.0, 1.5, -256.0, 2.0**-126])
    assert torch.equal(rounded_to_bfloat16(fits, draw).float(), fits)


def test_skipped_parameters_keep_their_codes():
    for residual in ("bf16", "int8"):
        simulation = Simulation(f"topk:density=0.1,residual={residual}", PARAMS, size=1)
        simulation.step(grads(0, 1))
        state = simulation.groups[0].states[0]
        before = state["residual"]["v"].clone()
        simulation.step([{"w": grads(1, 1)[0]["w"], "v": None}])
        assert torch.equal(state["residual"]["v"], before)


def test_draws_differ_between_ranks_and_steps():
    simulation = Simulation("topk:density=0.01,residual=bf16", PARAMS, size=2)
    same = grads(0, 1) * 2
    simulation.step(same)
    first, second = (state["residual"]["w"] for state in simulation.groups[0].states)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("residual", ["bf16", "int8"])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 3.4e38), (torch.float64, 1e60)])
def test_a_residual_too_large_for_its_type_does_not_spoil_later_steps(residual, dtype, size):
    like = {"w": torch.empty(40, 40, dtype=dtype)}
    simulation = Simulation(f"topk:residual={residual}", like, size=1)
    huge = torch.full((40, 40), size, dtype=dtype)
    assert simulation.step([{"w": huge}]).good
    assert all(simulation.step([{"w": torch.zeros_like(huge)}]).good for _ in range(3))
