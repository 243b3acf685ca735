"""Methods that apply momentum before they compress, and an optimizer that must not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpicomp
from mpicomp.optimizer import DistributedOptimizer

RANK, SIZE = mpicomp.rank(), mpicomp.size()


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * step + rank))
    return model(x).square().mean()


@pytest.mark.parametrize(
    "spec",
    ["dgc:density=1", "dgc:density=1,momentum=0.5", "sketch:density=1", "fetchsgd:width=1"],
)
def test_everything_sent_is_ordinary_momentum(spec: str) -> None:
    model, twin = model_of(), model_of()
    momentum = 0.5 if "0.5" in spec else 0.9
    opt = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), compression=spec, model=model
    )
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=momentum)
    for step in range(5):
        opt.zero_grad()
        loss_of(model, step, RANK).backward()
        opt.step()
        plain.zero_grad()
        torch.stack([loss_of(twin, step, rank) for rank in range(SIZE)]).mean().backward()
        plain.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(SIZE > 1, reason="about one rank")
@pytest.mark.parametrize(
    "spec", ["dgc:density=0.01", "sketch", "fetchsgd", {"0.*": "dgc", "*": "topk"}]
)
def test_one_rank_keeps_the_momentum_and_compresses_nothing(spec: object) -> None:
    model, twin = model_of(), model_of()
    opt = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), compression=spec, model=model
    )
    groups = [
        {"params": twin[0].parameters(), "momentum": 0.9},
        {"params": twin[2].parameters(), "momentum": 0.0 if isinstance(spec, dict) else 0.9},
    ]
    plain = torch.optim.SGD(groups, lr=0.1)
    for step in range(4):
        for net, optimizer in ((model, opt), (twin, plain)):
            optimizer.zero_grad()
            loss_of(net, step, 0).backward()
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "rmsprop": lambda params: torch.optim.RMSprop(params, momentum=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_momentum_twice_is_refused(name: str) -> None:
    model = model_of()
    option = r"betas\[0\]" if name == "adam" else "momentum"
    with pytest.raises(ValueError, match=rf"optimizer must have {option} 0 with DGC.*, got 0"):
        DistributedOptimizer(OPTIMIZERS[name](model.parameters()), compression="dgc", model=model)
    DistributedOptimizer(
        OPTIMIZERS[name](model.parameters()), compression="dgc:momentum=0", model=model
    ).close()


def test_a_group_added_later_is_looked_at_too() -> None:
    model, other = model_of(), model_of()
    opt = DistributedOptimizer(torch.optim.SGD(model.parameters()), compression="dgc", model=model)
    with pytest.raises(ValueError, match=r"must have momentum 0 with DGC.*, got 0\.3"):
        opt.add_param_group({"params": list(other.parameters()), "momentum": 0.3})
    assert len(opt.param_groups) == 1
    opt.close()
