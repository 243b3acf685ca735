from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress import AllToAll, Broadcast, GTopK, Mean, Simulation, parse
from mpicomp.compress.sparse import add_up, pack_pairs, unpack_pairs

SIZES = [1, 2, 3, 4, 5, 8]


def rows(*values):
    return [{"w": torch.tensor([row], dtype=torch.float64)} for row in values]


def run(spec, grads, *, steps=1):
    seen = []
    simulation = Simulation(
        spec, grads[0], size=len(grads), tap=lambda r, m: seen.append(m) if r == 0 else None
    )
    means = [simulation.step(grads).means[0]["w"] for _ in range(steps)]
    states = simulation.groups[0].states
    residuals = [state["residual"]["w"] for state in states if "residual" in state]
    return means, residuals, seen


def normal(size, shape, *, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [{"w": torch.randn(shape, generator=generator).to(dtype)} for _ in range(size)]


@pytest.mark.parametrize("complete", ["true", "false"])
def test_worked_example(complete):
    """Both choose 4 and 2; the merge keeps 4 of rank 0 and drops the 2 of rank 1."""
    grads = rows([4, -1, 0.5, 3], [-1, -1, 2, 0.25])
    means, residuals, _ = run(f"gtopk:density=0.25,complete={complete}", grads)
    assert means[0].tolist() == [[2, 0, 0, 0]]
    # who keeps the 2: the rank that dropped it, or the one that sent it
    kept = [[[0, -1, 2.5, 3]], [[-1, -1, 0, 0.25]]]
    back = [[[0, -1, 0.5, 3]], [[-1, -1, 2, 0.25]]]
    assert [r.tolist() for r in residuals] == (kept if complete == "true" else back)


def test_what_leaks_as_published_and_what_does_not():
    """Rank 1's 3 at place 0 is dropped in the first merge; place 0 then wins by ranks 2 and 3."""
    none = [0.0] * 7
    grads = rows([0, 5, 0, *none], [3, 0, 0, *none], [9, 0, 0, *none], [0, 0, 1, *none])
    for complete, left in ((True, [3, 5, 1, *none]), (False, [0, 5, 1, *none])):
        spec = f"gtopk:density=0.1,complete={str(complete).lower()}"
        means, residuals, _ = run(spec, grads)
        assert means[0].tolist() == [[9 / 4, 0, 0, *none]]
        assert torch.stack(residuals).sum(0).tolist() == [left]


def test_merges_add_up_what_several_ranks_chose():
    zeros = [0.0] * 6
    grads = rows([3, 2, 0, 0, *zeros], [0, 2, 2.5, 0, *zeros])
    assert run("gtopk:density=0.2", grads)[0][0].tolist() == [[1.5, 2, 0, 0, *zeros]]
    # the other half keeps (-3, 4, 0, 0), so the first place cancels; 2.5 and 1 are gone by then
    grads += rows([-3, 2, 0, 0, *zeros], [0, 2, 0, 1, *zeros])
    assert run("gtopk:density=0.2", grads)[0][0].tolist() == [[0, 2, 0, 0, *zeros]]


def test_ties_go_to_the_lowest_index():
    none = [0.0] * 6
    grads = rows([0, 0, 1, 0, *none], [0, 1, 0, 0, *none], [0, 0, 0, -1, *none])
    assert run("gtopk:density=0.1", grads)[0][0].tolist() == [[0, 1 / 3, 0, 0, *none]]


@pytest.mark.parametrize("size", SIZES)
def test_exactly_k_elements_and_their_sum(size):
    grads = normal(size, (10, 20), seed=size)
    (mean,), _, _ = run("gtopk:density=0.05", grads)
    assert int(mean.count_nonzero()) == 10
    if size <= 2:  # one merge: the k largest of the sum of both top-k
        total = torch.zeros(200, dtype=torch.float64)
        for grad in grads:
            flat = grad["w"].view(-1)
            top = flat.abs().topk(10).indices
            total[top] += flat[top]
        expected = torch.zeros_like(total)
        best = total.abs().topk(10).indices
        expected[best] = total[best] / size
        torch.testing.assert_close(mean.view(-1), expected, rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("complete", [True, False])
def test_conservation(size, complete):
    """Nothing is lost; as published the residuals lack something from three ranks up."""
    steps, grads = 20, normal(size, (10, 20), seed=size)
    spec = f"gtopk:density=0.05,complete={str(complete).lower()}"
    means, residuals, _ = run(spec, grads, steps=steps)
    given_ = steps * torch.stack([grad["w"] for grad in grads]).mean(0)
    total = torch.stack(means).sum(0) + torch.stack(residuals).mean(0)
    exact = torch.allclose(total, given_, rtol=1e-12, atol=1e-12)
    assert exact == (complete or size <= 2)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_takes_back_only_what_is_its_own_as_published(size):
    grads = normal(size, (10, 20), seed=size)
    (mean,), residuals, _ = run("gtopk:density=0.05,complete=false", grads)
    for grad, residual in zip(grads, residuals, strict=True):
        top = grad["w"].view(-1).abs().topk(10).indices
        chosen = torch.zeros(200, dtype=torch.bool).index_fill_(0, top, True).view(10, 20)
        expected = torch.where(chosen & (mean != 0), 0.0, grad["w"])
        assert torch.equal(residual, expected)


@pytest.mark.parametrize("size", SIZES)
def test_rounds_and_bytes(size):
    grads = normal(size, (10, 20), dtype=torch.float32)
    sent = [0] * size

    def tap(rank, message):
        if isinstance(message, AllToAll):
            assert len(message.tensors) == size
            sent[rank] += message.num_bytes

    Simulation("gtopk:density=0.05", grads[0], size=size, tap=tap).step(grads)
    _, _, seen = run("gtopk:density=0.05", grads)
    assert [type(m) for m in seen] == [AllToAll] * math.ceil(math.log2(size)) + [Broadcast]
    assert sent == [0] + [10 * 8] * (size - 1)  # all but the root send once
    assert seen[-1].num_bytes == 10 * 8
    assert seen[-1].tensors[1].dtype == torch.int32


@pytest.mark.parametrize(
    ("density", "size", "kind"),
    [(0.49, 2, AllToAll), (0.5, 2, Mean), (0.24, 4, AllToAll), (0.25, 4, Mean),
     (0.16, 8, AllToAll), (0.17, 8, Mean), (0.5, 1, Mean)],
)  # fmt: skip
def test_dense_where_that_moves_fewer_bytes(density, size, kind):
    _, _, seen = run(f"gtopk:density={density}", normal(size, (10, 10), dtype=torch.float32))
    assert type(seen[0]) is kind


def test_low_precision_is_merged_in_fp32():
    params = {"w": torch.empty(1, 11, dtype=torch.bfloat16)}
    grads = [{"w": torch.zeros(1, 11).bfloat16().index_fill(1, torch.tensor([0]), x)}
             for x in (256, 1, 1, 2)]  # fmt: skip
    simulation = Simulation("gtopk:density=0.1,error_feedback=false", params, size=4)
    assert simulation.step(grads).means[0]["w"][0, 0].item() == 65.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_without_a_memory_bad_numbers_come_through(bad):
    grads = normal(5, (10, 20))
    grads[3]["w"][2, 3] = bad
    simulation = Simulation("gtopk:density=0.05,error_feedback=false", grads[0], size=5)
    result = simulation.step(grads)
    assert not result.good
    assert not result.means[0]["w"][2, 3].isfinite()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(0, 30), st.integers(0, 2**32 - 1))
def test_pairs_are_added_up(parts, length, seed):
    generator = torch.Generator().manual_seed(seed)
    pairs, dense = [], torch.zeros(40, dtype=torch.float64)
    for _ in range(parts):
        indices = torch.randperm(40, generator=generator)[:length].int()
        values = torch.randn(length, generator=generator).double()
        dense[indices] += values
        pairs.append((values, indices))
    values, indices = add_up(pairs)
    assert torch.equal(indices, indices.unique())
    assert torch.equal(values, dense[indices])
    dense[indices] = 0.0
    assert not dense.any()


@pytest.mark.parametrize("values", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("indices", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_pairs_are_packed_without_loss(values, indices, count):
    """Bytes may begin anywhere in memory, and there may be none."""
    pairs = torch.randn(count).to(values), torch.arange(count, dtype=indices) + 2**24 + 1
    packed = pack_pairs(*pairs).view(-1)
    assert packed.numel() == count * (values.itemsize + indices.itemsize)
    shifted = torch.cat([packed.new_zeros(3), packed])[3:]
    out = unpack_pairs(shifted, values=values, indices=indices)
    assert torch.equal(out[0], pairs[0])
    assert torch.equal(out[1], pairs[1])
    assert out[1].dtype == indices


def test_settings():
    assert parse("gtopk").capabilities.conserves
    assert not parse("gtopk:complete=false").capabilities.mean_of_sent
    with pytest.raises(ValueError, match="gtopk: density must be in"):
        GTopK(density=0.0)
