from __future__ import annotations

import pytest
import torch

from mpicomp.compress import Dense, Sparse, bucket_of
from mpicomp.compress.velocity import (
    PartlyDense,
    Ranges,
    commit_velocity,
    init_velocity,
    load_velocity_,
    split,
)


def bucket_with(*shapes):
    params = {f"p{i}": torch.empty(shape) for i, shape in enumerate(shapes)}
    return bucket_of(params, torch.float32, rank=0, size=1)


def is_vector(shape):
    return len(shape) < 2


def test_neighbours_are_joined():
    bucket = bucket_with((2, 3), (4,), (), (0, 7), (1, 2), (2, 2), (0,))
    dense, rest = split(bucket, is_vector)
    assert dense.bounds == ((6, 11),)
    assert rest.bounds == ((0, 6), (11, 17))
    assert (dense.numel, rest.numel) == (5, 12)


@pytest.mark.parametrize("shapes", [(), ((0, 3), (0,)), ((2, 2),), ((3,),)])
def test_a_group_may_be_empty(shapes):
    bucket = bucket_with(*shapes)
    dense, rest = split(bucket, is_vector)
    assert dense.numel + rest.numel == bucket.flat.numel()
    for part in (dense, rest):
        assert part.take(bucket.flat).numel() == part.numel
        assert part.positions(torch.empty(0, dtype=torch.int64)).numel() == 0


def test_positions_lead_back_into_the_bucket():
    ranges = Ranges(((2, 5), (7, 8), (9, 12)))
    flat = torch.arange(20.0)
    taken = ranges.take(flat)
    assert taken.tolist() == [2, 3, 4, 7, 9, 10, 11]
    picks = torch.tensor([6, 0, 3, 2, 4])
    assert torch.equal(flat[ranges.positions(picks)], taken[picks])


def test_what_is_taken_has_memory_of_its_own():
    flat = torch.zeros(4)
    Ranges(((1, 3),)).take(flat).fill_(1.0)
    assert not flat.any()


def test_partly_dense_is_written_out_and_taken_away():
    bucket = bucket_with((6,))
    rest = Sparse(torch.tensor([0]), torch.tensor([5.0]))
    decoded = PartlyDense(Ranges(((2, 4),)), (torch.tensor([1.0, 2.0]),), rest)
    bucket.flat.fill_(9.0)
    decoded.store_(bucket)
    assert bucket.flat.tolist() == [5, 0, 1, 2, 0, 0]
    bucket.flat.fill_(9.0)
    decoded.subtract_(bucket)
    assert bucket.flat.tolist() == [4, 9, 8, 7, 9, 9]
    assert decoded.is_finite()
    for bad in (float("nan"), float("inf")):
        decoded.values[0][1] = bad
        assert not decoded.is_finite()


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_gradient_may_lie_in_the_bucket(nesterov):
    """Autograd adds to gradients in place, and they are views of the bucket."""
    outcomes = []
    for inside in (False, True):
        bucket = bucket_with((2, 2))
        state = init_velocity(bucket)
        state["momentum"]["p0"].fill_(2.0)
        state["velocity"]["p0"].fill_(3.0)
        grad = bucket["p0"] if inside else torch.empty(2, 2)
        grad.fill_(8.0)
        load_velocity_(bucket, state, "p0", grad, scale=4.0, momentum=0.5, nesterov=nesterov)
        outcomes.append(bucket.flat.clone())
    # u = 0.5 * 2 + 8 / 4 = 3; then 3 + u, or with nesterov 3 + 0.5 u + 8 / 4
    assert torch.equal(outcomes[0], torch.full((4,), 6.5 if nesterov else 6.0))
    assert torch.equal(outcomes[0], outcomes[1])


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_a_gradient_the_velocity_runs_on(nesterov):
    bucket = bucket_with((2, 2))
    state = init_velocity(bucket)
    state["momentum"]["p0"].fill_(2.0)
    load_velocity_(bucket, state, "p0", None, scale=4.0, momentum=0.5, nesterov=nesterov)
    assert torch.equal(bucket.flat, torch.full((4,), 0.5 if nesterov else 1.0))
    nothing = Sparse(torch.empty(0, dtype=torch.int64), torch.empty(0))
    commit_velocity(bucket, state, nothing, frozenset(), momentum=0.5, nesterov=nesterov)
    assert torch.equal(state["momentum"].flat, torch.ones(4))
    assert torch.equal(state["velocity"].flat, bucket.flat)


def test_dense_parts_keep_their_momentum():
    bucket = bucket_with((4,))
    state = init_velocity(bucket)
    grad = torch.tensor([1.0, 2.0, 3.0, 4.0])
    load_velocity_(bucket, state, "p0", grad, scale=1.0, momentum=0.5)
    whole = Ranges(((0, 2),))
    rest = Sparse(torch.tensor([3]), bucket.flat[3:].clone())
    sent = PartlyDense(whole, whole.views(bucket.flat), rest)
    commit_velocity(bucket, state, sent, frozenset())
    assert state["momentum"].flat.tolist() == [1, 2, 3, 0]
    assert state["velocity"].flat.tolist() == [0, 0, 3, 0]


def test_what_cannot_be_masked_is_refused():
    bucket = bucket_with((4,))
    with pytest.raises(AssertionError):
        commit_velocity(bucket, init_velocity(bucket), Dense(bucket.flat), frozenset())
