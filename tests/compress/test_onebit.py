from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress import OneBit, Simulation


def test_by_hand():
    grads = {"w": torch.tensor([[4.0, -1.0, 0.5, 3.0], [-1.0, -3.0, -2.0, -6.0]])}
    simulation = Simulation("onebit", grads, size=1)
    out = simulation.step([grads]).means[0]["w"]
    assert out.tolist() == [[2.5, -1.0, 2.5, 2.5], [-3.0, -3.0, -3.0, -3.0]]
    residual = simulation.groups[0].states[0]["residual"]["w"]
    assert residual.tolist() == [[1.5, 0.0, -2.0, 0.5], [2.0, 0.0, 1.0, -3.0]]


def test_a_whole_parameter_by_hand():
    grads = {"w": torch.tensor([[4.0, -1.0, 0.5, 3.0], [-1.0, -3.0, -2.0, -6.0]])}
    out = Simulation("onebit:per=parameter", grads, size=1).step([grads]).means[0]["w"]
    torch.testing.assert_close(out, torch.where(grads["w"] >= 0, 2.5, -2.6))


def test_zeros_are_among_the_non_negative():
    grads = {"w": torch.tensor([[0.0, 4.0, -2.0, 0.0, 0.0], [0.0] * 5])}
    out = Simulation("onebit", grads, size=1).step([grads]).means[0]["w"]
    assert out.tolist() == [[1.0, 1.0, -2.0, 1.0, 1.0], [0.0] * 5]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(3, 12), st.integers(0, 2**32 - 1))
def test_what_is_left_adds_up_to_nothing_in_each_half_of_a_row(rows, width, seed):
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    simulation = Simulation(OneBit(), {"w": p}, size=1)
    out = simulation.step([{"w": p}]).means[0]["w"]
    left = simulation.groups[0].states[0]["residual"]["w"]
    for half in (p >= 0, p < 0):
        torch.testing.assert_close((left * half).sum(1), torch.zeros(rows).double())
    torch.testing.assert_close(
        p.square().sum(), out.square().sum() + left.square().sum(), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize(("spec", "scales"), [("onebit", 64), ("onebit:per=parameter", 1)])
def test_bytes(spec, scales):
    grads = {"w": torch.ones(64, 512)}
    (sent,) = Simulation(spec, grads, size=1).step([grads]).bytes_sent
    assert sent == 64 * 512 / 8 + 8 * scales


def test_16_bit_gradients_are_averaged_in_fp32():
    grads = {"w": torch.full((2, 1001), 1.0).bfloat16()}
    grads["w"][0, 0] = -1000.0
    out = Simulation("onebit:error_feedback=false", grads, size=1).step([grads]).means[0]["w"]
    assert out.float().tolist() == [[-1000.0] + [1.0] * 1000, [1.0] * 1001]
