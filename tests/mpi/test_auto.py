"""`compression="auto"`: what is chosen from predictions and times that the test makes up."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import mpicomp
from mpicomp.auto import SETTLING_STEPS, STEADY_STEPS, TIMED_STEPS, Autopilot
from mpicomp.errors import MpicompError

RANK, SIZE = mpicomp.rank(), mpicomp.size()
needs_ranks = pytest.mark.skipif(SIZE == 1, reason="needs more than one rank")
WINDOW = SETTLING_STEPS + TIMED_STEPS
DENSE = "none"


class Playground:
    """A model of two buckets whose steps take as long as ``seconds`` says of the methods in use."""

    def __init__(self, monkeypatch, *, predicted, seconds):
        self.seconds, self.time, self.decided = seconds, 0.0, []
        monkeypatch.setattr(Autopilot, "clock", lambda *_: self.time)
        monkeypatch.setattr(Autopilot, "forecast", lambda *_: dict(predicted))
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.opt = mpicomp.DistributedOptimizer(
            optimizer, compression=mpicomp.Auto("bf16", "topk"), model=self.model, fusion_mb=0.001
        )
        self.engine = self.opt._engine

    def step(self):
        self.time += self.seconds(self.methods())
        self.opt.zero_grad()
        generator = torch.Generator().manual_seed(RANK)
        self.model(torch.randn(8, 40, generator=generator)).square().mean().backward()
        self.opt.step()

    def train(self, steps):
        for _ in range(steps):
            self.step()

    def methods(self):
        """Of the two weights, first that of the layer whose gradient comes first."""
        kinds = {
            e.name: type(getattr(p.compressor, "inner", p.compressor)).__name__
            for p in self.engine.plans
            for e in p.entries
        }
        return kinds["2.weight"], kinds["0.weight"]


def same_everywhere(model):
    mine = torch.cat([p.detach().view(-1) for p in model.parameters()])
    return all(torch.equal(mine, theirs) for theirs in mpicomp.allgather(mine[None]))


def chooser(**seconds):
    """Seconds of a step by the class of both buckets' compressor; 10 for a mixture."""
    return lambda methods: seconds.get(methods[0], 10.0) if len(set(methods)) == 1 else 10.0


def both(name):
    return (name, name)


@needs_ranks
def test_the_fastest_stays_whatever_was_predicted(monkeypatch, caplog):
    predicted = {both(DENSE): 10.0, both("bf16"): 5.0, both("topk"): 6.0}
    play = Playground(
        monkeypatch,
        predicted=predicted,
        seconds=chooser(NoCompression=10.0, BFloat16=9.0, TopK=7.0),
    )
    with caplog.at_level(logging.WARNING, "mpicomp"):
        play.train(WINDOW)
        assert play.methods() == both("BFloat16")
        play.train(WINDOW)
        assert play.methods() == both("TopK")
        play.train(WINDOW + 1)
        assert play.methods() == both("TopK")
        play.train(STEADY_STEPS)
    assert same_everywhere(play.model)
    lines = [r.getMessage() for r in caplog.records if "compression auto" in r.getMessage()]
    if RANK:
        assert lines == []
    else:
        (line,) = lines
        assert "topk for 2 buckets" in line
        assert "none 10000.0 ms (predicted 10000.0)" in line
        assert "topk 7000.0 ms (predicted 6000.0)" in line


@needs_ranks
def test_what_turns_out_no_faster_is_given_up(monkeypatch):
    """A gain of four in a hundred is no reason to give up exact gradients."""
    predicted = {both(DENSE): 10.0, both("bf16"): 5.0, both("topk"): 5.0}
    play = Playground(
        monkeypatch,
        predicted=predicted,
        seconds=chooser(NoCompression=10.0, BFloat16=9.6, TopK=30.0),
    )
    play.train(3 * WINDOW + 1)
    assert play.methods() == both("NoCompression")
    play.train(STEADY_STEPS + 5)
    assert play.methods() == both("NoCompression")


@needs_ranks
def test_nothing_is_tried_that_is_not_predicted_to_pay(monkeypatch):
    predicted = {both(DENSE): 10.0, both("bf16"): 11.6, both("topk"): 12.0}
    play = Playground(monkeypatch, predicted=predicted, seconds=chooser(NoCompression=10.0))
    for _ in range(3 * WINDOW):
        play.step()
        assert play.methods() == both("NoCompression")


@needs_ranks
def test_a_choice_for_each_bucket(monkeypatch):
    mixed = (DENSE, "topk")
    play = Playground(
        monkeypatch,
        predicted={both(DENSE): 10.0, mixed: 4.0},
        seconds=lambda methods: 4.0 if len(set(methods)) == 2 else 10.0,
    )
    play.train(2 * WINDOW + 1)
    assert play.methods() == ("NoCompression", "TopK")
    play.train(5)
    assert same_everywhere(play.model)


@needs_ranks
@pytest.mark.parametrize("factor", [1.25, 1.5, 0.5])
def test_other_times_lead_to_another_look(monkeypatch, factor):
    """Steps that deviate by more than 30 % do, whichever way."""
    predicted = {both(DENSE): 10.0, both("topk"): 4.0}
    times = {"NoCompression": 10.0, "TopK": 4.0}
    play = Playground(monkeypatch, predicted=predicted, seconds=lambda m: chooser(**times)(m))
    play.train(2 * WINDOW + 1)
    assert play.methods() == both("TopK")
    times["TopK"] *= factor
    play.train(SETTLING_STEPS + STEADY_STEPS)
    assert play.methods() == both("TopK")
    play.train(SETTLING_STEPS + STEADY_STEPS)
    again = not 0.7 <= factor <= 1.3
    assert play.methods() == both("NoCompression" if again else "TopK")
    play.train(2 * WINDOW)
    assert play.methods() == both("TopK")


