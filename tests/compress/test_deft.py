from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress import DEFT, Broadcast, GatherV, Mean, bucket_of, simulate
from mpicomp.compress.deft import COMMON, allot, assign_bins, fragment_sizes, norms

SIZES = [100, 200, 50, 8, 40]
NORMS = [3.0, 4.0, 2.0, 6.0, 1.0]


def test_large_tensors_are_cut_into_one_piece_a_rank():
    assert fragment_sizes([100, 400, 60, 10, 30], 4) == [100, 100, 100, 100, 100, 60, 10, 30]
    assert fragment_sizes([11, 1], 3) == [4, 4, 3, 1]
    assert fragment_sizes([2, 0, 1], 5) == [1, 1, 1]  # no empty ones
    assert fragment_sizes([5, 3], 1) == [5, 3]
    assert fragment_sizes([], 2) == []


def loads(bins, counts, size):
    costs = [n * math.log2(k) if k > 1 else n for n, k in zip(SIZES, counts, strict=True)]
    return [sum(c for c, b in zip(costs, bins, strict=True) if b == one) for one in range(size)]


@pytest.mark.parametrize(
    ("k", "counts", "bins", "expected"),
    [
        (20, [4, 5, 2, 7, 2], [1, 0, 1, 1, 1], [464.386, 312.459]),
        (40, [10, 12, 6, 8, 4], [1, 0, 1, COMMON, 1], [716.993, 541.441]),
    ],
)
def test_known_allotment(k, counts, bins, expected):
    assert allot(SIZES, NORMS, k) == counts
    assert assign_bins(SIZES, counts, 2) == bins
    assert loads(bins, counts, 2) == pytest.approx(expected, abs=1e-3)


def test_a_fragment_without_gradient_gets_one_element():
    assert allot([10, 10], [5.0, 0.0], 6) == [6, 1]
    assert allot([10, 10], [0.0, 0.0], 6) == [1, 1]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=20),
    st.integers(1, 9),
    st.floats(0.001, 1.0),
    st.integers(0, 2**32 - 1),
)
def test_fragments_counts_and_bins_are_whole(tensors, size, density, seed):
    sizes = fragment_sizes(tensors, size)
    assert sum(sizes) == sum(tensors)
    assert all(n > 0 for n in sizes)
    weights = torch.rand(len(sizes), generator=torch.Generator().manual_seed(seed)).tolist()
    k = max(1, int(density * sum(sizes)))
    counts = allot(sizes, weights, k)
    assert all(1 <= kept <= n for kept, n in zip(counts, sizes, strict=True))
    assert sum(counts) <= k + len(sizes)
    bins = assign_bins(sizes, counts, size)
    for where, kept, n in zip(bins, counts, sizes, strict=True):
        assert (where == COMMON) == (kept == n)
        assert where < size


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_norms_within_the_range_of_numbers(scale):
    found = norms(torch.tensor([3.0, 4.0, 0.0, 1.0]) * scale, [2, 1, 1])
    assert [n / found[0] for n in found] == pytest.approx([1.0, 0.0, 0.2])


def test_norms_of_zeros_are_sizes():
    assert norms(torch.zeros(5), [2, 3]) == [2.0, 3.0]


# --------------------------------------------------------------------------------- whole steps


def step(compressor, buckets, states):
    """Outcomes and, for each kind of message, what each rank sent."""
    sent = {}
    outcomes = simulate(
        compressor,
        buckets,
        states,
        tap=lambda _, m: sent.setdefault(type(m), []).append([t.clone() for t in m.tensors]),
    )
    for outcome in outcomes:
        outcome.commit(frozenset())
    return outcomes, sent


def ranks(compressor, shapes, size, seed=0, factors=None):
    params = {str(i): torch.empty(shape) for i, shape in enumerate(shapes)}
    buckets = [bucket_of(params, torch.float32, rank=rank, size=size) for rank in range(size)]
    generator = torch.Generator().manual_seed(seed)
    for bucket in buckets:
        for name, view in bucket.items():
            factor = 1.0 if factors is None else factors[int(name)]
            view.copy_(torch.randn(view.shape, generator=generator) * factor)
    return buckets, [compressor.init(bucket) for bucket in buckets]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_nothing_is_chosen_twice_and_the_sum_is_near_the_target(size):
    compressor = DEFT(density=0.02)
    buckets, states = ranks(compressor, [(100, 100), (50, 60), (40, 10)], size)
    target = int(0.02 * 13_400)
    for _ in range(5):
        outcomes, sent = step(compressor, buckets, states)
        chosen = torch.cat([own for (own,) in sent[GatherV]])
        assert len(chosen.unique()) == len(chosen)
        (values,) = sent[Mean][0]
        assert abs(len(values) - target) <= 0.1 * target
        assert torch.equal(outcomes[0].mean.indices.sort().values, chosen.sort().values)


def test_all_ranks_have_each_bin_in_turn():
    compressor = DEFT(density=0.05)
    buckets, states = ranks(compressor, [(60, 50)], 3)
    seen = []
    for t in range(3):
        _, sent = step(compressor, buckets, states)
        bins = sent[Broadcast][t][0]  # the leader's
        assert sorted(bins.tolist()) == [0, 1, 2]
        pieces = [own // 1000 for (own,) in sent[GatherV]]
        assert all(len(piece.unique()) == 1 for piece in pieces)
        assert [bins[piece[0]].item() for piece in pieces] == [(t + rank) % 3 for rank in range(3)]
        seen.append([piece[0].item() for piece in pieces])
    assert [sorted(row) for row in zip(*seen, strict=True)] == [[0, 1, 2]] * 3


@pytest.mark.parametrize("size", [1, 2, 3])
def test_fragments_sent_as_a_whole_need_no_indices(size):
    """A small tensor with almost all of the gradient: all of it is sent, by all ranks."""
    compressor = DEFT(density=0.05)
    buckets, states = ranks(compressor, [(50, 40), (2, 3)], size, factors=[1e-3, 100.0])
    for _ in range(3):
        outcomes, sent = step(compressor, buckets, states)
        assert torch.cat([own for (own,) in sent[GatherV]]).max() < 2000
        mean = buckets[0].like()
        outcomes[0].mean.store_(mean)
        torch.testing.assert_close(mean["1"], torch.stack([b["1"] for b in buckets]).mean(0))


def test_a_rank_chooses_as_its_own_norms_say():
    """The leader sees the gradient in one tensor, the other rank in the other."""
    compressor = DEFT(density=0.05)
    buckets, states = ranks(compressor, [(20, 50), (20, 50)], 2)
    buckets[1]["0"].mul_(1e-3)
    _, sent = step(compressor, buckets, states)
    bins = sent[Broadcast][0][0].tolist()
    other = bins.index(1)  # the fragment of rank 1 in the first step
    kept = sent[GatherV][1][0].numel()
    assert kept == allot([1000] * 2, norms(buckets[1].flat, [1000] * 2), 100)[other]


def test_fewer_ranks_than_before():
    compressor = DEFT(density=0.05)
    buckets, states = ranks(compressor, [(60, 50)], 3)
    step(compressor, buckets, states)
    for bucket in buckets:
        bucket.size = 2
    outcomes, _ = step(compressor, buckets[:2], states[:2])
    assert abs(outcomes[0].mean.indices.numel() - 150) <= 15


def test_more_fragments_than_elements_to_keep_goes_dense():
    compressor = DEFT(density=0.01)
    buckets, states = ranks(compressor, [(1, 1)] * 40, 2)
    _, sent = step(compressor, buckets, states)
    assert list(sent) == [Mean]
