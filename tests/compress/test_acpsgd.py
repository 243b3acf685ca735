from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress import ACPSGD, Simulation, bucket_of, simulate

PLAIN = "acpsgd:error_feedback=false"


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def low_rank(n, m, rank, seed=0):
    return normal(n, rank, seed=seed) @ normal(rank, m, seed=seed + 1)


def means(spec, grads, steps):
    """The means of ``w`` in the next steps, all with the same gradients of all ranks."""
    given = [{"w": grad} for grad in grads]
    simulation = spec if isinstance(spec, Simulation) else make(spec, grads)
    return [simulation.step(given).means[0]["w"] for _ in range(steps)]


def make(spec, grads):
    return Simulation(spec, {"w": grads[0]}, size=len(grads))


def relative(out, expected):
    return float((out - expected).norm() / expected.norm())


# --------------------------------------------------------------------------------- the algebra


def test_three_steps_by_hand():
    """diag(3, 1) at rank 1, from q = (1, 2): M q q^T / |q|^2, then p p^T M / |p|^2 with p = M q."""
    matrix = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    compressor = ACPSGD(rank=1, error_feedback=False)
    bucket = bucket_of({"w": matrix}, torch.float64, rank=0, size=1)
    state = compressor.init(bucket)
    state["q"]["w"].copy_(torch.tensor([[1.0], [2.0]]))
    state["step"]["w"].fill_(2)  # even, and not the first, which would draw
    expected = [
        torch.tensor([[3.0, 6.0], [2.0, 4.0]]) / 5,
        torch.tensor([[27.0, 6.0], [18.0, 4.0]]) / 13,  # p = (3, 2)
        torch.tensor([[243.0, 54.0], [18.0, 4.0]]) / 85,  # q = (9, 2)
    ]
    for out in expected:
        bucket["w"].copy_(matrix)
        (outcome,) = simulate(compressor, [bucket], [state])
        outcome.commit(frozenset())
        outcome.mean.store_(bucket)
        torch.testing.assert_close(bucket["w"], out.double())
    assert state["step"]["w"].item() == 5
    torch.testing.assert_close(state["q"]["w"].abs(), torch.tensor([[1.0], [2 / 9]]).double())
    torch.testing.assert_close(state["p"]["w"].abs(), torch.tensor([[1.0], [2 / 27]]).double())


def test_one_step_covers_one_side_and_two_steps_cover_both():
    """Low rank is not enough in the first step, where Q is random; it is in the second."""
    mean, noise = low_rank(20, 15, 3), normal(20, 15, seed=9)
    first, second, third = means(f"{PLAIN},rank=3", [mean + noise, mean - noise], 3)
    assert relative(first, mean) > 0.1
    assert relative(second, mean) < 1e-13
    assert relative(third, mean) < 1e-13


def test_not_exact_where_only_the_parts_have_low_rank():
    parts = [low_rank(20, 15, 2, seed=seed) for seed in (0, 5, 10)]
    assert all(relative(out, sum(parts) / 3) > 0.1 for out in means(f"{PLAIN},rank=2", parts, 6))


def test_converges_to_the_best_approximation_at_the_ratio_of_singular_values():
    """Half a step of PowerSGD each: the square of its ratio takes two."""
    left, right = (torch.linalg.qr(normal(20, 6, seed=seed)).Q for seed in range(2))
    values = torch.tensor([5.0, 4.0, 2.0, 1.0, 0.5, 0.25], dtype=torch.float64)
    best = (left[:, :2] * values[:2]) @ right[:, :2].mT
    outs = means(f"{PLAIN},rank=2", [(left * values) @ right.mT], 26)
    errors = [float((out - best).norm()) for out in outs]
    for before, after in itertools.pairwise(errors[16:]):
        assert after / before == pytest.approx(2 / 4, rel=0.01)


