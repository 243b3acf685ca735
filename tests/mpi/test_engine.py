"""The rule of the engine: after backward every gradient is the mean over ranks of the local ones.

Expected values come from the gradients that each rank computes for itself on a plain copy of the
model, gathered as objects: nothing here trusts the reductions under test.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mpicomp
from mpicomp.optimizer import DistributedOptimizer

RANK, SIZE = mpicomp.rank(), mpicomp.size()
needs_ranks = pytest.mark.skipif(SIZE == 1, reason="needs more than one rank")

Grads = dict[str, Tensor | None]


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 2))


def batch(step: int = 0, rank: int = RANK) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def wrap(model: nn.Module, compression: object = "none", **options: object) -> DistributedOptimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mpicomp.DistributedOptimizer(
        optimizer, compression=compression, model=model, **{"fusion_mb": 2e-4, **options}
    )


def grads_of(model: nn.Module) -> Grads:
    return {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
    }


def mean_over_ranks(own: Grads) -> Grads:
    every = mpicomp.allgather_object(own)
    means: Grads = {}
    for name in own:
        given = [g[name] for g in every if g[name] is not None]
        means[name] = sum(given) / SIZE if given else None  # type: ignore[assignment]
    return means


def assert_mean(model: nn.Module, local: Grads, **tolerance: float) -> None:
    """``model`` holds the mean of ``local``, and the same bits on every rank."""
    own = grads_of(model)
    for name, expected in mean_over_ranks(local).items():
        if expected is None:
            assert own[name] is None, name
        else:
            torch.testing.assert_close(
                own[name], expected, **({"rtol": 1e-5, "atol": 1e-6} | tolerance)
            )
    for other in mpicomp.allgather_object(own):
        for name, grad in own.items():
            assert grad is None or torch.equal(grad.to_dense(), other[name].to_dense()), name


def local_grads(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Grads:
    plain = copy.deepcopy(model)
    plain.zero_grad()
    loss(plain).backward()
    return grads_of(plain)


@pytest.fixture(params=["none", "topk:density=0.15", "powersgd:rank=1"])
def compression(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ------------------------------------------------------------------------------------- the rule


@pytest.mark.parametrize("fusion_mb", [1e-5, 2e-4, 25.0])
def test_gradients_are_means_over_many_steps(fusion_mb: float) -> None:
    model = small_model()
    opt = wrap(model, fusion_mb=fusion_mb)
    for step in range(4):
        local = local_grads(model, lambda m, s=step: m(batch(s)).square().sum())
        opt.zero_grad()
        model(batch(step)).square().sum().backward()
        assert_mean(model, local)
        opt.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool, compression: str) -> None:
    if SIZE > 1 and compression != "none":
        pytest.skip("compressed gradients are not plain means")
    model = small_model()
    opt = wrap(model, compression)
    for step in range(3):
        opt.zero_grad(set_to_none=set_to_none)
        local = local_grads(model, lambda m, s=step: m(batch(s)).square().sum())
        model(batch(step)).square().sum().backward()
        assert_mean(model, local)
        opt.step()


def test_gradients_are_views_of_the_buckets_and_stay_where_they_are() -> None:
    if SIZE == 1:
        pytest.skip("one rank has no buckets")
    model = small_model()
    opt = wrap(model, fusion_mb=25.0)
    for _ in range(3):  # the buckets are made anew after the first step
        opt.zero_grad(set_to_none=False)
        model(batch()).sum().backward()
    storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == 1
    before = {p.grad.data_ptr() for p in model.parameters()}
    opt.zero_grad(set_to_none=False)
    model(batch()).sum().backward()
    assert {p.grad.data_ptr() for p in model.parameters()} == before


def test_first_and_second_step_with_identical_input(compression: str) -> None:
    """All ranks hold the same gradients, so their mean is each of them, scaled by nothing."""
    model = small_model()
    opt = wrap(model, {"*": "none"} if compression == "none" else compression)
    x = batch(rank=0)
    for step in range(2):
        opt.zero_grad()
        model(x).square().sum().backward()
        for name, grad in local_grads(model, lambda m: m(x).square().sum()).items():
            got = dict(model.named_parameters())[name].grad
            if compression == "none" or grad.ndim == 1 or SIZE == 1:
                torch.testing.assert_close(got, grad)
            else:  # part of the gradient, and in the second step of what was not sent in the first
                assert got.norm() <= grad.norm() * (step + 1) * 1.00001


def test_parameters_and_buffers_come_from_rank_0() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(RANK)
    wrap(model)
    assert all((t == 0).all() for t in [*model.parameters(), *model.buffers()])
    for tensor in model.parameters():
        tensor.data.fill_(RANK)
    wrap(model, broadcast=False)
    assert all((p == RANK).all() for p in model.parameters())


# ------------------------------------------------------------------------- parts of the model


@needs_ranks
@pytest.mark.parametrize("user", [{0}, {1}, set(), {0, 1}])
def test_parameters_unused_on_some_ranks(user: set[int], compression: str) -> None:
    model = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})
    opt = wrap(model, {"*": compression})

    def loss(m: nn.Module) -> Tensor:
        y = m["a"](batch())  # type: ignore[index]
        return (m["b"](y) if RANK in user else y).square().sum()  # type: ignore[index]

    for _ in range(3):
        local = local_grads(model, loss)
        before = model["b"].weight.clone()
        opt.zero_grad()
        loss(model).backward()
        if compression == "none":
            assert_mean(model, local)
        used = bool(user & set(range(SIZE)))
        assert (model["b"].weight.grad is not None) == used
        opt.step()
        assert used or torch.equal(model["b"].weight, before)


@needs_ranks
def test_unused_everywhere_keeps_the_residual(compression: str) -> None:
    if compression == "none":
        pytest.skip("no residual")
    model = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})
    opt = wrap(model, compression)
    model["b"](model["a"](batch())).square().sum().backward()
    residual = opt._engine.memory()["residual"]["b.weight"].clone()
    assert residual.any()
    for _ in range(3):
        opt.zero_grad()
        model["a"](batch()).square().sum().backward()
    assert torch.equal(opt._engine.memory()["residual"]["b.weight"], residual)


def test_frozen_then_unfrozen_then_frozen() -> None:
    model = small_model()
    first = model[0]
    first.requires_grad_(False)
    opt = wrap(model)
    for frozen in (True, True, False, False, True, False):
        first.requires_grad_(not frozen)
        local = local_grads(model, lambda m: m(batch()).square().sum())
        opt.zero_grad()
        model(batch()).square().sum().backward()
        assert (first.weight.grad is None) == frozen
        assert_mean(model, local)
        opt.step()


@needs_ranks
def test_frozen_parameters_are_not_sent() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    opt = wrap(model)
    before = mpicomp.stats()
    model(batch()).sum().backward()
    sent = (mpicomp.stats() - before).bytes_sent
    assert sent == 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    model[2].requires_grad_(False)  # the first exchange after a change still sends the old set
    for _ in range(2):
        before = mpicomp.stats()
        opt.zero_grad()
        model(batch()).sum().backward()
    sent = (mpicomp.stats() - before).bytes_sent
    assert sent == 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_tied_weights() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    opt = wrap(model)
    local = local_grads(model, lambda m: m(batch()).square().sum())
    opt.zero_grad()
    model(batch()).square().sum().backward()
    assert_mean(model, local)


class Odd(nn.Module):
    """0-d, empty, transposed, channels-last and fp64 parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.transposed = nn.Parameter(torch.randn(6, 4).t())
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.wide = nn.Parameter(torch.randn(4, 2, dtype=torch.float64))
        self.gap = nn.Parameter(torch.randn(4, 8)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        image = torch.outer(x[:, 0], x[:, 1]).expand(3, 5, 5)[None]
        y = (x @ self.transposed.t()) @ self.gap
        small = self.conv(image).square().sum() + (y.double() @ self.wide).square().sum()
        return 1e-3 * self.scalar * small + self.empty.sum()


@pytest.mark.parametrize("spec", ["none", "fp16", "bf16", "topk:density=0.2", "powersgd"])
def test_odd_parameters(spec: str) -> None:
    model = Odd()
    opt = wrap(model, spec)
    for _ in range(3):
        local = local_grads(model, lambda m: m(batch()))
        opt.zero_grad()
        model(batch()).backward()
        for p in model.parameters():
            assert p.grad.shape == p.shape
            assert p.grad.dtype == p.dtype
        if spec == "none":
            assert_mean(model, local)
            assert model.transposed.grad.stride() == model.transposed.stride()
            assert model.conv.weight.grad.is_contiguous(memory_format=torch.channels_last)
        elif spec.endswith("16") and SIZE > 1:
            assert_mean(model, local, rtol=2e-2, atol=5e-2)
        opt.step()


@needs_ranks
def test_everything_at_density_one_and_full_rank_is_the_mean() -> None:
    for spec in ("topk:density=1", "powersgd:rank=9"):
        model = small_model()
        opt = wrap(model, spec)
        local = local_grads(model, lambda m: m(batch()).square().sum())
        opt.zero_grad()
        model(batch()).square().sum().backward()
        assert_mean(model, local, rtol=1e-4, atol=1e-5)


def test_complex_parameters_go_dense() -> None:
    model = nn.Module()
    model.z = nn.Parameter(
        torch.randn(4, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    )
    opt = wrap(model, "powersgd")
    opt.zero_grad()
    (model.z * (RANK + 1)).abs().square().sum().backward()
    scale = sum((r + 1) ** 2 for r in range(SIZE)) / SIZE
    torch.testing.assert_close(model.z.grad, 2 * scale * model.z.detach())


@pytest.mark.parametrize("spec", ["none", "topk:density=0.5", "powersgd"])
def test_sixteen_bit_models(spec: str) -> None:
    model = small_model().to(torch.bfloat16)
    opt = wrap(model, spec)
    x = batch().bfloat16()
    local = local_grads(model, lambda m: m(x).square().sum())
    opt.zero_grad()
    model(x).square().sum().backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
    if spec == "none":
        assert_mean(model, local, rtol=2e-2, atol=2e-2)
    elif SIZE > 1:
        assert {t.dtype for t in opt._engine.memory()["residual"].values()} == {torch.float32}
    opt.step()


# ----------------------------------------------------------------------------------- embeddings


@pytest.mark.parametrize("rows", [2, 40])
def test_sparse_embeddings(rows: int) -> None:
    """Few rows travel as rows; more rows than the table has travel as the table."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 4, sparse=True), nn.Linear(4, 1))
    sparse = torch.optim.SparseAdam(model[0].parameters())
    opts = [
        mpicomp.DistributedOptimizer(sparse, model=model[0]),
        mpicomp.DistributedOptimizer(
            torch.optim.SGD(model[1].parameters(), lr=0.1), model=model[1]
        ),
    ]
    index = torch.randint(30, (rows,), generator=torch.Generator().manual_seed(RANK))
    for _ in range(3):
        local = local_grads(model, lambda m: m(index).square().sum())
        for opt in opts:
            opt.zero_grad()
        model(index).square().sum().backward()
        grad = model[0].weight.grad
        assert grad.is_sparse
        assert SIZE == 1 or grad.is_coalesced()
        expected = mean_over_ranks({k: g.to_dense() for k, g in local.items()})
        torch.testing.assert_close(grad.to_dense(), expected["0.weight"])
        for opt in opts:
            opt.step()


@needs_ranks
def test_sparse_gradient_on_one_rank_only() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"e": nn.Embedding(30, 4, sparse=True), "l": nn.Linear(4, 1)})
    opt = wrap(model)
    for _ in range(2):
        opt.zero_grad()
        x = model["e"](torch.tensor([3, 3, 7])) if RANK == 0 else torch.ones(3, 4)
        model["l"](x).sum().backward()
        grad = model["e"].weight.grad.to_dense()
        expected = torch.zeros(30, 4)
        expected[3], expected[7] = 2 * model["l"].weight / SIZE, model["l"].weight / SIZE
        torch.testing.assert_close(grad, expected.detach())


# ------------------------------------------------------------------------ ways to run backward


def test_accumulation_with_no_sync(compression: str) -> None:
    model = small_model()
    opt = wrap(model, compression)
    for _ in range(2):
        local = local_grads(model, lambda m: sum(m(batch(i)).square().sum() for i in range(3)))
        opt.zero_grad()
        before = mpicomp.stats().steps
        with opt.no_sync():
            for i in range(2):
                model(batch(i)).square().sum().backward()
        assert mpicomp.stats().steps == before
        model(batch(2)).square().sum().backward()
        assert mpicomp.stats().steps == before + (SIZE > 1)
        if compression == "none":
            assert_mean(model, local)


def test_backward_passes_per_step_and_a_short_last_window() -> None:
    model = small_model()
    opt = wrap(model, backward_passes_per_step=3)
    for window in (3, 3, 2, 3, 1):
        local = local_grads(
            model, lambda m, n=window: sum(m(batch(i)).square().sum() for i in range(n))
        )
        opt.zero_grad()
        before = mpicomp.stats().steps
        for i in range(window):
            model(batch(i)).square().sum().backward()
        weights = [p.detach().clone() for p in model.parameters()]
        opt.step()
        assert mpicomp.stats().steps == before + (SIZE > 1)
        assert_mean(model, local)
        for p, w in zip(model.parameters(), weights, strict=True):
            torch.testing.assert_close(p.detach(), w - 0.1 * p.grad)


def test_step_after_no_sync_alone_still_averages() -> None:
    model = small_model()
    opt = wrap(model)
    local = local_grads(model, lambda m: m(batch()).square().sum())
    opt.zero_grad()
    with opt.no_sync():
        model(batch()).square().sum().backward()
    opt.step()
    assert_mean(model, local)


def test_accumulated_gradient_of_a_parameter_that_the_last_pass_does_not_use() -> None:
    model = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})
    opt = wrap(model)

    def both(m: nn.Module) -> Tensor:
        return m["b"](m["a"](batch(0))).square().sum()  # type: ignore[index]

    def one(m: nn.Module) -> Tensor:
        return m["a"](batch(1)).square().sum()  # type: ignore[index]

    local = local_grads(model, lambda m: both(m) + one(m))
    opt.zero_grad()
    with opt.no_sync():
        both(model).backward()
    one(model).backward()
    assert_mean(model, local)


def test_second_backward_without_zero_grad() -> None:
    """The rule: an exchange replaces the accumulated gradients by their mean, each time."""
    model = small_model()
    opt = wrap(model)
    local = local_grads(model, lambda m: m(batch(0)).square().sum() + m(batch(1)).square().sum())
    opt.zero_grad()
    model(batch(0)).square().sum().backward()
    model(batch(1)).square().sum().backward()
    assert_mean(model, local)


def test_retained_graph() -> None:
    model = small_model()
    opt = wrap(model)
    local = local_grads(model, lambda m: 2 * m(batch()).square().sum())
    opt.zero_grad()
    loss = model(batch()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert_mean(model, local)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, *, shared: bool, outside: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.reentrant = reentrant
        block = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([block if shared else nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 2) if outside else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(lambda y, b=block: b(y).tanh(), x, use_reentrant=self.reentrant)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("fusion_mb", [1e-5, 25.0])
def test_checkpointing(reentrant: bool, shared: bool, outside: bool, fusion_mb: float) -> None:
    model = Checkpointed(reentrant, shared=shared, outside=outside)
    opt = wrap(model, fusion_mb=fusion_mb)
    for step in range(3):
        local = local_grads(model, lambda m, s=step: m(batch(s)).square().sum())
        opt.zero_grad()
        model(batch(step)).square().sum().backward()
        assert_mean(model, local)
        opt.step()


@needs_ranks
def test_two_optimizers_in_one_backward_whose_order_differs_between_ranks() -> None:
    models = [small_model(0), small_model(1)]
    opts = [wrap(model, spec) for model, spec in zip(models, ("none", "fp16"), strict=True)]
    for step in range(6):
        local = [local_grads(m, lambda m, s=step: m(batch(s)).square().sum()) for m in models]
        for opt in opts:
            opt.zero_grad()
        order = models if (RANK + step) % 2 else models[::-1]
        sum(m(batch(step)).square().sum() for m in order).backward()
        assert_mean(models[0], local[0])
        assert_mean(models[1], local[1], rtol=1e-2, atol=1e-2)
        for opt in opts:
            opt.step()


def test_two_models_in_turns() -> None:
    """As in adversarial training: the second backward goes through the first model too."""
    models = [small_model(0), small_model(1)]
    opts = [wrap(m) for m in models]
    link = nn.Linear(2, 6)
    link.requires_grad_(False)
    for step in range(3):
        for i, opt in enumerate(opts):
            local = local_grads(models[i], lambda m, s=step: m(batch(s)).square().sum())
            opt.zero_grad()
            models[i](batch(step)).square().sum().backward()
            assert_mean(models[i], local)
            opt.step()


@needs_ranks
def test_backward_that_fails_on_all_ranks_leaves_nothing_behind(compression: str) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            raise ArithmeticError("on purpose")

    model = small_model()
    opt = wrap(model, compression)
    model(batch()).square().sum().backward()
    memory = {k: {n: t.clone() for n, t in v.items()} for k, v in opt._engine.memory().items()}
    opt.zero_grad()
    hidden = model[:3](batch())
    with pytest.raises(ArithmeticError):
        model[3:](Failing.apply(hidden)).square().sum().backward()
    opt.zero_grad()
    if compression == "none":
        local = local_grads(model, lambda m: m(batch(1)).square().sum())
        model(batch(1)).square().sum().backward()
        assert_mean(model, local)
        return
    model(batch(1)).square().sum().backward()
    twin = small_model()
    other = wrap(twin, compression)
    twin(batch()).square().sum().backward()
    for slot, tensors in memory.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, other._engine.memory()[slot][name])
    other.zero_grad()
    twin(batch(1)).square().sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@needs_ranks
def test_a_parameter_listens_to_the_optimizer_that_came_last() -> None:
    model = small_model()
    wrap(model, "topk:density=0.1")  # lives on through its hooks, although nobody holds it
    model(batch()).sum().backward()
    opt = wrap(model)
    opt.zero_grad()
    local = local_grads(model, lambda m: m(batch()).sum())
    before = mpicomp.stats().steps
    model(batch()).sum().backward()
    assert mpicomp.stats().steps == before + 1
    assert_mean(model, local)


# --------------------------------------------------------------------------------- uneven data


@pytest.mark.parametrize(
    "batches", [lambda r: r + 1, lambda r: 3 - min(r, 2), lambda r: 2, lambda r: 2 * (r == 0)]
)
def test_join(batches: Callable[[int], int], compression: str) -> None:
    model = small_model()
    opt = wrap(model, compression)
    counts = [batches(r) for r in range(SIZE)]
    with opt.join():
        for step in range(counts[RANK]):
            opt.zero_grad()
            local = local_grads(model, lambda m, s=step: m(batch(s)).square().sum())
            model(batch(step)).square().sum().backward()
            active = [r for r in range(SIZE) if counts[r] > step]
            if compression == "none" and len(active) == 1:
                for name, grad in grads_of(model).items():
                    torch.testing.assert_close(grad, local[name])
            opt.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    every = mpicomp.allgather(weights[None])
    assert (every == every[0]).all()
    twin = small_model()
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    if compression == "none":  # the means are over the ranks that had data
        for step in range(max(counts)):
            plain.zero_grad()
            active = [r for r in range(SIZE) if counts[r] > step]
            (sum(twin(batch(step, r)).square().sum() for r in active) / len(active)).backward()
            plain.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    opt.zero_grad()
    local = local_grads(model, lambda m: m(batch()).square().sum())
    model(batch()).square().sum().backward()
    if compression == "none":
        assert_mean(model, local)


@pytest.mark.parametrize(
    "spec", ["dgc:density=0.15", "gtopk:density=0.15", "oktopk:density=0.15,repartition=2"]
)
def test_join_where_ranks_have_different_parts(spec: str) -> None:
    """A rank without data is handed nothing, and still knows the result."""
    test_join(lambda rank: rank + 1, spec)
