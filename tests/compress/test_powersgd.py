from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress import Feedback, PowerSGD, Simulation, bucket_of, simulate


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


def test_warm_start_converges_at_the_square_of_the_ratio_of_singular_values():
    left, right = (torch.linalg.qr(normal(20, 6, seed=seed)).Q for seed in range(2))
    values = torch.tensor([5.0, 4.0, 2.0, 1.0, 0.5, 0.25], dtype=torch.float64)
    matrix = {"w": (left * values) @ right.mT}
    best = (left[:, :2] * values[:2]) @ right[:, :2].mT
    simulation = Simulation("powersgd:rank=2,error_feedback=false", matrix, size=1)
    errors = [float((simulation.step([matrix]).means[0]["w"] - best).norm()) for _ in range(13)]
    for before, after in itertools.pairwise(errors[8:]):
        assert after / before == pytest.approx((2 / 4) ** 2, rel=0.01)


def test_iterations_are_steps_of_a_warm_start():
    """On a gradient that does not change, three iterations are three steps of one."""
    matrix = {"w": normal(12, 10)}
    spec = "powersgd:rank=2,error_feedback=false,min_compression_rate=0"
    steps, at_once = (Simulation(f"{spec},iterations={i}", matrix, size=1) for i in (1, 3))
    for _ in range(2):
        for _ in range(3):
            expected = steps.step([matrix]).means[0]["w"]
        torch.testing.assert_close(at_once.step([matrix]).means[0]["w"], expected)


def test_many_iterations_find_the_best_approximation():
    parts = [normal(15, 10, seed=seed) for seed in range(3)]
    u, s, vh = torch.linalg.svd(sum(parts) / 3)
    best = (u[:, :2] * s[:2]) @ vh[:2]
    out = one_step(PowerSGD(rank=2, iterations=200), parts)[0]
    torch.testing.assert_close(out, best)
    assert float((one_step(PowerSGD(rank=2), parts)[0] - best).norm()) > 0.1


@pytest.mark.parametrize("iterations", [0, 1.5])
def test_iterations_are_checked(iterations):
    with pytest.raises(ValueError, match="powersgd: iterations must be an integer from 1 up"):
        PowerSGD(iterations=iterations)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 9),
    m=st.integers(1, 9),
    rank=st.integers(1, 10),
    true_rank=st.integers(0, 9),
    size=st.integers(1, 4),
    iterations=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_whatever_the_matrix_it_is_a_projection(n, m, rank, true_rank, size, iterations, seed):
    mean = low_rank(n, m, min(n, m, true_rank), seed=seed)
    noise = [normal(n, m, seed=seed + 7 + r) for r in range(size)]
    parts = [mean + part - sum(noise) / size for part in noise]
    out, p, _, state = one_step(PowerSGD(rank=rank, iterations=iterations), parts)
    torch.testing.assert_close(p.mT @ p, torch.eye(p.shape[1], dtype=p.dtype))
    torch.testing.assert_close(out, p @ (p.mT @ mean), rtol=1e-9, atol=1e-9)
    left = (mean - out).square().sum()
    torch.testing.assert_close(mean.square().sum(), out.square().sum() + left)
    assert left < 1e-16 or rank < min(n, m, true_rank)
    assert state["q"]["w"].isfinite().all()
    assert (state["q"]["w"] != 0).any(0).all()  # no column is lost


def test_two_steps_by_hand():
    """Rank 1 of diag(3, 1), whatever the start: P = Mq, out = P P^T M / |P|^2, q' = M^T P."""
    matrix = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    compressor = PowerSGD(rank=1, error_feedback=False)
    bucket = bucket_of({"w": matrix}, torch.float64, rank=0, size=1)
    state = compressor.init(bucket)
    a, b = 1.0, 2.0
    state["q"]["w"].copy_(torch.tensor([[a], [b]]))
    state["step"]["w"].fill_(1)  # a first step would draw
    for _ in range(2):
        bucket["w"].copy_(matrix)
        (outcome,) = simulate(compressor, [bucket], [state])
        outcome.commit(frozenset())
        outcome.mean.store_(bucket)
        p = torch.tensor([[3 * a], [b]], dtype=torch.float64)
        torch.testing.assert_close(bucket["w"], p @ p.mT @ matrix / p.square().sum())
        a, b = 9 * a, b
    assert state["step"]["w"].item() == 3


