from __future__ import annotations

import math

import pytest
import torch

from mpicomp.compress import QSGD, THC, Broadcast, Max, Mean, Simulation, Sum, bucket_of, simulate


def exchange(compressor, rows, *, steps=1):
    """The mean of the last step, and its messages."""
    messages = []
    simulation = Simulation(
        compressor, {"w": rows[0]}, size=len(rows), tap=lambda r, m: messages.append(m)
    )
    for _ in range(steps):
        messages.clear()
        mean = simulation.step([{"w": row} for row in rows]).means[0]["w"]
    return mean, messages


def spike(numel=64, at=5, value=3.0):
    """Every coefficient has the same magnitude, so that all codes are the largest or smallest."""
    grad = torch.zeros(1, numel)
    grad[0, at] = value
    return grad


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_spike_is_exact(bits):
    mean, messages = exchange(THC(bits=bits, block=64), [spike()])
    torch.testing.assert_close(mean, spike(), rtol=1e-5, atol=1e-6)
    assert messages[0].root == 0
    assert [type(m) for m in messages] == [Broadcast, Max, Sum]


@pytest.mark.parametrize(
    ("bits", "size", "width"),
    [(4, 18, 1), (4, 19, 2), (4, 40, 2), (2, 127, 1), (2, 128, 2), (8, 1, 1), (8, 2, 2),
     (7, 2, 1), (7, 3, 2)],
)  # fmt: skip
def test_sums_of_the_largest_codes_do_not_overflow(bits, size, width):
    mean, messages = exchange(THC(bits=bits, block=64), [spike()] * size)
    assert messages[-1].tensors[0].element_size() == width
    torch.testing.assert_close(mean, spike(), rtol=1e-5, atol=1e-6)


def test_the_range_is_that_of_all_ranks():
    rows = [spike(value=v) for v in (1.0, -7.0, 3.0)]  # multiples of a level of the largest
    mean, _ = exchange(THC(bits=4, block=64), rows)
    torch.testing.assert_close(mean, spike(value=-1.0), rtol=1e-5, atol=1e-5)


def test_each_block_has_its_own_range():
    grad = torch.cat([spike(value=1e6), spike(value=1e-6)])
    mean, _ = exchange(THC(block=64), [grad] * 2)
    torch.testing.assert_close(mean[1], grad[1], rtol=1e-4, atol=1e-11)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_average_of_many_draws_is_the_gradient(bits):
    grad = torch.tensor([0.9, -0.5, 0.01, 0.0, -3.0, 0.2, 1.0, 1.0]).repeat(20_000, 1)
    mean, _ = exchange(THC(bits=bits, block=8), [grad] * 2)
    error = (mean.double() - grad).std(0) / math.sqrt(len(grad))
    assert ((mean.double() - grad).mean(0).abs() <= 4 * error + 1e-6).all()


@pytest.mark.parametrize("size", [1, 3])
def test_the_variance_is_at_most_a_quarter_of_a_level_squared(size):
    grad = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    mean, messages = exchange(THC(), [grad] * size)
    (ranges,) = next(m for m in messages if isinstance(m, Max)).tensors
    assert ranges.isnan().all()  # spent; the largest of 1024 normal numbers is below 5
    level = 5.0 / 7
    error = (mean - grad).square().mean()
    assert error <= level**2 / 4 / size
    assert error >= (2.5 / 7) ** 2 / 10 / size  # it is rounded, with other draws on each rank


def test_bytes():
    """1500 elements: a block of 1024, one of 512; a byte each, and two ranges."""
    grad = torch.ones(30, 50)
    _, messages = exchange(THC(), [grad, grad], steps=2)
    assert [m.num_bytes for m in messages[::2]] == [2 * 4, 1024 + 512]
    _, messages = exchange(THC(), [grad, grad])
    assert [m.num_bytes for m in messages[::2]] == [8, 2 * 4, 1024 + 512]
    _, messages = exchange(THC(), [torch.ones(41, 25)] * 2, steps=2)
    assert [m.num_bytes for m in messages[::2]] == [2 * 4, 1024 + 1]


@pytest.mark.parametrize("numel", [2, 3, 63, 64, 65, 127, 130])
def test_any_number_of_elements(numel):
    grad = torch.linspace(-1, 1, numel, dtype=torch.float64).view(1, -1)
    mean, _ = exchange(THC(bits=8, block=64), [grad])
    torch.testing.assert_close(mean, grad, rtol=0.0, atol=0.2)


