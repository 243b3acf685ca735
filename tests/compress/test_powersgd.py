from __future__ import annotations

import pytest
import torch

from mpicomp.compress import Feedback, PowerSGD, Simulation, assign, bucket_of, simulate
from mpicomp.compress.powersgd import LowRank, orthonormal

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


@pytest.mark.parametrize(
    ("shapes", "rank", "dense", "floats"),
    [
        (resnet18_cifar(), 1, 11_173_962, 45_935),
        (resnet18_cifar(), 2, 11_173_962, 82_260),
        (resnet18_cifar(), 4, 11_173_962, 154_910),
        (resnet18_cifar(), 7, 11_173_962, 263_885),
        (lstm_wikitext2(), 1, 28_949_319, 93_488),
        (lstm_wikitext2(), 2, 28_949_319, 142_507),
        (lstm_wikitext2(), 4, 28_949_319, 240_545),
    ],
)
def test_floats_sent_for_published_models(shapes, rank, dense, floats):
    params = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    assert sum(p.numel() for p in params.values()) == dense
    chosen = assign(PowerSGD(rank), ((n, tuple(p.shape), p.dtype) for n, p in params.items()))
    sent = 0
    for compressor in dict.fromkeys(chosen.values()):
        members = {n: p for n, p in params.items() if chosen[n] == compressor}
        bucket = bucket_of(members, torch.float32, rank=0, size=2)
        run = compressor.exchange(bucket, compressor.init(bucket))
        message, rounds = next(run), compressor.capabilities.rounds
        for left in reversed(range(rounds)):
            sent += message.num_bytes
            if left:
                message = run.send(message.tensors)
    assert sent == 4 * floats


@pytest.mark.parametrize(
    ("shape", "rank", "helps"),
    [((4, 4), 1, True), ((4, 4), 2, False), ((5, 4), 2, True), ((1, 100), 1, False),
     ((10, 512), 7, True), ((64, 3, 3, 3), 19, False), ((0, 3), 1, False), ((9,), 1, False),
     ((), 1, False)],
)  # fmt: skip
def test_helps_where_the_factors_are_smaller(shape, rank, helps):
    assert PowerSGD(rank).helps(shape) is helps


# --------------------------------------------------------------------------------- the algebra


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def low_rank(n, m, rank, seed=0):
    return normal(n, rank, seed=seed) @ normal(rank, m, seed=seed + 1)


def one_step(compressor, matrices):
    """Mean and factors of one exchange of one matrix per rank, and what its commit leaves."""
    params = {"w": matrices[0]}
    buckets = [
        bucket_of(params, m.dtype, rank=rank, size=len(matrices)) for rank, m in enumerate(matrices)
    ]
    states = [compressor.init(bucket) for bucket in buckets]
    for bucket, matrix in zip(buckets, matrices, strict=True):
        bucket["w"].copy_(matrix)
    outcomes = simulate(compressor, buckets, states)
    ((_, p, q),) = outcomes[0].mean.factors
    outcomes[0].commit(frozenset())
    outcomes[0].mean.store_(buckets[0])
    return buckets[0]["w"], p, q, states[0]


@pytest.mark.parametrize(("true_rank", "exact"), [(1, True), (3, True), (4, False)])
def test_exact_if_and_only_if_the_mean_has_low_rank(true_rank, exact):
    mean = low_rank(20, 15, true_rank)
    noise = normal(20, 15, seed=9)
    out = one_step(PowerSGD(rank=3), [mean + noise, mean - noise])[0]
    error = float((out - mean).norm() / mean.norm())
    assert error < 1e-13 if exact else error > 1e-3


def test_not_exact_where_only_the_parts_have_low_rank():
    parts = [low_rank(20, 15, 2, seed=seed) for seed in (0, 5, 10)]
    out = one_step(PowerSGD(rank=2), parts)[0]
    assert float((out - sum(parts) / 3).norm()) > 1.0