def test_full_rank_of_a_square_is_the_plain_mean():
    parts = [normal(6, 6, seed=seed) for seed in range(3)]
    for out in means(f"{PLAIN},rank=6,min_compression_rate=0", parts, 4):
        torch.testing.assert_close(out, sum(parts) / 3)


def assert_projection(matrix, decoded, *, left):
    """On the span of the left factor or of the right one, whose columns are orthonormal."""
    ((_, p, q),) = decoded.factors
    basis, out = p if left else q, p @ q.mT
    torch.testing.assert_close(basis.mT @ basis, torch.eye(basis.shape[1], dtype=basis.dtype))
    expected = basis @ (basis.mT @ matrix) if left else (matrix @ basis) @ basis.mT
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        matrix.square().sum(), out.square().sum() + (matrix - out).square().sum()
    )


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 9),
    m=st.integers(1, 9),
    rank=st.integers(1, 10),
    true_rank=st.integers(0, 9),
    size=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_whatever_the_matrix_each_step_is_a_projection(n, m, rank, true_rank, size, seed):
    """Even steps project on the span of Q, odd ones on that of P: what is sent, and the mean."""
    compressor = ACPSGD(rank=rank)
    params = {"w": torch.empty(n, m, dtype=torch.float64)}
    buckets = [bucket_of(params, torch.float64, rank=r, size=size) for r in range(size)]
    states = [compressor.init(bucket) for bucket in buckets]
    for step in range(4):
        parts = [
            low_rank(n, m, min(n, m, true_rank), seed=seed + step + 9 * r) for r in range(size)
        ]
        for bucket, part in zip(buckets, parts, strict=True):
            bucket["w"].copy_(part)
        outcomes = simulate(compressor, buckets, states)
        for part, outcome in zip(parts, outcomes, strict=True):
            assert_projection(part, outcome.sent, left=step % 2 == 1)
            assert_projection(sum(parts) / size, outcome.mean, left=step % 2 == 1)
            outcome.commit(frozenset())
        factor = states[0]["q" if step % 2 else "p"]["w"]
        assert factor.isfinite().all()
        assert (factor != 0).any(0).all()  # no column is lost


def test_the_residual_is_taken_against_the_own_projection():
    """So a rank keeps nothing that the agreed factor spans; the mean residual is what is lost."""
    grads = [{"w": normal(12, 9, seed=seed)} for seed in range(2)]
    simulation = Simulation("acpsgd:rank=2", grads[0], size=2)
    total = torch.zeros(12, 9, dtype=torch.float64)
    for step in range(4):
        out = simulation.step(grads).means[0]["w"]
        total += out
        u, _, vh = torch.linalg.svd(out)
        residuals = [state["residual"]["w"] for state in simulation.groups[0].states]
        for residual in residuals:
            product = u[:, :2].mT @ residual if step % 2 else residual @ vh[:2].mT
            assert product.abs().max() < 1e-12
        expected = (step + 1) * (grads[0]["w"] + grads[1]["w"]) / 2 - total
        torch.testing.assert_close(sum(residuals) / 2, expected)


# -------------------------------------------------------------------------- gradients gone bad


@pytest.mark.parametrize("zero_steps", [1, 2, 3, 4])
def test_recovery_after_zero_gradients(zero_steps):
    zeros, grad = [torch.zeros(20, 15)] * 2, low_rank(20, 15, 2).float()
    simulation = make(f"{PLAIN},rank=2", zeros)
    assert not any(out.any() for out in means(simulation, zeros, zero_steps))
    torch.testing.assert_close(means(simulation, [grad] * 2, 2)[1], grad, rtol=1e-4, atol=1e-5)


