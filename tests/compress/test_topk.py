from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress import Feedback, Gather, Mean, TopK, bucket_of, simulate
from mpicomp.compress.sparse import index_dtype


def exchange(compressor, rows, *, dtype=torch.float32):
    """Means, states and messages of one step of bare vectors, past the rules."""
    size = len(rows)
    params = {"w": torch.empty(len(rows[0]))}
    buckets = [bucket_of(params, dtype, rank=rank, size=size) for rank in range(size)]
    states = [compressor.init(bucket) for bucket in buckets]
    for bucket, state, row in zip(buckets, states, rows, strict=True):
        compressor.load_(bucket, state, "w", torch.tensor(row, dtype=dtype))
    messages = []
    outcomes = simulate(compressor, buckets, states, tap=lambda _, m: messages.append(m))
    for outcome, bucket in zip(outcomes, buckets, strict=True):
        outcome.commit(frozenset())
        outcome.mean.store_(bucket)
    return [bucket.flat for bucket in buckets], states, messages


def test_worked_example():
    """Local top-1 of two ranks: only this semantics gives these three vectors."""
    rows = [[4, -1, 0.5, 3], [-1, -1, 2, 0.25]]
    means, states, _ = exchange(Feedback(TopK(density=0.25)), rows)
    assert [mean.tolist() for mean in means] == [[2, 0, 1, 0]] * 2
    assert states[0]["residual"]["w"].tolist() == [0, -1, 0.5, 3]
    assert states[1]["residual"]["w"].tolist() == [-1, -1, 0, 0.25]


def test_entries_chosen_by_several_ranks_are_added_up():
    means, states, _ = exchange(Feedback(TopK(0.2)), [[1, 9, 0, 0, 0], [0, -3, 1, 0, 0]])
    assert means[0].tolist() == [0, 3, 0, 0, 0]
    assert states[0]["residual"]["w"].tolist() == [1, 0, 0, 0, 0]


def test_low_precision_is_added_up_in_fp32():
    rows = [[x, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0] for x in (256, 1, 1, 2)]
    means, _, _ = exchange(TopK(0.1, error_feedback=False), rows, dtype=torch.bfloat16)
    assert means[0][0].item() == 65.0


def test_a_mean_can_be_taken_away():
    compressor = TopK(0.1)
    buckets = [bucket_of({"w": torch.empty(20)}, torch.float32, rank=r, size=2) for r in (0, 1)]
    for bucket in buckets:
        bucket.flat[bucket.rank :: 7] = 6.0
    mean = simulate(compressor, buckets, [{}, {}])[0].mean
    stored, taken = buckets[0].like(), buckets[0].like()
    mean.store_(stored)
    mean.subtract_(taken)
    assert torch.equal(stored.flat, -taken.flat)
    assert int(stored.flat.count_nonzero()) >= 2


@pytest.mark.parametrize(
    ("numel", "density", "k"),
    [(14_728_266, 0.001, 14_728), (269_722, 0.001, 269), (11_173_962, 0.001, 11_173),
     (10, 1e-9, 1), (10, 1.0, 10), (1, 0.5, 1), (0, 0.5, 0)],
)  # fmt: skip
def test_number_kept(numel, density, k):
    assert TopK(density).num_kept(numel) == k


def test_values_and_int32_indices_in_one_message():
    _, _, messages = exchange(TopK(0.1), [[1.0] * 50, [2.0] * 50])
    assert [type(m) for m in messages] == [Gather, Gather]
    assert messages[0].num_bytes == 5 * (4 + 4)
    assert index_dtype(2**31 - 1) == torch.int32
    assert index_dtype(2**31) == torch.int64


@pytest.mark.parametrize(
    ("density", "size", "kind"),
    [(0.49, 2, Gather), (0.5, 2, Mean), (0.5, 1, Mean), (0.24, 4, Gather), (0.25, 4, Mean),
     (0.01, 99, Gather), (0.01, 100, Mean)],
)  # fmt: skip
def test_dense_where_that_moves_fewer_bytes(density, size, kind):
    means, _, messages = exchange(TopK(density), [[1.0] * 100] * size)
    assert type(messages[0]) is kind
    assert kind is Gather or torch.equal(means[0], torch.ones(100))


def test_a_dense_step_leaves_nothing_in_the_residual():
    _, states, _ = exchange(Feedback(TopK(1.0)), [[1.0, 2.0], [5.0, -2.0]])
    assert not states[0]["residual"].flat.any()


@pytest.mark.parametrize(
    ("shape", "helps"),
    [((), False), ((100,), False), ((0, 4), False), ((1, 2), False), ((1, 3), True),
     ((64, 3, 3, 3), True)],
)  # fmt: skip
def test_vectors_and_tiny_tensors_go_dense(shape, helps):
    assert TopK(0.01).helps(shape) is helps
    assert not TopK(1.0).helps(shape)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 60), st.floats(0.01, 0.49), st.integers(0, 2**32 - 1))
def test_contraction(numel, density, seed):
    """What is left of x has at most 1 - k / n of its squared norm."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).double()
    compressor = Feedback(TopK(density))
    _, states, _ = exchange(compressor, [x.tolist()], dtype=torch.float64)
    k = TopK(density).num_kept(numel)
    left = states[0]["residual"].flat.square().sum()
    assert left <= (1 - k / numel) * x.square().sum() + 1e-12