def test_a_projection_of_the_mean():
    parts = [normal(20, 15, seed=seed) for seed in range(3)]
    mean = torch.stack(parts).mean(0)
    out, p, q, _ = one_step(PowerSGD(rank=4), parts)
    torch.testing.assert_close(p.mT @ p, torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(out, p @ p.mT @ mean)
    torch.testing.assert_close(q, mean.mT @ p)
    torch.testing.assert_close(
        mean.square().sum(), out.square().sum() + (mean - out).square().sum()
    )


def test_warm_start_converges_to_the_best_approximation():
    matrix = {"w": normal(30, 20) + 3 * low_rank(30, 20, 2, seed=1)}
    u, s, vh = torch.linalg.svd(matrix["w"])
    best = (u[:, :2] * s[:2]) @ vh[:2]
    spec = "powersgd:rank=2,error_feedback=false"
    for warm, reached in ((True, True), (False, False)):
        simulation = Simulation(f"{spec},warm_start={warm}", matrix, size=1)
        for _ in range(30):
            out = simulation.step([matrix]).means[0]["w"]
        assert (float((out - best).norm() / best.norm()) < 1e-9) is reached


def test_without_warm_start_every_step_draws_anew():
    matrix = {"w": normal(30, 20)}
    simulation = Simulation("powersgd:rank=1,warm_start=false,error_feedback=false", matrix, size=1)
    first, second = (simulation.step([matrix]).means[0]["w"] for _ in range(2))
    assert not torch.allclose(first, second)


def test_two_steps_by_hand():
    """Rank 1 of diag(3, 1), whatever the start: P = Mq, out = P P^T M / |P|^2, q' = M^T P."""
    matrix = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    compressor = PowerSGD(rank=1, error_feedback=False)
    bucket = bucket_of({"w": matrix}, torch.float64, rank=0, size=1)
    state = compressor.init(bucket)
    a, b = 1.0, 2.0
    state["q"]["w"].copy_(torch.tensor([[a], [b]]))
    for _ in range(2):
        bucket["w"].copy_(matrix)
        (outcome,) = simulate(compressor, [bucket], [state])
        outcome.commit(frozenset())
        outcome.mean.store_(bucket)
        p = torch.tensor([[3 * a], [b]], dtype=torch.float64)
        torch.testing.assert_close(bucket["w"], p @ p.mT @ matrix / p.square().sum())
        a, b = 9 * a, b
    assert state["step"]["w"].item() == 2


# -------------------------------------------------------------------------- gradients gone bad


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "powersgd:rank=2,error_feedback=false"])
def test_recovery_after_zero_gradients(spec):
    zeros, grads = {"w": torch.zeros(20, 15)}, {"w": low_rank(20, 15, 2).float()}
    simulation = Simulation(spec, zeros, size=2)
    for _ in range(3):
        assert not simulation.step([zeros, zeros]).means[0]["w"].any()
    torch.testing.assert_close(simulation.step([grads, grads]).means[0]["w"], grads["w"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recovery_after_gradients_of_lower_rank(dtype):
    poor, rich = ({"w": low_rank(20, 15, rank).to(dtype)} for rank in (1, 3))
    simulation = Simulation("powersgd:rank=3,error_feedback=false", poor, size=1)
    for _ in range(3):
        out = simulation.step([poor]).means[0]["w"]
        torch.testing.assert_close(out, poor["w"], rtol=1e-4, atol=1e-5)
    out = simulation.step([rich]).means[0]["w"]
    torch.testing.assert_close(out, rich["w"], rtol=1e-3, atol=1e-4)


def test_a_column_of_rounding_noise_begins_anew_and_a_live_one_stays():
    matrix = low_rank(6, 5, 1)
    _, _, q, state = one_step(PowerSGD(rank=2), [matrix])
    assert q[:, 1].abs().max() < 1e-12 * q[:, 0].abs().max()
    kept = state["q"]["w"]
    torch.testing.assert_close(kept[:, 0], q[:, 0] / q[:, 0].abs().max())
    assert kept[:, 1].abs().max() != 1.0  # drawn, while what is kept is scaled to 1


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_the_size_of_gradients_does_not_matter(size):
    grads = {"w": low_rank(20, 15, 2).float() * size}
    simulation = Simulation("powersgd:rank=2,error_feedback=false", grads, size=2)
    for _ in range(3):
        out = simulation.step([grads, grads]).means[0]["w"]
    torch.testing.assert_close(out / size, grads["w"] / size, rtol=1e-4, atol=1e-4)


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


# ------------------------------------------------------------------------------ state, layouts


def test_the_start_depends_on_seed_and_name_alone():
    def start(seed, params, rank):
        bucket = bucket_of(params, torch.float32, rank=rank, size=3)
        return PowerSGD(seed=seed).init(bucket)["q"]["w"]

    w, other = torch.empty(7, 6), torch.empty(5, 5)
    assert torch.equal(start(0, {"w": w}, 0), start(0, {"v": other, "w": w}, 2))
    assert not torch.equal(start(0, {"w": w}, 0), start(1, {"w": w}, 0))
    both = PowerSGD().init(bucket_of({"w": w, "v": w}, torch.float32, rank=0, size=1))["q"]
    assert both["w"].shape == (6, 2)
    assert not torch.equal(both["w"], both["v"])


def test_skipped_parameters_keep_their_factor():
    params = {"w": torch.empty(7, 6), "v": torch.empty(7, 6)}
    simulation = Simulation(PowerSGD(rank=1), params, size=2)
    (group,) = simulation.groups
    before = {name: q.clone() for name, q in group.states[1]["q"].items()}
    simulation.step([{"w": normal(7, 6)}, {}])
    assert torch.equal(group.states[1]["q"]["v"], before["v"])
    assert not torch.equal(group.states[1]["q"]["w"], before["w"])
    assert [int(group.states[1]["step"][name]) for name in "wv"] == [1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_are_orthogonalised_in_fp32(dtype):
    parts = [normal(64, 48, seed=seed).to(dtype) for seed in range(2)]
    out, p, _, _ = one_step(PowerSGD(rank=4, error_feedback=False), parts)
    assert (out.dtype, p.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(p.mT @ p, torch.eye(4), rtol=1e-5, atol=1e-6)
    mean = torch.stack(parts).float().mean(0)
    torch.testing.assert_close(out.float(), p @ (p.mT @ mean), rtol=1e-2, atol=1e-3)


def test_layouts_do_not_change_the_mathematics():
    """A transposed tensor is the same matrix, seen from the other side."""
    grads = low_rank(12, 9, 2).float()
    for like in (grads, grads.T.contiguous().T):
        out = Simulation("powersgd:rank=2", {"w": like}, size=1).step([{"w": grads}]).means[0]["w"]
        torch.testing.assert_close(out, grads, rtol=1e-4, atol=1e-5)


def test_low_rank_into_another_precision():
    bucket = bucket_of({"w": torch.empty(4, 3)}, torch.bfloat16, rank=0, size=1)
    p, q = normal(4, 1).float(), normal(3, 1, seed=1).float()
    LowRank((("w", p, q),)).store_(bucket)
    torch.testing.assert_close(bucket["w"], (p @ q.mT).bfloat16())
    LowRank((("w", p, q),)).subtract_(bucket)
    assert bucket["w"].abs().max() < 0.02


def test_the_residual_is_taken_against_the_mean():
    """Each rank keeps what the mean lacks of its own gradient, as in the authors' experiments."""
    grads = [{"w": normal(12, 9, seed=seed)} for seed in range(2)]
    simulation = Simulation(Feedback(PowerSGD(rank=1)), grads[0], size=2)
    mean = simulation.step(grads).means[0]["w"]
    for rank, state in enumerate(simulation.groups[0].states):
        torch.testing.assert_close(state["residual"]["w"], grads[rank]["w"] - mean)