def test_zero_is_exactly_zero_and_ranks_without_data_add_nothing():
    grad = spike(64, 0, 7.0)
    mean, _ = exchange(THC(block=64), [grad, torch.zeros_like(grad)])
    torch.testing.assert_close(mean, grad / 2, rtol=1e-5, atol=1e-6)
    mean, _ = exchange(THC(), [torch.zeros(8, 8)] * 3)
    assert not mean.any()


def test_signs_are_shared_and_change_with_every_step():
    """The codes of a spike are the signs of its coefficients."""
    codes = []

    def tap(rank, message):
        if isinstance(message, Sum):
            codes.append(message.tensors[0].clone())

    simulation = Simulation(THC(block=64), {"w": spike()}, size=2, tap=tap)
    for _ in range(8):
        simulation.step([{"w": spike()}] * 2)
    assert all(torch.equal(*codes[i : i + 2]) for i in range(0, 16, 2))
    assert len({tuple(c.tolist()) for c in codes}) == 2  # the sign of one column, up or down


def test_rank_0s_seed_is_kept_for_all_later_steps():
    params = {"w": torch.empty(8, 8), "v": torch.empty(8, 8)}
    simulation = Simulation(THC(seed=2**40 + 1), params, size=2)
    simulation.step([{"w": torch.ones(8, 8)}, {}])
    (group,) = simulation.groups
    seeds = [[int(state["seed"][name]) for name in "wv"] for state in group.states]
    assert seeds == [[2**40 + 1, -1]] * 2


def test_seeds_that_differ_between_ranks_are_no_harm():
    buckets = [bucket_of({"w": spike()}, torch.float32, rank=r, size=2) for r in (0, 1)]
    runs = []
    for bucket, seed in zip(buckets, (3, 4), strict=True):
        bucket.flat.copy_(spike().view(-1))
        compressor = THC(block=64, seed=seed)
        runs.append(compressor.exchange(bucket, compressor.init(bucket)))
    assert [next(run).tensors[0].item() for run in runs] == [3, 4]
    ranges = [run.send((torch.tensor([3]),)).tensors for run in runs]
    sums = [run.send((ranges[0][0].clone(),)).tensors[0].clone() for run in runs]
    assert torch.equal(*sums)


def test_outliers_spoil_less_than_without_the_rotation():
    """One large element among many small ones sets the step of its block."""
    grad = torch.randn(4, 1024, generator=torch.Generator().manual_seed(0)) * 0.01
    grad[:, 7] = 1.0
    methods = (THC(block=1024), QSGD(block=1024, norm="max"))
    rotated, plain = ((exchange(m, [grad])[0] - grad).square().sum() for m in methods)
    assert rotated < plain / 10


@pytest.mark.parametrize(
    ("size", "dtype", "kind"),
    [(18, torch.bfloat16, Sum), (19, torch.bfloat16, Mean), (19, torch.float32, Sum)],
)
def test_dense_where_sums_are_no_smaller(size, dtype, kind):
    _, messages = exchange(THC(), [torch.ones(32, 32, dtype=dtype)] * size)
    assert type(messages[-1]) is kind


def test_16_bit_gradients_are_rotated_in_fp32():
    grad = torch.linspace(-1, 1, 1024).view(32, 32).bfloat16()
    mean, messages = exchange(THC(bits=8), [grad])
    assert messages[-2].tensors[0].dtype == torch.float32
    torch.testing.assert_close(mean.float(), grad.float(), rtol=0.0, atol=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"bits": 1}, "bits must be an integer from 2 to 8, got 1"), ({"bits": 9}, "bits must"),
     ({"block": 1000}, "block must be a power of two, 2 to 65536, got 1000"),
     ({"block": 1}, "block must"), ({"block": 2**17}, "block must")],
)  # fmt: skip
def test_options(options, message):
    with pytest.raises(ValueError, match=f"^thc: {message}"):
        THC(**options)


def test_what_a_rank_sent_is_its_own_decode():
    buckets = [bucket_of({"w": spike()}, torch.float64, rank=r, size=2) for r in (0, 1)]
    for bucket, value in zip(buckets, (1.0, -3.5), strict=True):
        bucket.flat[9] = value
    compressor = THC(block=64)
    outcomes = simulate(compressor, buckets, [compressor.init(bucket) for bucket in buckets])
    for outcome, bucket, value in zip(outcomes, buckets, (1.0, -3.5), strict=True):
        outcome.sent.store_(bucket)
        assert bucket.flat[9].item() == pytest.approx(value, abs=3.5 / 7 / 2)
