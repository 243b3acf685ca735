from __future__ import annotations

import math

import pytest
import torch

from mpicomp.compress import QSGD, Simulation, bucket_of, parse, simulate
from mpicomp.compress.base import Coded
from mpicomp.compress.draws import generator
from mpicomp.compress.stochastic import (
    comparable,
    nonzero,
    peak,
    random_bits,
    round_randomly_,
    sum_dtype,
)

METHODS = ["natural", "qsgd", "terngrad", "thc"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.3, -0.3, 2.5, -6.99, 126.25, 1e-3])
def test_rounding_is_right_on_average(value, dtype):
    rounded = round_randomly_(torch.full((100_001,), value, dtype=dtype), generator("test", value))
    assert set(rounded.tolist()) == {math.floor(value), math.ceil(value)}
    chance = value - math.floor(value)
    error = math.sqrt(chance * (1 - chance) / len(rounded))
    assert abs(rounded.double().mean().item() - value) < 4 * error


def test_whole_numbers_stay_as_they_are():
    values = torch.arange(-127.0, 128.0).repeat(1000)
    assert torch.equal(round_randomly_(values.clone(), generator("test")), values)
    assert not round_randomly_(torch.zeros(7), generator("test")).any()
    assert round_randomly_(torch.zeros(0), generator("test")).numel() == 0


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_numbers_cut_out_of_one_draw_do_not_depend_on_each_other(dtype):
    lanes = torch.int64.itemsize // dtype.itemsize
    numbers = random_bits(lanes * 50_000, dtype, generator("test")).double().view(-1, lanes)
    related = torch.corrcoef(torch.cat([numbers[:-1], numbers[1:, :1]], dim=1).T)
    related.fill_diagonal_(0.0)
    assert related.abs().max() < 4 / math.sqrt(50_000)
    low = numbers.min() / torch.iinfo(dtype).min
    high = numbers.max() / torch.iinfo(dtype).max
    assert min(low, high) > 0.999


def test_scales():
    assert peak(torch.tensor([[1.0, -3.0], [0.0, 0.0], [math.nan, 5.0]]), 1)[:2].tolist() == [3, 0]
    assert peak(torch.tensor([[math.nan, 5.0]]), 1).isnan().all()
    assert nonzero(torch.tensor([0.0, 2.0])).tolist() == [1, 2]
    assert nonzero(torch.tensor([math.nan])).isnan().all()
    assert comparable(torch.tensor([math.nan, math.inf, 3.0])).tolist() == [math.inf, math.inf, 3]


@pytest.mark.parametrize(
    ("largest", "dtype"),
    [(127, torch.int8), (128, torch.int16), (32767, torch.int16), (32768, torch.int32),
     (2**31, torch.int64)],
)  # fmt: skip
def test_sums_have_room(largest, dtype):
    assert sum_dtype(largest) == dtype


def test_coded_gradients_decode_when_asked():
    bucket = bucket_of({"w": torch.empty(3)}, torch.bfloat16, rank=0, size=1)
    coded = Coded(lambda: torch.tensor([1.0, 2.0, 4.0]))
    coded.store_(bucket)
    assert bucket.flat.tolist() == [1, 2, 4]
    coded.subtract_(bucket)
    assert not bucket.flat.any()
    assert coded.is_finite()
    assert not Coded(lambda: torch.tensor([math.inf])).is_finite()


def outputs(spec: str, steps: int = 2) -> list[torch.Tensor]:
    """What two ranks with equal gradients send in each step."""
    grads = {"w": torch.linspace(-1, 1, 600).view(20, 30)}
    sent: list[torch.Tensor] = []

    def tap(rank: int, message) -> None:
        if message.tensors[0].numel() > 100:  # codes
            sent.append(message.tensors[0].clone())

    simulation = Simulation(spec, grads, size=2, tap=tap)
    for _ in range(steps):
        simulation.step([grads, grads])
    return sent


@pytest.mark.parametrize("method", METHODS)
def test_every_rank_step_and_seed_draws_anew_and_can_be_repeated(method):
    sent = outputs(method)
    assert len(sent) == 4
    for i, first in enumerate(sent):
        assert not any(torch.equal(first, second) for second in sent[:i])
    assert all(map(torch.equal, sent, outputs(method)))
    assert not torch.equal(sent[0], outputs(f"{method}:seed=1")[0])


def test_methods_and_parameters_draw_apart():
    buckets = [bucket_of({n: torch.empty(2, 2)}, torch.float32, rank=0, size=1) for n in "vw"]
    draws = [
        random_bits(8, torch.int16, QSGD().own_generator(b, QSGD().init(b))).tolist()
        for b in buckets
    ]
    assert draws[0] != draws[1]


@pytest.mark.parametrize("method", METHODS)
def test_skipped_parameters_keep_their_count(method):
    params = {"w": torch.empty(7, 6), "v": torch.empty(7, 6)}
    simulation = Simulation(method, params, size=2)
    simulation.step([{"w": torch.ones(7, 6)}, {}])
    steps = simulation.groups[0].states[1]["step"]
    assert [int(steps[name]) for name in "wv"] == [1, 0]


@pytest.mark.parametrize("method", METHODS)
def test_vectors_go_dense_and_one_element_does_too_where_scales_cost_more(method):

    compressor = parse(method)
    assert not compressor.helps((100,))
    assert not compressor.helps(())
    assert not compressor.helps((0, 4))
    assert compressor.helps((64, 3, 3, 3))
    assert compressor.helps((1, 1)) == (method == "natural")  # it has no scales


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_becomes_a_finite_code(method, bad):

    compressor = parse(method)
    buckets = [bucket_of({"w": torch.empty(9, 9)}, torch.float32, rank=r, size=2) for r in (0, 1)]
    for bucket in buckets:
        bucket.flat.fill_(1.0)
    buckets[1].flat[40] = bad
    outcomes = simulate(compressor, buckets, [compressor.init(bucket) for bucket in buckets])
    assert not any(outcome.mean.is_finite() for outcome in outcomes)


@pytest.mark.parametrize("size", [1e-37, 1e-30, 1e30, 1e36])
@pytest.mark.parametrize("method", ["natural", "qsgd", "qsgd:norm=max", "terngrad", "thc"])
def test_the_size_of_gradients_does_not_matter(method, size):
    grads = {"w": torch.full((30, 40), 1.5) * size}
    simulation = Simulation(method, grads, size=2)
    result = simulation.step([grads, grads])
    assert result.good
    mean = result.means[0]["w"].double().mean() / grads["w"].double().mean()
    assert 0.5 < mean < 2.0


def test_a_gradient_too_large_to_rotate_makes_a_bad_step():
    grads = {"w": torch.full((32, 32), 3e38)}
    grads["w"][1::2] = -3e38
    assert not Simulation("thc", grads, size=2).step([grads, grads]).good
