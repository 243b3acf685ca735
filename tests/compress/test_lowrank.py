from __future__ import annotations

import pytest
import torch

from mpicomp.compress import ACPSGD, PowerSGD, Simulation, bucket_of
from mpicomp.compress.lowrank import LowRank, orthonormal, renewed, scaled


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ------------------------------------------------------------------ shapes of published models


def batch_norm(name, channels):
    return {f"{name}.weight": (channels,), f"{name}.bias": (channels,)}


def resnet18_cifar():
    shapes = {"conv1": (64, 3, 3, 3)} | batch_norm("bn1", 64)
    channels = 64
    for stage, width in enumerate([64, 128, 256, 512]):
        for block in range(2):
            name = f"{stage}.{block}"
            shapes |= {f"{name}.conv1": (width, channels, 3, 3)} | batch_norm(f"{name}.1", width)
            shapes |= {f"{name}.conv2": (width, width, 3, 3)} | batch_norm(f"{name}.2", width)
            if channels != width:
                shapes |= {f"{name}.down": (width, channels, 1, 1)} | batch_norm(f"{name}.3", width)
            channels = width
    return shapes | {"fc.weight": (10, 512), "fc.bias": (10,)}


def lstm_wikitext2():
    shapes = {"encoder": (28869, 650), "decoder.bias": (28869,)}  # the decoder is tied
    for layer in range(3):
        for side in ("ih", "hh"):
            shapes |= {f"w_{side}{layer}": (2600, 650), f"b_{side}{layer}": (2600,)}
    return shapes


RESNET = (resnet18_cifar(), 11_173_962)
LSTM = (lstm_wikitext2(), 28_949_319)


def floats_sent(spec, shapes, numel):
    """For an even and an odd step, what one rank hands over; without the seed in the first."""
    zero = torch.zeros(())
    grads = {name: zero.expand(shape) for name, shape in shapes.items()}
    assert sum(grad.numel() for grad in grads.values()) == numel
    simulation = Simulation(f"{spec},error_feedback=false", grads, size=1)
    first, second = (simulation.step([grads]).bytes_sent[0] for _ in range(2))
    return (first - 8) / 4, second / 4


@pytest.mark.parametrize(
    ("model", "rank", "floats"),
    [(RESNET, 1, 45_935), (RESNET, 2, 82_260), (RESNET, 4, 154_910), (RESNET, 7, 263_885),
     (LSTM, 1, 93_488), (LSTM, 2, 142_507), (LSTM, 4, 240_545)],
)  # fmt: skip
def test_floats_sent_by_powersgd_for_published_models(model, rank, floats):
    assert floats_sent(f"powersgd:rank={rank}", *model) == (floats, floats)


@pytest.mark.parametrize(
    ("model", "rank", "vectors", "lefts", "rights"),
    [(RESNET, 1, 9_610, 4_810, 31_515), (RESNET, 4, 9_610, 19_240, 126_060),
     (LSTM, 1, 44_469, 44_469, 4_550)],
)  # fmt: skip
def test_floats_sent_by_acpsgd_are_one_factor_of_those_of_powersgd(
    model, rank, vectors, lefts, rights
):
    even, odd = floats_sent(f"acpsgd:rank={rank}", *model)
    assert (even, odd) == (vectors + lefts, vectors + rights)
    both, _ = floats_sent(f"powersgd:rank={rank}", *model)
    assert (even - vectors) + (odd - vectors) == both - vectors


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_all_matrices_of_published_models_are_compressed(rate):
    for (shapes, _), rank in ((RESNET, 7), (LSTM, 4)):
        for compressor in (PowerSGD, ACPSGD):
            method = compressor(rank, min_compression_rate=rate)
            assert all(method.helps(shape) is (len(shape) > 1) for shape in shapes.values())


@pytest.mark.parametrize(
    ("compressor", "shape", "helps"),
    [
        (PowerSGD(7), (10, 512), True),
        (PowerSGD(7, min_compression_rate=2.0), (10, 512), False),
        (PowerSGD(1, iterations=2), (4, 4), False),  # 16 numbers sent
        (PowerSGD(1, iterations=2), (5, 4), True),  # 18 of 20
        (PowerSGD(1), (1, 100), False),
        (PowerSGD(1, min_compression_rate=0.0), (1, 100), True),
        (PowerSGD(9, min_compression_rate=0.0), (4, 4), True),
        (PowerSGD(1, min_compression_rate=0.0), (0, 4), False),
        (PowerSGD(1, min_compression_rate=0.0), (100,), False),
        (ACPSGD(1), (1, 100), False),  # 100 numbers in odd steps
        (ACPSGD(3), (4, 4), True),
        (ACPSGD(4), (4, 4), False),
        (ACPSGD(3, min_compression_rate=2.0), (6, 9), False),
        (ACPSGD(3, min_compression_rate=2.0), (7, 9), True),
        (ACPSGD(4, min_compression_rate=0.0), (1, 100), True),
        (ACPSGD(1, min_compression_rate=0.0), (100,), False),
    ],
)
def test_helps_where_a_matrix_is_so_many_times_what_is_sent(compressor, shape, helps):
    assert compressor.helps(shape) is helps


