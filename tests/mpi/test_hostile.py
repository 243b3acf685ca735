"""Training loops that do unusual things: each of these once did harm."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpicomp
from mpicomp import world

RANK, SIZE = mpicomp.rank(), mpicomp.size()
pytestmark = pytest.mark.skipif(SIZE == 1, reason="needs more than one rank")


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


def batch(step: int, rank: int = RANK) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int = RANK) -> Tensor:
    return model(batch(step, rank).to(next(model.parameters()).dtype)).square().mean()


def wrap(model: nn.Module, compression: str = "none", **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mpicomp.DistributedOptimizer(
        optimizer, compression=compression, model=model, fusion_mb=2e-4, **options
    )


def expected_means(model: nn.Module, loss: Callable[[nn.Module, int], Tensor]) -> list[Tensor]:
    """The mean over ranks of ``loss(model, rank)``'s gradients, on a plain copy."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    (sum(loss(plain, r) for r in range(SIZE)) / SIZE).backward()  # type: ignore[union-attr]
    return [p.grad for p in plain.parameters()]


def assert_grads(model: nn.Module, expected: list[Tensor], rtol: float = 1e-4) -> None:
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=rtol, atol=1e-6)


def assert_equal_on_ranks(model: nn.Module) -> None:
    flat = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    every = mpicomp.allgather(flat[None])
    assert (every == every[0]).all()


@pytest.mark.parametrize("spec", ["none", "topk:density=0.1"])
@pytest.mark.parametrize("how", ["data", "channels_last", "double"])
def test_gradients_whose_data_are_replaced(how: str, spec: str) -> None:
    model = small_model()
    opt = wrap(model, spec)
    for step in range(6):
        opt.zero_grad(set_to_none=False)
        if how == "data":
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.data = torch.zeros_like(p)
        elif how == "channels_last":
            model.to(memory_format=torch.channels_last)
        elif step == 3:
            model.double().float()
        expected = expected_means(model, lambda m, r, s=step: loss_of(m, s, r))
        loss_of(model, step).backward()
        if spec == "none":
            assert_grads(model, expected)
        opt.step()
    assert_equal_on_ranks(model)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("spec", ["none", "topk:density=0.1"])
@pytest.mark.parametrize("overflow", [False, True])
def test_a_short_window_under_a_grad_scaler(spec: str, fused: bool, overflow: bool) -> None:
    model = small_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opt = mpicomp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, fused=fused),
        compression=spec,
        model=model,
        grad_scaler=scaler,
        backward_passes_per_step=3,
    )
    for window in (3, 2, 3):
        opt.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        for step in range(window):
            bad = overflow and window == 2 and step == 0 and RANK == 1
            scaler.scale(loss_of(model, step) * (float("inf") if bad else 1.0)).backward()
        scaler.step(opt)
        scaler.update()
        moved = max((p - q).norm() for p, q in zip(model.parameters(), before, strict=True))
        if overflow and window == 2:
            assert moved == 0
        else:
            assert 0 < moved < 2
        assert_equal_on_ranks(model)
    assert scaler.get_scale() == (512.0 if overflow else 1024.0)


@pytest.mark.parametrize("where", ["function", "hook"])
def test_a_backward_pass_inside_that_of_another_optimizer(where: str) -> None:
    outer, inner = small_model(0), small_model(1)
    opts = [wrap(outer), wrap(inner)]
    inner_step = [0]

    def run_inner() -> None:
        with torch.enable_grad():
            opts[1].zero_grad()
            loss_of(inner, inner_step[0]).backward()

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            run_inner()
            return grad

    def outer_loss(model: nn.Module, step: int, rank: int, nest: bool) -> Tensor:
        y = model[1](model[0](batch(step, rank)))  # type: ignore[index]
        if nest and where == "function":
            y = Nested.apply(y)
        elif nest:
            y.register_hook(lambda g: run_inner())
        return model[2](y).square().mean()  # type: ignore[index, no-any-return]

    for step in range(4):
        inner_step[0] = step
        wanted = [
            expected_means(outer, lambda m, r, s=step: outer_loss(m, s, r, False)),
            expected_means(inner, lambda m, r, s=step: loss_of(m, s, r)),
        ]
        opts[0].zero_grad()
        outer_loss(outer, step, RANK, True).backward()
        assert_grads(outer, wanted[0])
        assert_grads(inner, wanted[1])
        for opt in opts:
            opt.step()


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


def fail_backward(model: nn.Sequential) -> None:
    with pytest.raises(ArithmeticError):
        model[2](Failing.apply(model[1](model[0](batch(9))))).square().mean().backward()


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("spec", ["none", "topk:density=0.1"])
def test_all_ranks_fail_and_go_on(spec: str, set_to_none: bool) -> None:
    model = small_model()
    opt = wrap(model, spec)
    for step in range(3):
        opt.zero_grad(set_to_none=set_to_none)
        loss_of(model, step).backward()
        opt.step()
    opt.zero_grad(set_to_none=set_to_none)
    fail_backward(model)
    for step in range(3, 5):
        opt.zero_grad(set_to_none=set_to_none)
        expected = expected_means(model, lambda m, r, s=step: loss_of(m, s, r))
        loss_of(model, step).backward()
        if spec == "none":
            assert_grads(model, expected)
        assert all(p.grad.isfinite().all() for p in model.parameters())
        opt.step()
    assert_equal_on_ranks(model)


