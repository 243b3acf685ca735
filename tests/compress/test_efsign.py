from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress import EFSign, OneBit, SignSGD, Simulation


def test_two_steps_by_hand():
    grads = {"w": torch.tensor([[4.0, -1.0], [0.5, 3.0]])}
    simulation = Simulation("efsign", grads, size=1)
    residual = simulation.groups[0].states[0]["residual"]["w"]
    assert simulation.step([grads]).means[0]["w"].tolist() == [[2.125, -2.125], [2.125, 2.125]]
    assert residual.tolist() == [[1.875, 1.125], [-1.625, 0.875]]
    # p = (5.875, 0.125, -1.125, 3.875), whose mean magnitude is 2.75
    assert simulation.step([grads]).means[0]["w"].tolist() == [[2.75, 2.75], [-2.75, 2.75]]
    assert residual.tolist() == [[3.125, -2.625], [1.625, 1.125]]


def test_each_parameter_or_row_has_its_scale():
    grads = {"a": torch.tensor([[1.0, 3.0], [10.0, -30.0]]), "b": torch.full((2, 2), -5.0)}
    means = Simulation("efsign", grads, size=1).step([grads]).means[0]
    assert means["a"].tolist() == [[11.0, 11.0], [11.0, -11.0]]
    assert means["b"].tolist() == [[-5.0, -5.0], [-5.0, -5.0]]
    means = Simulation("efsign:per=row", grads, size=1).step([grads]).means[0]
    assert means["a"].tolist() == [[2.0, 2.0], [20.0, -20.0]]


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 12), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_what_is_left_is_known_exactly(rows, width, seed):
    """|e|^2 = (1 - delta) |p|^2 with delta = |p|_1^2 / (d |p|_2^2)."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    simulation = Simulation(EFSign(error_feedback=True), {"w": p}, size=1)
    simulation.step([{"w": p}])
    left = simulation.groups[0].states[0]["residual"]["w"].square().sum()
    delta = p.abs().sum() ** 2 / (p.numel() * p.square().sum())
    torch.testing.assert_close(left, (1 - delta) * p.square().sum(), rtol=1e-10, atol=1e-12)


def test_a_zero_counts_as_positive():
    grads = {"w": torch.tensor([[0.0, -2.0], [0.0, 0.0]])}
    out = Simulation("efsign", grads, size=1).step([grads]).means[0]["w"]
    assert out.tolist() == [[0.5, -0.5], [0.5, 0.5]]
    out = Simulation("efsign:per=row", grads, size=1).step([grads]).means[0]["w"]
    assert out.tolist() == [[1.0, -1.0], [0.0, 0.0]]


def test_32_times_smaller():
    grads = {"w": torch.ones(64, 64)}
    (sent,) = Simulation("efsign", grads, size=1).step([grads]).bytes_sent
    assert sent == 4 * 64 * 64 / 32 + 4


@pytest.mark.parametrize("method", [EFSign, OneBit, SignSGD])
def test_scales_belong_to_parameters_or_rows(method):
    with pytest.raises(ValueError, match=r"per must be one of parameter, row, got 'layer'"):
        method(per="layer")
    assert not method().helps((100,))
    assert not method().helps((1, 1))
    assert method(per="row").helps((100, 3))
    assert not method(per="row").helps((100, 1))


def test_transposed_parameters_are_seen_in_the_order_of_memory():
    grads = {"w": torch.tensor([[1.0, 3.0], [10.0, -30.0]]).T}
    out = Simulation("efsign:per=row", grads, size=1).step([grads]).means[0]["w"]
    assert out.T.tolist() == [[2.0, 2.0], [20.0, -20.0]]
