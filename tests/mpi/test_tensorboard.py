"""Scalars are those of the exchange, checked against gradients that each rank works out alone."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import mpicomp
from mpicomp.observe import TensorBoard

RANK, SIZE = mpicomp.rank(), mpicomp.size()
needs_ranks = pytest.mark.skipif(SIZE == 1, reason="needs more than one rank")
TAGS = ["bytes_per_step", "hidden_fraction", "ratio", "relative_error", "residual_norm"]


class Writer:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, value, step):
        assert isinstance(value, float)
        self.scalars.setdefault(tag, {})[step] = value


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10))


def wrap(model, compression, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mpicomp.DistributedOptimizer(optimizer, compression=compression, model=model, **options)


def backward(model, step, factor=1.0):
    batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + RANK))
    (factor * model(batch).square().mean()).backward()


def train(model, opt, steps):
    for step in range(steps):
        opt.zero_grad()
        backward(model, step)
        opt.step()


@needs_ranks
def test_rank_0_writes_every_so_many_steps():
    model, writer = net(), Writer()
    opt = wrap(model, "topk:density=0.1")
    TensorBoard(opt, writer if RANK == 0 else None, every=3)
    before = mpicomp.stats()
    train(model, opt, 7)
    total = mpicomp.stats() - before
    if RANK > 0:
        assert writer.scalars == {}
        return
    assert sorted(writer.scalars) == [f"mpicomp/{name}" for name in TAGS]
    assert all(list(values) == [3, 6] for values in writer.scalars.values())
    every = {tag.removeprefix("mpicomp/"): v[6] for tag, v in writer.scalars.items()}
    assert every["bytes_per_step"] == total.bytes_sent / 7
    assert every["ratio"] == pytest.approx(total.ratio)
    assert 0 <= every["hidden_fraction"] <= 1
    assert 0 < every["relative_error"] < 1
    assert every["residual_norm"] > 0


@needs_ranks
def test_norms_are_those_of_gradient_and_residual():
    model, writer = net(), Writer()
    opt = wrap(model, {"*bias": "none", "*": "topk:density=0.1"}, fusion_mb=1e-4)
    TensorBoard(opt, writer, every=1, step=40, all_ranks=True, prefix=f"rank {RANK}")
    residual = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(4):
        twin = copy.deepcopy(model)
        twin.zero_grad()
        backward(twin, step)
        accumulated = {n: p.grad + residual[n] for n, p in twin.named_parameters()}
        opt.zero_grad()
        backward(model, step)
        opt.step()
        for name, kept in opt.state_dict()["mpicomp"]["memory"]["residual"].items():
            residual[name] = kept.clone()
        assert set(residual) > set(opt.state_dict()["mpicomp"]["memory"]["residual"])
        left = math.sqrt(sum(float(r.square().sum()) for r in residual.values()))
        whole = math.sqrt(sum(float(a.square().sum()) for a in accumulated.values()))
        own = {tag: values[41 + step] for tag, values in writer.scalars.items()}
        assert own[f"rank {RANK}/residual_norm"] == pytest.approx(left, rel=1e-4)
        assert own[f"rank {RANK}/relative_error"] == pytest.approx(left / whole, rel=1e-4)


@needs_ranks
@pytest.mark.parametrize("compression", ["fp16", "topk:density=0.1", "powersgd:rank=2", "none"])
def test_looking_changes_nothing(compression):
    watched, plain = net(), net()
    opt, other = wrap(watched, compression), wrap(plain, compression)
    TensorBoard(opt, Writer(), every=2)
    train(watched, opt, 4)
    train(plain, other, 4)
    for p, q in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


@needs_ranks
def test_a_loss_scale_does_not_show():
    found = []
    for factor in (1.0, 2.0**10):
        model, writer = net(), Writer()
        scaler = torch.amp.GradScaler("cpu", init_scale=factor)
        opt = wrap(model, {"*bias": "fp16", "*": "topk:density=0.1"}, grad_scaler=scaler)
        TensorBoard(opt, writer, every=1, all_ranks=True)
        backward(model, 0, factor=float(scaler.scale(torch.ones(()))))
        opt.synchronize()
        found.append(writer.scalars)
    for tag in ("mpicomp/relative_error", "mpicomp/residual_norm"):
        assert found[0][tag][1] == pytest.approx(found[1][tag][1], rel=1e-3)


@needs_ranks
def test_a_bad_step_has_no_error_and_the_next_one_has():
    model, writer = net(), Writer()
    opt = wrap(model, "topk:density=0.1")
    TensorBoard(opt, writer, every=1, all_ranks=True)
    for step in range(3):
        opt.zero_grad()
        backward(model, step, factor=float("nan") if step == 1 else 1.0)
    errors = writer.scalars["mpicomp/relative_error"]
    assert [math.isnan(errors[step]) for step in (1, 2, 3)] == [False, True, False]


def test_one_rank_exchanges_nothing_and_arguments_are_looked_at():
    model = net()
    opt = wrap(model, "none")
    with pytest.raises(TypeError, match="opt must be a DistributedOptimizer, got SGD"):
        TensorBoard(opt.optimizer, Writer())
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        TensorBoard(opt, Writer(), every=0)
    with pytest.raises(TypeError, match=r"writer must have add_scalar.* got None"):
        TensorBoard(opt, None, all_ranks=True)
    writer = Writer()
    TensorBoard(opt, writer, every=1)
    if SIZE == 1:
        train(model, opt, 2)
        assert writer.scalars == {}
    elif RANK == 0:
        with pytest.raises(ValueError, match="watch: there must be one observer"):
            TensorBoard(opt, writer)