# -------------------------------------------------------------------------- gradients gone bad


@pytest.mark.parametrize(
    "spec",
    ["powersgd:rank=2", "powersgd:rank=2,error_feedback=false", "powersgd:rank=2,iterations=2"],
)
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


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_the_size_of_gradients_does_not_matter(size, iterations):
    grads = {"w": low_rank(20, 15, 2).float() * size}
    spec = f"powersgd:rank=2,error_feedback=false,iterations={iterations}"
    simulation = Simulation(spec, grads, size=2)
    for _ in range(3):
        out = simulation.step([grads, grads]).means[0]["w"]
    torch.testing.assert_close(out / size, grads["w"] / size, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------ state, layouts


def test_the_start_depends_on_seed_and_name_alone():
    grads = {"w": normal(7, 6), "v": normal(7, 6)}

    def step(seed, names, name="w", grad=grads["w"]):
        given = dict.fromkeys(names, grad)
        simulation = Simulation(PowerSGD(rank=1, seed=seed, error_feedback=False), given, size=1)
        return simulation.step([given]).means[0][name]

    assert torch.equal(step(0, "w"), step(0, "vw"))
    assert not torch.allclose(step(0, "w"), step(1, "w"))
    assert not torch.allclose(step(0, "vw"), step(0, "vw", "v"))


def test_skipped_parameters_keep_their_factor():
    params = {"w": torch.empty(7, 6), "v": torch.empty(7, 6)}
    simulation = Simulation(PowerSGD(rank=1), params, size=2)
    (group,) = simulation.groups
    before = {name: q.clone() for name, q in group.states[1]["q"].items()}
    simulation.step([{"w": normal(7, 6)}, {}])
    assert torch.equal(group.states[1]["q"]["v"], before["v"])
    assert not torch.equal(group.states[1]["q"]["w"], before["w"])
    assert [int(group.states[1]["step"][name]) for name in "wv"] == [1, 0]
    assert [int(group.states[1]["seed"][name]) for name in "wv"] == [0, -1]


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


def test_the_residual_is_taken_against_the_mean():
    """Each rank keeps what the mean lacks of its own gradient, as in the authors' experiments."""
    grads = [{"w": normal(12, 9, seed=seed)} for seed in range(2)]
    simulation = Simulation(Feedback(PowerSGD(rank=1)), grads[0], size=2)
    mean = simulation.step(grads).means[0]["w"]
    for rank, state in enumerate(simulation.groups[0].states):
        torch.testing.assert_close(state["residual"]["w"], grads[rank]["w"] - mean)


def test_the_residual_can_be_taken_against_the_own_projection():
    """Then a rank keeps nothing of what the agreed basis spans; the mean residual is the same."""
    grads = [{"w": normal(12, 9, seed=seed)} for seed in range(3)]
    residuals = {}
    for local in (False, True):
        simulation = Simulation(f"powersgd:rank=2,local_residual={local}", grads[0], size=3)
        out = simulation.step(grads).means[0]["w"]
        residuals[local] = [state["residual"]["w"] for state in simulation.groups[0].states]
    basis = torch.linalg.svd(out).U[:, :2]
    for grad, residual in zip(grads, residuals[True], strict=True):
        torch.testing.assert_close(residual, grad["w"] - basis @ (basis.mT @ grad["w"]))
    mean = {local: torch.stack(rows).mean(0) for local, rows in residuals.items()}
    torch.testing.assert_close(mean[True], mean[False], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(residuals[True][0], residuals[False][0])
