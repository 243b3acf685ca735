from __future__ import annotations

import math

import pytest
import torch

from mpicomp.compress import Feedback, Gather, Max, Mean, Simulation, Sum, TernGrad, terngrad


def exchange(compressor, rows):
    messages = []
    simulation = Simulation(
        compressor, {"w": rows[0]}, size=len(rows), tap=lambda r, m: messages.append(m)
    )
    return simulation.step([{"w": row} for row in rows]).means[0]["w"], messages


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_worked_example():
    """The scale is 4, from rank 0; whole multiples of it are not rounded."""
    rows = [torch.tensor([[4.0, -4, 0, 4]]), torch.tensor([[0.0, -4, 0, -4]])]
    mean, _ = exchange(TernGrad(clip=0.0), rows)
    assert mean.tolist() == [[2, -4, 0, 0]]


def test_each_parameter_has_its_own_scale():
    grads = {"a": torch.ones(3, 5), "b": torch.full((3, 5), 1e-9), "c": torch.full((2, 2), -8.0)}
    mean = Simulation("terngrad", grads, size=2).step([grads, grads]).means[0]
    for name, grad in grads.items():
        torch.testing.assert_close(mean[name], grad, rtol=1e-6, atol=0.0)


def test_the_scale_is_shared_by_all_ranks():
    small, large = torch.full((40, 50), 1.0), torch.full((40, 50), 8.0)
    mean, _ = exchange(TernGrad(), [small, large])
    assert set(mean.view(-1).tolist()) == {4.0, 8.0}  # 8 from one rank, 0 or 8 from the other
    assert mean.mean() == pytest.approx(4.5, abs=4 * 4 * math.sqrt(7 / 64 / 2000))


@pytest.mark.parametrize("size", [1, 3, 9])
def test_the_average_of_many_draws_is_the_gradient(size):
    grad = torch.tensor([0.9, -0.5, 0.01, 0.0, -3.0, 0.2]).repeat(20_000, 1)
    mean, _ = exchange(TernGrad(clip=0.0), [grad] * size)
    assert (mean[:, 3:5] == grad[:, 3:5]).all()  # zero, and the largest
    error = (mean.double() - grad).std(0) / math.sqrt(len(grad))
    assert ((mean.double() - grad).mean(0).abs() <= 4 * error + 1e-6).all()


def test_with_clipping_it_is_the_clipped_gradient():
    grad = torch.tensor([1.0, -1.0, 0.5, 0.0, 20.0, -1.0, 1.0, 1.0]).repeat(20_000, 1)
    limit = 1.5 * grad.square().mean().sqrt()
    mean, _ = exchange(TernGrad(clip=1.5), [grad] * 2)
    assert mean.abs().max().item() == pytest.approx(limit.item(), rel=1e-5)
    clipped = grad.clamp(-limit, limit)
    error = (mean.double() - clipped).std(0) / math.sqrt(len(grad))
    assert ((mean.double() - clipped).mean(0).abs() <= 4 * error + 1e-4).all()


@pytest.mark.parametrize("clip", [0.0, 2.5])
def test_a_gradient_that_is_the_same_everywhere_is_not_clipped_away(clip):
    grad = torch.full((20, 30), -0.7)
    mean, _ = exchange(TernGrad(clip=clip), [grad, grad])
    torch.testing.assert_close(mean, grad)


def test_clipping_makes_the_error_smaller():
    grad = normal(100, 100)
    grad[0, 0] = 50.0
    errors = [(exchange(TernGrad(clip), [grad])[0] - grad).square().sum() for clip in (0.0, 2.5)]
    assert errors[1] < errors[0] / 4


@pytest.mark.parametrize("size", [2, 7])
def test_gathers_and_sums_give_the_same(monkeypatch, size):
    rows = [normal(30, 41, seed=seed) for seed in range(size)]
    gathered, messages = exchange(TernGrad(), rows)
    assert type(messages[-1]) is Gather
    monkeypatch.setattr(terngrad, "SUM_FROM", 1)
    added, messages = exchange(TernGrad(), rows)
    assert type(messages[-1]) is Sum
    assert torch.equal(gathered, added)


@pytest.mark.parametrize(
    ("size", "kind", "num_bytes"), [(1, Gather, 25), (7, Gather, 25), (8, Sum, 99), (127, Sum, 99),
                                    (128, Sum, 198)],
)  # fmt: skip
def test_bytes_and_room_for_the_sum(size, kind, num_bytes):
    grad = torch.full((9, 11), -2.0)
    mean, messages = exchange(TernGrad(), [grad] * size)
    assert [type(m) for m in (messages[0], messages[-1])] == [Max, kind]
    assert [m.num_bytes for m in (messages[0], messages[-1])] == [4, num_bytes]
    torch.testing.assert_close(mean, grad)


def test_dense_where_a_sum_of_codes_is_no_smaller():
    grad = torch.ones(9, 11, dtype=torch.bfloat16)
    assert type(exchange(TernGrad(), [grad] * 127)[1][-1]) is Sum
    assert type(exchange(TernGrad(), [grad] * 128)[1][-1]) is Mean


def test_only_clipping_makes_it_biased_and_feedback_is_up_to_the_user():
    assert TernGrad().capabilities.biased
    assert not TernGrad(clip=0.0).capabilities.biased
    assert type(Simulation("terngrad", {"w": normal(3, 3)}, size=1).groups[0].compressor) is (
        TernGrad
    )
    grads = [{"w": normal(8, 9, seed=seed)} for seed in range(2)]
    simulation = Simulation(Feedback(TernGrad()), grads[0], size=2)
    mean = simulation.step(grads).means[0]["w"]
    left = sum(state["residual"]["w"] for state in simulation.groups[0].states) / 2
    torch.testing.assert_close(mean + left, (grads[0]["w"] + grads[1]["w"]) / 2)


@pytest.mark.parametrize("clip", [-1.0, math.nan, math.inf])
def test_options(clip):
    with pytest.raises(ValueError, match=r"^terngrad: clip must be a number from 0 up"):
        TernGrad(clip=clip)