@pytest.mark.parametrize("method", [PowerSGD, ACPSGD])
@pytest.mark.parametrize(
    ("option", "value", "contract"),
    [
        ("rank", 0, "an integer from 1 up"),
        ("rank", 1.0, "an integer from 1 up"),
        ("min_compression_rate", -0.5, "a number from 0 up"),
        ("min_compression_rate", float("nan"), "a number from 0 up"),
        ("min_compression_rate", float("inf"), "a number from 0 up"),
    ],
)
def test_settings_are_checked(method, option, value, contract):
    name = method.__name__.lower()
    with pytest.raises(ValueError, match=f"{name}: {option} must be {contract}, got {value}"):
        method(**{option: value})


# ------------------------------------------------------------------------------------- factors


@pytest.mark.parametrize("columns", ["zero", "equal", "middle", "single"])
def test_orthonormal_whatever_the_columns(columns):
    matrix = normal(50, 3).float()
    if columns == "zero":
        matrix.zero_()
    elif columns == "equal":
        matrix[:, 1:] = matrix[:, :1]
    elif columns == "middle":
        matrix[:, 1] = 0.0
    else:
        matrix[:] = 0.0
        matrix[7, 2] = 1e-20
    (basis,) = orthonormal([matrix])
    moved = torch.zeros(151)[1:].view(50, 3).copy_(matrix)  # memory aligned in another way
    assert torch.equal(basis, orthonormal([moved])[0])
    torch.testing.assert_close(basis.mT @ basis, torch.eye(3))
    torch.testing.assert_close(basis @ (basis.mT @ matrix), matrix, rtol=1e-5, atol=1e-6)


def test_matrices_of_one_shape_keep_their_places():
    matrices = [normal(8, 2), normal(9, 2), normal(8, 2, seed=1), normal(8, 1)]
    for matrix, basis in zip(matrices, orthonormal(matrices), strict=True):
        torch.testing.assert_close(basis @ (basis.mT @ matrix), matrix)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dead_columns_come_out_as_zero(dtype):
    noise = 4 * torch.finfo(dtype).eps
    factor = torch.tensor(
        [[2.0, 0.0, 2 * noise, 100 * noise], [-4.0, 0.0, noise, 0.0]], dtype=dtype
    )
    columns, alive = scaled(factor)
    assert alive.tolist() == [True, False, False, True]
    assert columns.tolist() == [[0.5, 0.0, 0.0, 1.0], [-1.0, 0.0, 0.0, 0.0]]
    assert not any(result.any() for result in scaled(torch.zeros(3, 2, dtype=dtype)))


def test_columns_are_drawn_where_they_are_dead_and_nowhere_else():
    asked = []

    def draw(name, like):
        asked.append(name)
        return torch.full_like(like, 7.0)

    alive, half = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0]])
    assert renewed({"a": alive}, draw)["a"].tolist() == [[1.0, 1.0]]
    assert renewed({}, draw) == {}
    assert asked == []
    both = renewed({"a": alive, "h": half}, draw)
    assert {name: factor.tolist() for name, factor in both.items()} == {
        "a": [[1.0, 1.0]],
        "h": [[1.0, 7.0]],
    }


def test_low_rank_into_another_precision():
    bucket = bucket_of({"w": torch.empty(4, 3)}, torch.bfloat16, rank=0, size=1)
    p, q = normal(4, 1).float(), normal(3, 1, seed=1).float()
    LowRank((("w", p, q),)).store_(bucket)
    torch.testing.assert_close(bucket["w"], (p @ q.mT).bfloat16())
    LowRank((("w", p, q),)).subtract_(bucket)
    assert bucket["w"].abs().max() < 0.02


# --------------------------------------------------------------------------------- first factors


@pytest.mark.parametrize("method", [PowerSGD, ACPSGD])
def test_ranks_with_different_seeds_begin_with_that_of_rank_0(method):
    """Both ranks have the same gradient, so their first products tell their factors."""
    grad = normal(9, 8)
    runs, buckets = [], []
    for rank, seed in enumerate([-3, 5]):
        bucket = bucket_of({"w": grad}, torch.float64, rank=rank, size=2)
        bucket["w"].copy_(grad)
        compressor = method(rank=1, seed=seed)
        state = compressor.init(bucket)
        runs.append(compressor.exchange(bucket, state))
        buckets.append(bucket)
    seeds = [next(run).tensors for run in runs]
    assert not torch.equal(*(tensor for (tensor,) in seeds))
    first, second = (run.send(seeds[0]).tensors[0] for run in runs)
    assert torch.equal(first, second)
    alone = method(rank=1, seed=5)
    run = alone.exchange(buckets[1], alone.init(buckets[1]))
    assert not torch.equal(second, run.send(next(run).tensors).tensors[0])


@pytest.mark.parametrize("method", [PowerSGD, ACPSGD])
def test_a_seed_is_agreed_once(method):
    kinds = []
    grads = {"w": normal(9, 8)}
    simulation = Simulation(method(rank=1), grads, size=1, tap=lambda _, m: kinds.append(type(m)))
    for _ in range(3):
        simulation.step([grads])
    assert [kind.__name__ for kind in kinds].count("Broadcast") == 1
    assert kinds[0].__name__ == "Broadcast"
