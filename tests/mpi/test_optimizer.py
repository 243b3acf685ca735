"""The wrapped optimizer stays the user's, and everything that torch offers around it works."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpicomp
from mpicomp.compress.base import PRIVATE_SLOTS
from mpicomp.optimizer import DistributedOptimizer

RANK, SIZE = mpicomp.rank(), mpicomp.size()
needs_ranks = pytest.mark.skipif(SIZE == 1, reason="needs more than one rank")


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def batch(step: int, rank: int = RANK) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int = RANK) -> Tensor:
    return model(batch(step, rank)).square().mean()


def mean_loss(model: nn.Module, step: int) -> Tensor:
    """The loss whose gradient is the mean over ranks, on one rank."""
    return sum(loss_of(model, step, r) for r in range(SIZE)) / SIZE  # type: ignore[return-value]


def assert_same_weights(model: nn.Module, twin: nn.Module) -> None:
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    every = mpicomp.allgather(flat[None])
    assert (every == every[0]).all()


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_one_process_with_the_mean_loss(name: str) -> None:
    model, twin = small_model(), small_model()
    opt = mpicomp.DistributedOptimizer(OPTIMIZERS[name](model.parameters()), model=model)
    plain = OPTIMIZERS[name](twin.parameters())
    for step in range(5):
        for optimizer, net, loss in ((opt, model, loss_of), (plain, twin, mean_loss)):
            optimizer.zero_grad()
            loss(net, step).backward()
            optimizer.step()
    assert_same_weights(model, twin)
    assert set(opt.state_dict()["state"]) == set(plain.state_dict()["state"])


def test_lbfgs_with_a_closure_is_averaged_at_every_evaluation() -> None:
    model, twin = small_model(), small_model()

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, lr=0.5, max_iter=6, history_size=4)

    opt = mpicomp.DistributedOptimizer(make(model.parameters()), model=model)
    plain = make(twin.parameters())
    calls = [0, 0]

    def closure_for(optimizer: Any, net: nn.Module, which: int) -> Any:
        def closure() -> Tensor:
            calls[which] += 1
            optimizer.zero_grad()
            loss = loss_of(net, 0) if which == 0 else mean_loss(net, 0)
            loss.backward()
            return mpicomp.allreduce(loss.detach()) if which == 0 else loss.detach()

        return closure

    before = mpicomp.stats().steps
    for _ in range(3):
        opt.step(closure_for(opt, model, 0))
        plain.step(closure_for(plain, twin, 1))
    assert calls[0] == calls[1] > 6
    assert SIZE == 1 or mpicomp.stats().steps - before == calls[0]
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_schedulers_change_the_rate_without_warnings(wrapped_first: bool) -> None:
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if wrapped_first:
            opt = mpicomp.DistributedOptimizer(inner, model=model)
            scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
        else:
            scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)
            opt = mpicomp.DistributedOptimizer(inner, model=model)
        for step in range(3):
            opt.zero_grad()
            loss_of(model, step).backward()
            opt.step()
            scheduler.step()
    assert opt.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.125
    assert scheduler.get_last_lr() == [0.125]


def test_clipping_sees_the_mean_gradient() -> None:
    model, twin = small_model(), small_model()
    opt = mpicomp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    opt.zero_grad()
    loss_of(model, 0).backward()
    mean_loss(twin, 0).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 1e-3))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-8)


# --------------------------------------------------------------------------------- loss scaling


@pytest.mark.parametrize("spec", ["none", "topk:density=0.1", "powersgd:rank=1", "fp16"])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_survives_an_overflow_on_one_rank(spec: str, fused: bool) -> None:
    """One rank overflows once: nobody steps, the scale halves, and all memory is as it was."""
    model = small_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opt = mpicomp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), fused=fused),
        compression=spec,
        model=model,
        grad_scaler=scaler,
    )
    for step in range(6):
        opt.zero_grad()
        loss = loss_of(model, step)
        overflow = step == 3
        if overflow and RANK == SIZE - 1:
            loss = loss * float("inf")
        memory = copy.deepcopy(opt.state_dict().get("mpicomp"))
        weights = [p.detach().clone() for p in model.parameters()]
        scaler.scale(loss).backward()
        if overflow:
            assert not all(p.grad.isfinite().all() for p in model.parameters())
        scaler.step(opt)
        scaler.update()
        same = [torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True)]
        assert all(same) if overflow else not any(same)
        assert scaler.get_scale() == (512.0 if step >= 3 else 1024.0)
        if overflow and memory is not None:
            for slot, tensors in opt.state_dict()["mpicomp"]["memory"].items():
                for name, tensor in tensors.items():
                    assert torch.equal(tensor, memory["memory"][slot][name])
    assert all(p.isfinite().all() for p in model.parameters())


@needs_ranks
def test_residuals_are_in_unscaled_units() -> None:
    memories = []
    for scale in (65536.0, 128.0, 1.0):
        model = small_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        opt = mpicomp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            compression="topk:density=0.1",
            model=model,
            grad_scaler=scaler,
        )
        scaler.scale(loss_of(model, 0)).backward()
        memories.append(opt.state_dict()["mpicomp"]["memory"]["residual"])
        grads = [p.grad / scale for p in model.parameters()]
        assert max(g.abs().max() for g in grads) < 1.0
    for name, residual in memories[0].items():
        assert residual.any()
        torch.testing.assert_close(residual, memories[1][name])
        torch.testing.assert_close(residual, memories[2][name])


@needs_ranks
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_without_a_scaler_is_seen_by_everybody_and_forgotten(value: float) -> None:
    model = small_model()
    opt = mpicomp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), compression="powersgd:rank=1", model=model
    )
    loss_of(model, 0).backward()
    before = mpicomp.stats().bad_steps
    opt.zero_grad()
    (loss_of(model, 1) * (value if RANK == 0 else 1.0)).backward()
    assert mpicomp.stats().bad_steps == before + 1
    assert not any(p.grad.isfinite().all() for p in model.parameters())
    opt.zero_grad()
    loss_of(model, 2).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@needs_ranks
def test_conservation_over_training() -> None:
    """Sum of means + mean residual = sum of mean gradients, with accumulation and a bad step."""
    model = small_model()
    opt = mpicomp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        compression="topk:density=0.1",
        model=model,
        backward_passes_per_step=2,
    )
    given = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    got = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for step in range(20):
        bad = step == 7
        opt.zero_grad()
        for part in range(2):
            loss = loss_of(model, 2 * step + part)
            (loss * float("nan") if bad and RANK == 0 else loss).backward()
        if bad:
            continue
        opt.step()
        twin = small_model()
        sum(mean_loss(twin, 2 * step + part) for part in range(2)).backward()  # type: ignore[union-attr]
        for name, p in twin.named_parameters():
            given[name] += p.grad
            got[name] += dict(model.named_parameters())[name].grad
    residual = opt.state_dict()["mpicomp"]["memory"]["residual"]
    for name in given:
        left = mpicomp.allreduce(residual[name]) if name in residual else 0.0
        torch.testing.assert_close(got[name] + left, given[name], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------- state


def train(opt: Any, model: nn.Module, steps: range) -> None:
    for step in steps:
        opt.zero_grad()
        loss_of(model, step).backward()
        opt.step()


def make(spec: str, model: nn.Module) -> DistributedOptimizer:
    return mpicomp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), compression=spec, model=model
    )


@pytest.mark.parametrize("spec", ["none", "topk:density=0.1", "powersgd:rank=1"])
def test_state_dict_resumes_bit_for_bit(spec: str) -> None:
    model = small_model()
    opt = make(spec, model)
    train(opt, model, range(3))
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, saved)
    train(opt, model, range(3, 6))
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    other = small_model(1)
    resumed = make(spec, other)
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["opt"])
    train(resumed, other, range(3, 6))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_state_goes_to_and_from_plain_optimizers() -> None:
    model = small_model()
    opt = make("topk:density=0.1", model)
    train(opt, model, range(2))
    plain = torch.optim.SGD(model.parameters(), lr=7.0, momentum=0.1)
    plain.load_state_dict(opt.state_dict())
    assert plain.param_groups[0]["lr"] == 0.1
    opt.load_state_dict(plain.state_dict())


@needs_ranks
def test_join_within_the_join_of_another_optimizer_is_refused() -> None:
    first, second = (make("none", small_model()) for _ in range(2))
    with (
        pytest.raises(ValueError, match="join: must not be used within the join of another"),
        first.join(),
        second.join(),
    ):
        pass
    with second.join():  # the first one is over
        pass


SHARING = [  # methods whose ranks remember something in common
    "cltk:density=0.1",
    "acpsgd:rank=1",
    "powersgd:rank=1",
    "thc:bits=2,block=8",
    "randomk:density=0.1",
    "micro:density=0.1",
    "oktopk:density=0.1",
    "topk:density=0.1,start_after=4",
]


@needs_ranks
def test_the_memory_of_another_rank_is_not_used() -> None:
    model = small_model()
    opt = make("topk:density=0.1", model)
    train(opt, model, range(2))
    state = mpicomp.allgather_object(opt.state_dict())[(RANK + 1) % SIZE]
    with pytest.warns(UserWarning, match="belong to rank"):
        opt.load_state_dict(state)
    for tensor in opt.state_dict()["mpicomp"]["memory"]["residual"].values():
        assert not tensor.any()


@needs_ranks
@pytest.mark.parametrize("how", ["load_state_dict", "pickle"])
@pytest.mark.parametrize("spec", SHARING)
def test_all_ranks_resume_from_one_file(spec: str, how: str) -> None:
    """Ranks that disagreed on the step or the seed would send different messages, and hang."""
    model = small_model()
    opt = make(spec, model)
    train(opt, model, range(5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if how == "pickle":
            saved = pickle.dumps((model, opt)) if RANK == 0 else None
            other, resumed = pickle.loads(mpicomp.broadcast_object(saved, 0))
        else:
            other = small_model(1)
            resumed = make(spec, other)
            other.load_state_dict(model.state_dict())
            resumed.load_state_dict(mpicomp.broadcast_object(opt.state_dict(), 0))
    memories = mpicomp.allgather_object(resumed.state_dict()["mpicomp"]["memory"])
    for slot in memories[0].keys() - PRIVATE_SLOTS:
        for name, tensor in memories[0][slot].items():
            assert all(torch.equal(memory[slot][name], tensor) for memory in memories)
    train(resumed, other, range(5, 8))
    for p in other.parameters():
        every = mpicomp.allgather(p.detach()[None])
        assert (every == every[0]).all()


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
@pytest.mark.parametrize("spec", ["none", "powersgd:rank=1"])
def test_pickling_with_the_model(how: str, spec: str) -> None:
    model = small_model()
    opt = make(spec, model)
    train(opt, model, range(2))
    pair = (model, opt)
    other, copied = pickle.loads(pickle.dumps(pair)) if how == "pickle" else copy.deepcopy(pair)
    assert type(copied.optimizer) is torch.optim.SGD
    assert copied.param_groups[0]["params"][0] is next(other.parameters())
    train(opt, model, range(2, 4))
    train(copied, other, range(2, 4))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_add_param_group() -> None:
    model, twin = small_model(), small_model()
    opt = mpicomp.DistributedOptimizer(
        torch.optim.SGD(model[0].parameters(), lr=0.1), compression="none", model=model
    )
    plain = torch.optim.SGD(twin[0].parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
            plain.add_param_group({"params": list(twin[2].parameters()), "lr": 0.5})
        model.zero_grad()
        twin.zero_grad()
        loss_of(model, step).backward()
        mean_loss(twin, step).backward()
        opt.step()
        plain.step()
    assert len(opt.param_groups) == 2
    assert_same_weights(model, twin)


def test_delegation() -> None:
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = mpicomp.DistributedOptimizer(inner, model=model)
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.defaults is inner.defaults
    assert opt.state is inner.state
    seen: list[str] = []
    opt.register_step_pre_hook(lambda *args: seen.append("pre"))
    opt.register_step_post_hook(lambda *args: seen.append("post"))
    train(opt, model, range(1))
    assert seen == ["pre", "post"]
    opt.param_groups[0]["lr"] = 0.3
    assert inner.param_groups[0]["lr"] == 0.3
    with opt.skip_synchronize():
        opt.synchronize()
    with pytest.raises(AttributeError):
        opt.no_such_thing  # noqa: B018
    assert "SGD" in repr(opt)


def test_state_that_the_optimizer_had_before_is_kept_and_is_rank_0s() -> None:
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.full_like(p, float(RANK + 1))
    inner.step()
    opt = mpicomp.DistributedOptimizer(inner, model=model)
    for p in model.parameters():
        assert (opt.state[p]["momentum_buffer"] == 1.0).all()


# ------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "topkk"}, "topk"),
        ({"compression": "topk:densiti=0.1"}, "density"),
        ({"compression": "topk:density=2"}, "density"),
        ({"compression": {"nothing*": "none", "*": "none"}}, "nothing"),
        ({"compression": {"0*": "none"}}, "add"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"fusion_mb": 0}, "fusion_mb"),
        ({"fusion_mb": float("nan")}, "fusion_mb"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    model = small_model()
    if SIZE == 1 and isinstance(options.get("compression"), dict):
        pytest.skip("one rank assigns no compressors")
    with pytest.raises(ValueError, match=message):
        mpicomp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model=model, **options
        )


def test_wrong_optimizers_and_names() -> None:
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="optimizer"):
        mpicomp.DistributedOptimizer(model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wrapped already"):
        mpicomp.DistributedOptimizer(mpicomp.DistributedOptimizer(inner, model=model))
    first = next(model.parameters())
    with pytest.raises(ValueError, match="once"):
        mpicomp.DistributedOptimizer(inner, named_parameters=[("a", first), ("b", first)])


@needs_ranks
@pytest.mark.parametrize(
    "difference", ["shape", "dtype", "name", "compressor", "number", "order", "strides"]
)
def test_models_that_differ_are_an_error_on_every_rank(difference: str) -> None:
    odd = SIZE - 1 == RANK
    hidden = 10 if difference == "shape" and odd else 9
    model = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 2))
    if difference == "dtype" and odd:
        model[2].double()
    if difference == "strides" and odd:
        model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    named = list(model.named_parameters())
    if difference == "name" and odd:
        named[1] = ("bias", named[1][1])
    if difference == "number" and odd:
        named = named[:-1]
    if difference == "order" and odd:
        named = named[::-1]
    spec = "topk:density=0.1" if difference == "compressor" and odd else "none"
    inner = torch.optim.SGD([p for _, p in named], lr=0.1)
    with pytest.raises(mpicomp.MismatchError, match=f"rank {SIZE - 1}") as caught:
        mpicomp.DistributedOptimizer(inner, named_parameters=named, compression=spec)
    text = str(caught.value)
    expected = {
        "shape": "0.weight is (9, 6)",
        "dtype": "2.weight is (2, 9)",
        "name": "0.bias is missing",
        "compressor": "0.weight",
        "number": "2.bias is missing",
        "order": "another order",
        "strides": "strides (1, 9)",
    }[difference]
    assert expected in text
    model = small_model()  # and the library goes on
    opt = make("none", model)
    train(opt, model, range(2))


def test_environment_gives_the_default_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from mpicomp import world

    settings = dataclasses.replace(world.get().settings, compression="topk:density=0.1")
    monkeypatch.setattr(world.get(), "settings", settings)
    model = small_model()
    opt = mpicomp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    train(opt, model, range(1))
    assert ("mpicomp" in opt.state_dict()) == (SIZE > 1)
    opt = mpicomp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), compression="none", model=model
    )
    train(opt, model, range(1))
    assert "mpicomp" not in opt.state_dict()
