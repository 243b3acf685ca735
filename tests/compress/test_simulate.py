from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from mpicomp.compress import (
    AllToAll,
    Broadcast,
    Compressor,
    Dense,
    Exchanged,
    Gather,
    GatherV,
    Max,
    Mean,
    NoCompression,
    Simulation,
    Sum,
    bucket_of,
    simulate,
)
from mpicomp.errors import MismatchError


@dataclass(frozen=True)
class Script(Compressor):
    """Plays one message per rank and keeps what it was sent in the state."""

    make: object

    capabilities: ClassVar = NoCompression.capabilities

    def exchange(self, bucket, state):
        message = self.make(bucket.rank)
        if message is not None:
            state["answer"] = yield message
            state["mine"] = message.tensors
        return Exchanged(Dense(bucket.flat), Dense(bucket.flat))


def play(make, size=3):
    buckets = [bucket_of({}, torch.float32, rank=rank, size=size) for rank in range(size)]
    states = [{} for _ in buckets]
    simulate(Script(make), buckets, states)
    return states


def numbers(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def listed(answer):
    return [listed(a) if isinstance(a, tuple) else a.tolist() for a in answer]


@pytest.mark.parametrize(
    ("make", "answers"),
    [
        (lambda r: Mean((numbers(r, 1), numbers(3 * r))), [[[1, 1], [3]]] * 3),
        (lambda r: Sum((numbers(2**30, r, dtype=torch.int64),)), [[[3 * 2**30, 3]]] * 3),
        (lambda r: Sum((numbers(2048, 1, dtype=torch.float16),)), [[[6144, 3]]] * 3),
        (lambda r: Max((numbers(r, -r),)), [[[2, 0]]] * 3),
        (lambda r: Gather((numbers(r), numbers(-r))), [[[[0], [0]], [[1], [-1]], [[2], [-2]]]] * 3),
        (lambda r: GatherV((numbers(*range(r)),)), [[[[]], [[0]], [[0, 1]]]] * 3),
        (lambda r: Broadcast((numbers(r),), root=1), [[[1]]] * 3),
        (
            lambda r: AllToAll(tuple(numbers(*[10 * r + s] * s) for s in range(3))),
            [[[], [], []], [[1], [11], [21]], [[2, 2], [12, 12], [22, 22]]],
        ),
    ],
)
def test_answers(make, answers):
    assert [listed(state["answer"]) for state in play(make)] == answers


def test_a_mean_is_rounded_once():
    states = play(lambda r: Mean((numbers(60000, 2.0**-24, dtype=torch.float16),)), size=2)
    assert states[0]["answer"][0].tolist() == [60000, 2.0**-24]


def test_messages_are_spoilt_and_answers_are_private():
    kinds = [numbers(1), numbers(1, dtype=torch.int32), numbers(1, dtype=torch.bool)]
    states = play(lambda r: Gather(tuple(k.clone() for k in kinds)), size=2)
    mine = states[0]["mine"]
    assert mine[0].isnan().all()
    assert (mine[1].item(), mine[2].item()) == (2**31 - 1, True)
    states[0]["answer"][1][0].fill_(7)
    assert listed(states[1]["answer"]) == [[[1], [1], [True]]] * 2


@pytest.mark.parametrize(
    "make",
    [
        lambda r: Mean((torch.zeros(2 + r),)),
        lambda r: Mean((torch.zeros(2, dtype=[torch.float32, torch.float64, torch.float32][r]),)),
        lambda r: [Mean, Sum, Mean][r]((torch.zeros(2),)),
        lambda r: Mean((torch.zeros(2),) * (r + 1)),
        lambda r: GatherV((torch.zeros(2, 1 + r),)),
        lambda r: Broadcast((torch.zeros(2),), root=r),
        lambda r: Mean((torch.zeros(2),)) if r else None,
    ],
)
def test_ranks_that_differ_are_reported(make):
    with pytest.raises(MismatchError, match=r"on rank 0 and .* on rank 1"):
        play(make)


def test_strides_are_kept():
    params = {"c": torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)}
    params |= {"t": torch.empty(3, 5).T, "gaps": torch.empty(4, 8)[:, ::2]}
    bucket = bucket_of(params, torch.float32, rank=0, size=1)
    assert bucket["c"].is_contiguous(memory_format=torch.channels_last)
    assert bucket["t"].stride() == (1, 5)
    assert bucket["gaps"].is_contiguous()
    assert bucket.flat.numel() == 96 + 15 + 16


def test_parameters_unused_on_all_ranks_have_no_mean():
    params = {"a": torch.empty(2), "b": torch.empty(2)}
    simulation = Simulation("none", params, size=2)
    result = simulation.step([{"a": torch.ones(2), "b": None}, {}])
    assert listed([result.means[1]["a"]]) == [[0.5, 0.5]]
    assert result.means[0]["b"] is None
    assert result.good


def test_the_number_of_gradients_is_that_of_the_ranks():
    with pytest.raises(ValueError, match="one entry for each of 2 ranks, got 1"):
        Simulation("none", {"a": torch.empty(2)}, size=2).step([{}])


def test_a_gradient_of_no_parameter_is_refused():
    simulation = Simulation("none", {"w": torch.empty(2)}, size=1)
    with pytest.raises(ValueError, match="grads must be of the parameters given, got 'v'"):
        simulation.step([{"v": torch.zeros(2)}])