@needs_ranks
def test_one_long_step_is_no_reason(monkeypatch):
    predicted = {both(DENSE): 10.0, both("topk"): 4.0}
    play = Playground(
        monkeypatch, predicted=predicted, seconds=chooser(NoCompression=10.0, TopK=4.0)
    )
    play.train(2 * WINDOW + 1)
    play.time += 1000.0
    play.train(SETTLING_STEPS + STEADY_STEPS + 1)
    assert play.methods() == both("TopK")


@needs_ranks
def test_more_parameters_begin_it_anew(monkeypatch):
    predicted = {both(DENSE): 10.0, both("topk"): 4.0}
    play = Playground(
        monkeypatch, predicted=predicted, seconds=chooser(NoCompression=10.0, TopK=4.0)
    )
    play.train(2 * WINDOW + 1)
    late = nn.Parameter(torch.zeros(3))
    play.opt.add_param_group({"params": [late]})
    assert play.methods() == both("NoCompression")
    late.sum().backward()
    play.step()
    assert same_everywhere(play.model)


@needs_ranks
def test_ranks_may_run_out_of_data(monkeypatch):
    predicted = {both(DENSE): 10.0, both("topk"): 4.0}
    play = Playground(
        monkeypatch, predicted=predicted, seconds=chooser(NoCompression=10.0, TopK=4.0)
    )
    with play.opt.join():
        play.train(3 + 2 * RANK)
    play.train(2 * WINDOW + 1)
    assert play.methods() == both("TopK")
    with play.opt.join():
        play.train(3 + 2 * RANK)
    assert same_everywhere(play.model)


@needs_ranks
def test_for_real():
    """Nothing is made up: whatever is chosen, ranks agree, and the loss falls."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    opt = mpicomp.DistributedOptimizer(optimizer, compression="auto", model=model)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(RANK))
    losses = []
    for _ in range(5 * WINDOW):
        opt.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert same_everywhere(model)


@needs_ranks
def test_nothing_but_sparse_gradients():
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = mpicomp.DistributedOptimizer(optimizer, compression="auto", model=model)
    for _ in range(WINDOW + 2):
        opt.zero_grad()
        model(torch.tensor([RANK, 3])).square().mean().backward()
        opt.step()
    assert same_everywhere(model)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("backward fails")


@needs_ranks
def test_a_failed_backward_pass_is_counted_by_nobody(monkeypatch):
    predicted = {both(DENSE): 10.0, both("topk"): 4.0}
    play = Playground(
        monkeypatch, predicted=predicted, seconds=chooser(NoCompression=10.0, TopK=4.0)
    )
    for step in range(2 * WINDOW + 4):
        if step in (0, 3):
            hidden = play.model[:2](torch.ones(8, 40))
            hidden = Failing.apply(hidden) if RANK else hidden
            with pytest.raises(MpicompError if RANK == 0 else ValueError):
                play.model[2](hidden).sum().backward()
            play.opt.zero_grad()
        else:
            play.step()
    assert play.methods() == both("TopK")
    assert same_everywhere(play.model)


@needs_ranks
def test_a_layer_that_is_unfrozen_after_the_choice(monkeypatch):
    predicted = {(DENSE,): 10.0, ("topk",): 4.0}
    play = Playground(monkeypatch, predicted=predicted, seconds=lambda _: 10.0)
    play.methods = lambda: None
    play.model[0].requires_grad_(False)
    play.train(WINDOW + 1)
    play.model[0].requires_grad_(True)
    play.train(2)
    play.engine.recompress({"2.weight": "topk"})
    assert Playground.methods(play) == ("TopK", "NoCompression")
    play.model[0].requires_grad_(False)
    play.train(2)
    play.engine.recompress({})
    play.model[0].requires_grad_(True)
    play.train(2)
    assert Playground.methods(play) == both("NoCompression")
    assert same_everywhere(play.model)


@needs_ranks
def test_two_optimizers_that_share_a_backward_pass_in_any_order():
    torch.manual_seed(0)
    models = [nn.Linear(64, 64) for _ in range(2)]
    opts = [
        mpicomp.DistributedOptimizer(
            torch.optim.SGD(m.parameters(), lr=0.01), compression="auto", model=m
        )
        for m in models
    ]
    for _ in range(WINDOW + 2):
        first, second = models if RANK else models[::-1]
        (first(torch.ones(2, 64)).sum() + second(torch.ones(2, 64)).sum()).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert all(same_everywhere(m) for m in models)


def test_one_rank_needs_no_choice():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = mpicomp.DistributedOptimizer(optimizer, compression="auto", model=model)
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    assert "compression='auto'" in repr(opt)


def test_candidates():
    assert mpicomp.Auto("bf16").candidates == ("bf16",)
    with pytest.raises(ValueError, match="must not apply momentum themselves, got 'dgc'"):
        mpicomp.Auto("bf16", "dgc")
    with pytest.raises(ValueError, match="topq"):
        mpicomp.Auto("topq")
