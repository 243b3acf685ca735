from __future__ import annotations

import pytest
import torch

from mpicomp.compress import (
    Feedback,
    NoCompression,
    PowerSGD,
    Simulation,
    TopK,
    bucket_of,
    simulate,
    with_feedback,
)

PARAMS = {"w": torch.empty(1, 8)}


def row(*values):
    return {"w": torch.tensor([[*values, *[0.0] * (8 - len(values))]])}


def residual(simulation, rank=0):
    (group,) = simulation.groups
    return group.states[rank]["residual"]["w"].view(-1).tolist()


def test_by_hand_over_three_steps():
    simulation = Simulation("topk:density=0.125", PARAMS, size=1)
    means = [simulation.step([row(4, 3, 1)]).means[0]["w"][0, :3].tolist() for _ in range(3)]
    # accumulators (4, 3, 1), (4, 6, 2) and (8, 3, 3); the largest is sent
    assert means == [[4, 0, 0], [0, 6, 0], [8, 0, 0]]
    assert residual(simulation)[:3] == [0, 3, 3]


def test_the_residual_is_in_unscaled_units():
    simulation = Simulation("topk:density=0.125", PARAMS, size=1)
    simulation.step([row(4 * 65536, 3 * 65536)], scale=65536.0)
    assert residual(simulation)[:2] == [0, 3]
    mean = simulation.step([row(128, 128)], scale=128.0).means[0]["w"]
    assert mean[0, :2].tolist() == [0, 4]
    assert residual(simulation)[:2] == [1, 0]


def test_skipped_everywhere_keeps_its_memory_and_has_no_mean():
    params = {"w": torch.empty(1, 8), "v": torch.empty(1, 8)}
    simulation = Simulation("topk:density=0.125", params, size=2)
    first = {"w": row(4, 3)["w"], "v": row(5, 2)["w"]}
    simulation.step([first, first])
    state = simulation.groups[0].states[1]["residual"]
    assert (state["w"][0, :2].tolist(), state["v"][0, :2].tolist()) == ([0, 3], [0, 2])
    # two of 16 are sent: the 3 left over in w, and the 2 in v
    result = simulation.step([{"v": None, "w": row(0)["w"]}, {"w": None}])
    assert result.means[0]["v"] is None
    assert result.means[1]["w"][0, :2].tolist() == [0, 3]
    assert (state["w"][0, :2].tolist(), state["v"][0, :2].tolist()) == ([0, 0], [0, 2])


def test_a_rank_without_a_gradient_still_sends_its_residual():
    simulation = Simulation("topk:density=0.125", PARAMS, size=2)
    simulation.step([row(4, 2), row(4, 2)])
    mean = simulation.step([{"w": None}, row(0)]).means[0]["w"]
    assert mean[0, :2].tolist() == [0, 2]
    assert residual(simulation, 0) == residual(simulation, 1) == [0.0] * 8


def test_small_remainders_of_bf16_gradients_do_not_round_away():
    grad = {"w": torch.zeros(1, 8, dtype=torch.bfloat16)}
    grad["w"][0, :2] = torch.tensor([512.0, 1.0])
    simulation = Simulation("topk:density=0.125", grad, size=1)
    for _ in range(300):
        simulation.step([grad])
    assert residual(simulation)[1] == 300.0  # in bf16 it would stay at 256


def test_commit_alone_changes_the_state():
    compressor = Feedback(PowerSGD(rank=1))
    bucket = bucket_of({"w": torch.empty(6, 5)}, torch.float32, rank=0, size=1)
    state = compressor.init(bucket)
    state["residual"]["w"].fill_(1.0)
    tensors = [t for slot in state.values() for t in slot.values()]
    before = [t.clone() for t in tensors]

    def same():
        return [torch.equal(a, b) for a, b in zip(before, tensors, strict=True)]

    compressor.load_(bucket, state, "w", None)
    simulate(compressor, [bucket], [state])[0].commit(frozenset({"w"}))
    assert all(same())
    compressor.load_(bucket, state, "w", torch.arange(30.0).view(6, 5).sin())
    (outcome,) = simulate(compressor, [bucket], [state])
    assert all(same())
    outcome.commit(frozenset())
    assert not any(same())


def test_load_accepts_the_view_itself_and_other_layouts():
    compressor = Feedback(TopK())
    params = {"w": torch.empty(4, 6).T}
    bucket = bucket_of(params, torch.float32, rank=0, size=1)
    state = compressor.init(bucket)
    state["residual"]["w"].fill_(1.0)
    grad = torch.arange(24.0).view(6, 4)
    compressor.load_(bucket, state, "w", grad, scale=2.0)
    assert torch.equal(bucket["w"], grad / 2 + 1)
    compressor.load_(bucket, state, "w", bucket["w"], scale=0.5)
    assert torch.equal(bucket["w"], grad + 3)
    compressor.load_(bucket, state, "w", grad.bfloat16())
    assert torch.equal(bucket["w"], grad + 1)
    compressor.load_(bucket, state, "w", None)
    assert torch.equal(bucket["w"], torch.ones(6, 4))


def test_memory_of_half_precision_is_refused():
    bucket = bucket_of(PARAMS, torch.float16, rank=0, size=1)
    with pytest.raises(ValueError, match=r"must be float32 or float64, got torch\.float16"):
        Feedback(TopK()).init(bucket)
    wanted = {torch.float16: torch.float32, torch.float64: torch.float64}
    assert {dtype: Feedback(TopK()).bucket_dtype(dtype) for dtype in wanted} == wanted


def test_illegal_combinations_name_the_way_out():
    with pytest.raises(ValueError, match=r"without feedback, got Feedback.*; use it as it is"):
        Feedback(Feedback(TopK()))
    with pytest.raises(
        ValueError, match=r"must be a biased compressor, got NoCompression\(\); use"
    ):
        Feedback(NoCompression())


def test_feedback_goes_where_it_is_due():
    assert with_feedback(TopK()) == Feedback(TopK())
    assert with_feedback(TopK(error_feedback=False)) == TopK(error_feedback=False)
    assert with_feedback(NoCompression()) == NoCompression()
    assert with_feedback(Feedback(TopK())) == Feedback(TopK())
    assert Feedback(PowerSGD()).capabilities.rounds == 2
    assert Feedback(TopK()).capabilities.stateful


def test_decay_by_hand():
    simulation = Simulation("topk:density=0.125,decay=0.5", PARAMS, size=1)
    simulation.step([row(4, 2)])
    assert residual(simulation)[:2] == [0, 1]
    simulation.step([row(4, 2)])
    assert residual(simulation)[:2] == [0, 1.5]


def test_low_pass_by_hand():
    simulation = Simulation("topk:density=0.125,low_pass=0.25", PARAMS, size=1)
    simulation.step([row(4, 2)])
    assert residual(simulation)[:2] == [0, 0.5]
    simulation.step([row(4, 2)])  # 0.5 + 0.25 (2.5 - 0 - 0.5)
    assert residual(simulation)[:2] == [0, 1.0]


def test_an_altered_memory_does_not_claim_to_conserve():
    assert Feedback(TopK()).capabilities.conserves
    for options in ({"decay": 0.9}, {"low_pass": 0.5}, {"residual": "bf16"}):
        assert not Feedback(TopK(), **options).capabilities.conserves
