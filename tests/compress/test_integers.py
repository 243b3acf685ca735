from __future__ import annotations

import math

import pytest
import torch

from mpicomp.compress import Feedback, Int4, Int8, Simulation, bucket_of, parse, simulate
from mpicomp.compress.feedback import with_feedback


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one_step(spec, matrices, seed=None):
    compressor = parse(spec if seed is None else f"{spec},seed={seed}")
    size = len(matrices)
    buckets = [
        bucket_of({"w": matrices[0]}, torch.float32, rank=rank, size=size) for rank in range(size)
    ]
    for bucket, matrix in zip(buckets, matrices, strict=True):
        bucket["w"].copy_(matrix)
    states = [compressor.init(bucket) for bucket in buckets]
    outcomes = simulate(compressor, buckets, states)
    outcomes[0].mean.store_(buckets[0])
    return buckets[0]["w"]


def test_two_steps_by_hand():
    grads = {"w": torch.tensor([[127.0, -60.4, 0.25, 0.0]])}
    simulation = Simulation("int8", grads, size=1)
    assert simulation.step([grads]).means[0]["w"].tolist() == [[127.0, -60.0, 0.0, 0.0]]
    residual = simulation.groups[0].states[0]["residual"]["w"]
    torch.testing.assert_close(residual, torch.tensor([[0.0, -0.4, 0.25, 0.0]]))
    second = {"w": torch.tensor([[127.0, -60.4, 0.3, 0.0]])}
    assert simulation.step([second]).means[0]["w"].tolist() == [[127.0, -61.0, 1.0, 0.0]]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(("spec", "levels"), [("int8", 127), ("int4", 7)])
def test_the_error_is_within_a_step_of_the_grid(spec, levels, size):
    matrices = [normal(20, 30, seed=rank) for rank in range(size)]
    mean = torch.stack(matrices).mean(0)
    peak = max(float(m.abs().max()) for m in matrices)
    error = float((one_step(spec, matrices) - mean).abs().max())
    assert error <= 0.5 * peak / levels * (1 if size <= 2 else 2.1) + 1e-6
    assert error > 0.05 * peak / levels


def test_an_outlier_spoils_its_block_alone():
    matrix = normal(2, 256) * 1e-3
    matrix[0, 7] = 1000.0
    out = one_step("int8", [matrix])
    assert out[0].count_nonzero() == 1
    torch.testing.assert_close(out[1], matrix[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("spec", ["int8:stochastic=true", "int4:stochastic=true"])
def test_unbiased_there_and_back(spec, size):
    matrices = [normal(4, 20, seed=rank) for rank in range(size)]
    draws = torch.stack([one_step(spec, matrices, seed).double() for seed in range(800)])
    mean = torch.stack(matrices).double().mean(0)
    peak = max(float(m.abs().max()) for m in matrices) / (127 if "int8" in spec else 7)
    floor = 0.05 * peak  # an element close to the grid may not have moved at all
    error = (draws.std(0) + floor) / math.sqrt(len(draws))
    assert bool(((draws.mean(0) - mean).abs() <= 4 * error).all())
    assert float(draws.std(0).max()) > 0.2 * peak / size


def test_ranks_and_steps_draw_differently_and_equal_seeds_alike():
    grads = [{"w": normal(16, 16)}] * 2
    spec = "int4:stochastic=true"
    codes = []
    simulation = Simulation(
        spec, grads[0], size=2, tap=lambda _, m: codes.append(m.tensors[1].clone())
    )
    for _ in range(2):
        simulation.step(grads)
    assert len(codes) == 4
    assert len({tuple(code.tolist()) for code in codes}) == 4
    again = []
    Simulation(spec, grads[0], size=2, tap=lambda _, m: again.append(m.tensors[1].clone())).step(
        grads
    )
    assert all(torch.equal(a, b) for a, b in zip(again, codes, strict=False))
    steps = [int(state["step"]["w"]) for state in simulation.groups[0].states]
    assert steps == [2, 2]


def test_rounding_at_random_needs_no_feedback():
    assert isinstance(with_feedback(Int8()), Feedback)
    assert isinstance(with_feedback(Int4(error_feedback=False)), Int4)
    assert isinstance(with_feedback(Int4(stochastic=True)), Int4)
    with pytest.raises(ValueError, match="must be a biased compressor"):
        Feedback(Int8(stochastic=True))


@pytest.mark.parametrize(("spec", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_bytes(spec, bits, size):
    d = 3 * 5 * 256 + 100
    grads = {"w": torch.zeros(1, d)}
    result = Simulation(spec, grads, size=size).step([grads] * size)
    there = d * bits // 8 + 4 * 16
    assert sum(result.bytes_sent) == there * size + (there if size > 2 else 0)


@pytest.mark.parametrize("block", [0, -1, 1.5])
def test_blocks_have_elements(block):
    with pytest.raises(ValueError, match="int8: block must be an integer from 1 up"):
        Int8(block=block)


@pytest.mark.parametrize(
    ("compressor", "shape", "helps"),
    [(Int8(), (1, 1), False), (Int8(), (2, 1), True), (Int8(), (8,), False),
     (Int8(), (0, 4), False),
     (Int8(block=1), (9, 9), False), (Int4(block=2), (9, 9), True)],
)  # fmt: skip
def test_helps(compressor, shape, helps):
    assert compressor.helps(shape) is helps


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e30, 3e37])
def test_any_size_of_gradients(size):
    matrices = [normal(16, 16, seed=rank) * size for rank in range(3)]
    out = one_step("int8", matrices)
    assert out.isfinite().all()
    mean = torch.stack([m / 3 for m in matrices]).sum(0)
    assert float((out - mean).abs().max()) <= max(0.05 * size, 1.2e-38)