def test_a_gradient_far_from_the_first_rows_and_columns_is_found_after_zeros():
    """A basis filled up with unit vectors would never see it."""
    grad = torch.zeros(30, 20)
    grad[20:, 15:] = normal(10, 1).float() @ normal(1, 5, seed=1).float()
    simulation = make(f"{PLAIN},rank=2", [grad])
    means(simulation, [torch.zeros(30, 20)], 5)
    torch.testing.assert_close(means(simulation, [grad], 2)[1], grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("poor_steps", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recovery_after_gradients_of_lower_rank(dtype, poor_steps):
    poor, rich = (low_rank(20, 15, rank).to(dtype) for rank in (1, 3))
    simulation = make(f"{PLAIN},rank=3", [poor])
    for out in means(simulation, [poor], poor_steps)[1:]:
        torch.testing.assert_close(out, poor, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(means(simulation, [rich], 2)[1], rich, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_the_size_of_gradients_does_not_matter(size):
    grad = low_rank(20, 15, 2).float() * size
    for out in means(f"{PLAIN},rank=2", [grad, grad], 5)[1:]:
        torch.testing.assert_close(out / size, grad / size, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_of_16_bit_gradients_are_fp32(dtype):
    grad = low_rank(64, 48, 2).to(dtype)
    simulation = make(f"{PLAIN},rank=4", [grad, grad])
    out = means(simulation, [grad, grad], 2)[1]
    state = simulation.groups[0].states[0]
    assert (out.dtype, state["p"]["w"].dtype, state["q"]["w"].dtype) == (
        dtype,
        *[torch.float32] * 2,
    )
    torch.testing.assert_close(out.float(), grad.float(), rtol=0.05, atol=0.1)


# ------------------------------------------------------------------------------- state, buckets


def test_a_turn_does_not_depend_on_the_bucket():
    """``w`` has taken a step when ``v`` joins its bucket: each goes on as it would alone."""
    grads = {"w": normal(9, 7), "v": normal(8, 6, seed=1), "u": normal(9, 7, seed=2)}
    compressor = ACPSGD(rank=2)

    def step(state, names):
        bucket = bucket_of({n: grads[n] for n in names}, torch.float64, rank=0, size=1)
        for name, view in bucket.items():
            view.copy_(grads[name])
        merged = {
            slot: {n: state[n][slot][n] for n in names} for slot in ("p", "q", "step", "seed")
        }
        (outcome,) = simulate(compressor, [bucket], [merged])
        outcome.commit(frozenset())
        outcome.mean.store_(bucket)
        return {name: view.clone() for name, view in bucket.items()}

    def fresh():
        shapes = {name: {name: grad} for name, grad in grads.items()}
        return {
            name: compressor.init(bucket_of(like, torch.float64, rank=0, size=1))
            for name, like in shapes.items()
        }

    together, alone = fresh(), fresh()
    for names in ("w", "wv", "wvu", "u", "uvw"):
        outs = step(together, names)
        for name in names:
            torch.testing.assert_close(outs[name], step(alone, name)[name])
    assert [int(together[name]["step"][name]) for name in "wvu"] == [4, 3, 3]


def test_skipped_parameters_keep_factors_and_turn():
    params = {"w": torch.empty(7, 6), "v": torch.empty(7, 6)}
    simulation = Simulation("acpsgd:rank=1", params, size=2)
    simulation.step([{"w": normal(7, 6), "v": normal(7, 6)}] * 2)
    state = simulation.groups[0].states[1]
    before = {slot: state[slot]["v"].clone() for slot in ("p", "q", "step", "seed", "residual")}
    simulation.step([{"w": normal(7, 6)}, {}])
    assert all(torch.equal(state[slot]["v"], tensor) for slot, tensor in before.items())
    assert [int(state["step"][name]) for name in "wv"] == [2, 1]


def test_layouts_do_not_change_the_mathematics():
    grad = low_rank(12, 9, 2).float()
    for like in (grad, grad.T.contiguous().T):
        simulation = Simulation("acpsgd:rank=2,error_feedback=false", {"w": like}, size=1)
        out = means(simulation, [grad], 2)[1]
        torch.testing.assert_close(out, grad, rtol=1e-4, atol=1e-5)
