from __future__ import annotations

import math

import pytest
import torch

from mpicomp.compress import QSGD, Gather, Mean, Simulation


def exchange(compressor, rows, *, steps=1):
    """The mean of the last step and its messages."""
    messages = []
    params = {"w": rows[0]}
    simulation = Simulation(compressor, params, size=len(rows), tap=lambda r, m: messages.append(m))
    for _ in range(steps):
        messages.clear()
        result = simulation.step([{"w": row} for row in rows])
    return result.means[0]["w"], messages


def tiled(block, copies):
    """A gradient of many equal blocks, each a draw of its own."""
    return torch.tensor(block).repeat(copies, 1)


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_one_element_of_a_block_is_exact(bits, norm):
    grad = torch.zeros(6, 8)
    grad[torch.arange(6), torch.arange(6)] = torch.tensor([1.0, -2, 3.7, 0, 1e-20, 1e20])
    mean, _ = exchange(QSGD(bits=bits, block=8, norm=norm), [grad])
    torch.testing.assert_close(mean, grad, rtol=1e-6, atol=0.0)


def test_what_lies_on_the_grid_is_exact():
    """With the largest magnitude 7 as the norm and 7 levels, whole numbers need no rounding."""
    one, two = torch.tensor([[7.0, -3, 0, 1, -7, 2]]), torch.tensor([[-7.0, 3, 5, 1, 0, 0]])
    mean, _ = exchange(QSGD(bits=4, block=6, norm="max"), [one, two])
    torch.testing.assert_close(mean, torch.tensor([[0, 0, 2.5, 1, -3.5, 1]]))
    wide = torch.arange(-127.0, 128.0).view(5, 51)
    mean, _ = exchange(QSGD(bits=8, block=255, norm="max"), [wide])
    torch.testing.assert_close(mean, wide)


@pytest.mark.parametrize(("bits", "levels"), [(2, 1), (4, 7), (8, 127)])
def test_outputs_are_multiples_of_norm_over_levels(bits, levels):
    mean, _ = exchange(QSGD(bits=bits, block=2), [tiled([3.0, -4.0], 500)])  # of norm 5
    codes = mean * levels / 5
    torch.testing.assert_close(codes, codes.round(), rtol=0.0, atol=1e-4)
    around = {f(x) for x in (3 * levels / 5, -4 * levels / 5) for f in (math.floor, math.ceil)}
    assert set(codes.round().int().view(-1).tolist()) == around


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_average_of_many_draws_is_the_gradient_and_the_variance_is_bounded(bits, norm):
    block = [0.9, -0.5, 0.01, 0.0, -3.0, 0.2, 0.2, 1.3]
    grad = tiled(block, 20_000)
    mean, _ = exchange(QSGD(bits=bits, block=8, norm=norm), [grad])
    error = (mean.double() - grad).std(0) / math.sqrt(len(grad))
    assert ((mean.double() - grad).mean(0).abs() <= 4 * error + 1e-6).all()
    if norm == "l2":
        levels = 2 ** (bits - 1) - 1
        bound = min(8 / levels**2, math.sqrt(8) / levels)
        assert (mean - grad).square().sum(1).mean() <= bound * grad[0].square().sum()


def test_the_largest_magnitude_as_norm_makes_less_variance():
    grad = torch.randn(100, 512, generator=torch.Generator().manual_seed(0))
    errors = [
        (exchange(QSGD(norm=norm), [grad])[0] - grad).square().sum() for norm in ("l2", "max")
    ]
    assert errors[1] < errors[0] / 4


def test_ranks_draw_independently():
    """The variance falls with the number of ranks, as it does for independent draws."""
    grad = tiled([0.3, 0.4] * 8, 1000)
    errors = [(exchange(QSGD(2, 16), [grad] * n)[0] - grad).square().mean().item() for n in (1, 4)]
    assert errors[1] == pytest.approx(errors[0] / 4, rel=0.1)


def test_a_short_last_block_has_its_own_norm():
    grad = torch.zeros(1, 513)
    grad[0, :512] = 100.0
    grad[0, 512] = -0.25
    mean, messages = exchange(QSGD(), [grad])
    assert mean[0, 512] == -0.25
    assert [t.numel() for t in messages[0].tensors] == [257, 2]


@pytest.mark.parametrize(("bits", "packed"), [(2, 25), (4, 50), (8, 99)])
def test_bytes(bits, packed):
    _, messages = exchange(QSGD(bits=bits, block=50), [torch.ones(9, 11)] * 2)
    assert messages[0].num_bytes == packed + 2 * 4


@pytest.mark.parametrize(
    ("bits", "size", "dtype", "kind"),
    [(4, 15, torch.float32, Gather), (4, 16, torch.float32, Mean), (8, 7, torch.float32, Gather),
     (8, 8, torch.float32, Mean), (2, 31, torch.float32, Gather), (2, 32, torch.float32, Mean),
     (8, 3, torch.bfloat16, Gather), (8, 4, torch.bfloat16, Mean), (8, 1, torch.float32, Gather)],
)  # fmt: skip
def test_dense_where_that_moves_fewer_bytes(bits, size, dtype, kind):
    grad = torch.ones(32, 32, dtype=dtype)
    mean, messages = exchange(QSGD(bits=bits), [grad] * size)
    assert type(messages[0]) is kind
    assert kind is Gather or torch.equal(mean, grad)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"bits": 3}, "bits must be 2, 4 or 8"), ({"block": 0}, "block must be an integer from 1"),
     ({"block": 2.0}, "block must be"), ({"norm": "l1"}, "norm must be 'l2' or 'max', got 'l1'")],
)  # fmt: skip
def test_options(options, message):
    with pytest.raises(ValueError, match=f"^qsgd: {message}"):
        QSGD(**options)