def test_one_rank_fails_and_goes_on() -> None:
    """The others hear of it, and do not step with gradients that are not complete."""
    model = small_model()
    opt = wrap(model)
    loss_of(model, 0).backward()
    opt.zero_grad()
    if RANK == 1:
        fail_backward(model)
        opt.zero_grad()
        loss_of(model, 1).backward()  # ends the exchange that failed, begins another
    else:
        with pytest.raises(mpicomp.MpicompError, match="another rank's backward pass"):
            loss_of(model, 1).backward()
        opt.zero_grad()
        loss_of(model, 1).backward()
    assert_grads(model, expected_means(model, lambda m, r: loss_of(m, 1, r)))


def test_an_overflow_in_a_bucket_without_memory_protects_the_others() -> None:
    model = small_model()
    opt = wrap(model, "topk:density=0.1")
    loss_of(model, 0).backward()
    opt.zero_grad()
    before = copy.deepcopy(opt.state_dict()["mpicomp"]["memory"]["residual"])
    handle = model[0].bias.register_hook(lambda g: g * float("inf") if RANK == 0 else g)
    bad_steps = mpicomp.stats().bad_steps
    loss_of(model, 1).backward()
    handle.remove()
    assert mpicomp.stats().bad_steps == bad_steps + 1
    for name, tensor in opt.state_dict()["mpicomp"]["memory"]["residual"].items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("spec", ["powersgd:rank=1", "topk:density=0.1"])
def test_a_huge_finite_gradient_is_survived(spec: str) -> None:
    model = small_model()
    opt = wrap(model, spec)
    loss_of(model, 0).backward()
    opt.zero_grad()
    handle = model[0].weight.register_hook(lambda g: torch.full_like(g, 3e38))
    loss_of(model, 1).backward()
    handle.remove()
    opt.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())  # forgets
    for step in range(2):
        opt.zero_grad()
        loss_of(model, step).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())


def test_powersgd_forgets_a_step_that_overflowed_on_the_way() -> None:
    model = small_model()
    opt = wrap(model, "powersgd:rank=1")
    loss_of(model, 0).backward()
    opt.zero_grad()
    handle = model[0].weight.register_hook(lambda g: torch.full_like(g, 3e38))
    loss_of(model, 1).backward()
    handle.remove()
    opt.zero_grad()
    loss_of(model, 2).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("spec", ["none", "topk:density=0.1", "powersgd:rank=1"])
def test_create_graph(spec: str) -> None:
    model = small_model()
    opt = wrap(model, spec)
    expected = expected_means(model, lambda m, r: loss_of(m, 0, r))
    opt.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a cycle, which is not made here
        loss_of(model, 0).backward(create_graph=True)
    assert not any(p.grad.requires_grad for p in model.parameters())
    if spec == "none":
        assert_grads(model, expected)


def test_join_with_accumulation_leaves_ranks_in_step() -> None:
    model = small_model()
    opt = wrap(model, backward_passes_per_step=2)
    for _ in range(3):
        with opt.join():
            for step in range(5 if RANK == 0 else 7):
                loss_of(model, step).backward()
                if step % 2:
                    opt.step()
                    opt.zero_grad()
        opt.zero_grad()
        assert_equal_on_ranks(model)
    for step in range(2):
        loss_of(model, step).backward()
    assert_grads(model, expected_means(model, lambda m, r: loss_of(m, 0, r) + loss_of(m, 1, r)))


@pytest.mark.parametrize("warm_start", ["true", "false"])
def test_join_leaves_shared_memory_of_compressors_equal(warm_start: str) -> None:
    model = small_model()
    opt = wrap(model, f"powersgd:rank=1,warm_start={warm_start}")
    with opt.join():
        for step in range(2 + 3 * (RANK == 0)):
            opt.zero_grad()
            loss_of(model, step).backward()
            opt.step()
    memory = opt.state_dict()["mpicomp"]["memory"]
    for slot in sorted(set(memory) - {"residual"}):
        every = mpicomp.allgather_object(memory[slot])
        for name, tensor in memory[slot].items():
            assert all(torch.equal(other[name], tensor) for other in every), (slot, name)


def test_close_lets_go_and_its_communicator_is_used_again() -> None:
    contexts = set()
    for _ in range(5):
        model = small_model()
        opt = wrap(model, "topk:density=0.1")
        loss_of(model, 0).backward()
        contexts.add(id(opt._engine._communicator))
        opt.close()
        opt.close()
        local = copy.deepcopy(model)
        model.zero_grad()
        local.zero_grad()
        loss_of(model, 1).backward()
        loss_of(local, 1).backward()
        for p, q in zip(model.parameters(), local.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        opt.step()
    assert len(contexts) == 1
    world.get().idle_communicators.clear()


def test_a_parameter_of_two_optimizers_belongs_to_the_later_one() -> None:
    model = small_model()
    first = wrap(model, "topk:density=0.1")
    loss_of(model, 0).backward()
    second = mpicomp.DistributedOptimizer(
        torch.optim.SGD(model[2].parameters(), lr=0.1), model=model[2]
    )
    for step in range(3):
        first.zero_grad()
        expected = expected_means(model, lambda m, r, s=step: loss_of(m, s, r))[2:]
        loss_of(model, step).backward()
        for p, grad in zip(model[2].parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-6)
    assert second.param_groups
