"""The same start on all ranks, whichever rank has it."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from mpi4py import MPI
from torch import nn

import mpicomp
from mpicomp import MismatchError

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
several = pytest.mark.skipif(SIZE == 1, reason="one rank agrees with itself")
pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture(params=sorted({0, SIZE - 1}))
def root(request):
    return request.param


def model(rank, dtype=torch.float32):
    """Other parameters and buffers on each rank; some are not contiguous, one is 0-d."""
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(5, 6))
    net = net.to(memory_format=torch.channels_last)
    net[1].running_mean.normal_()
    net[1].num_batches_tracked += rank
    net[2].weight = nn.Parameter(torch.randn(5, 6).t())
    net.scale = nn.Parameter(torch.randn(()))
    return net.to(dtype)


def state_of(net):
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict(root, dtype):
    net = model(RANK, dtype)
    strides = {name: tensor.stride() for name, tensor in net.state_dict().items()}
    mpicomp.broadcast_parameters({**net.state_dict(), "version": 3}, root_rank=root)
    expected = model(root, dtype).state_dict()
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, expected[name])
        assert tensor.stride() == strides[name]


def test_named_parameters_and_parameters(root):
    for arguments in (nn.Module.named_parameters, nn.Module.parameters):
        net = model(RANK)
        before = state_of(net)
        mpicomp.broadcast_parameters(arguments(net), root)
        expected = model(root).state_dict()
        trained = dict(net.named_parameters())
        for name, tensor in net.state_dict().items():
            assert torch.equal(tensor, (expected if name in trained else before)[name])
        assert all(p.is_leaf and p.requires_grad and p.grad is None for p in net.parameters())


def test_nothing_and_what_is_no_tensor(root):
    mpicomp.broadcast_parameters({}, root)
    mpicomp.broadcast_parameters([("bias", None), ("empty", torch.zeros(0, 3))], root)


@several
@pytest.mark.parametrize(
    "other",
    [
        lambda: {"w": torch.zeros(3)},
        lambda: {"w": torch.zeros(2, dtype=torch.float64)},
        lambda: {"v": torch.zeros(2)},
        lambda: {"w": torch.zeros(2), "v": torch.zeros(2)},
        dict,
    ],
)
def test_other_parameters(other):
    with pytest.raises(MismatchError, match=r"(?s)ranks? 0.*w \(2,\) torch.float32.*rank"):
        mpicomp.broadcast_parameters(other() if RANK == SIZE - 1 else {"w": torch.zeros(2)})
    mpicomp.broadcast_parameters({"w": torch.zeros(2)})


@several
def test_other_roots():
    for call in (
        lambda root: mpicomp.broadcast_parameters({"w": torch.zeros(2)}, root),
        lambda root: mpicomp.broadcast_optimizer_state(optimizer(SGD, model(0)), root),
        lambda root: mpicomp.broadcast_object("x", root),
    ):
        with pytest.raises(MismatchError, match=r"(?s)root_rank 0.*root_rank 1"):
            call(int(RANK == SIZE - 1))


# ---------------------------------------------------------------------------- optimizer's state

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": SGD,
    "adam": functools.partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1),
    "tensor_lr": functools.partial(torch.optim.Adam, lr=torch.tensor(0.1), foreach=False),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
}


def optimizer(kind, net):
    groups = [{"params": list(net[0].parameters())}, {"params": list(net[2].parameters())}]
    return kind(groups)


def step(opt, seed):
    torch.manual_seed(seed)
    for group in opt.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape).to(param)
    opt.step()


def trained(kind, rank, dtype=torch.float32):
    """After 1 + rank steps, with a learning rate of its own in the second group."""
    net = model(rank, dtype)
    opt = optimizer(kind, net)
    for turn in range(1 + rank):
        step(opt, 100 * rank + turn)
    opt.param_groups[1]["lr"] = opt.param_groups[1]["lr"] / (2 + rank)
    return net, opt


def same(one, other):
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        assert one == other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_an_optimizer(name, root, dtype):
    net, opt = trained(OPTIMIZERS[name], RANK, dtype)
    mpicomp.broadcast_parameters(net.state_dict(), root)
    mpicomp.broadcast_optimizer_state(opt, root_rank=root)
    twin_net, twin = trained(OPTIMIZERS[name], root, dtype)
    same(opt.state_dict(), twin.state_dict())
    step(opt, 7)  # and it trains on as the root's would have
    step(twin, 7)
    same(state_of(net), state_of(twin_net))


def test_only_some_ranks_have_a_state(root):
    for who in ({root}, set(range(SIZE)) - {root}):
        net, opt = trained(SGD, 0)
        if RANK not in who:
            opt = optimizer(SGD, net)
        expected = copy.deepcopy(trained(SGD, 0)[1] if root in who else optimizer(SGD, net))
        mpicomp.broadcast_optimizer_state(opt, root)
        same(opt.state_dict(), expected.state_dict())
        assert bool(opt.state) == (root in who)


def test_a_wrapped_optimizer(root):
    net = model(RANK)
    opt = mpicomp.DistributedOptimizer(optimizer(SGD, net), net.named_parameters())
    for param in net.parameters():
        param.grad = None
    for group in opt.param_groups:
        for param in group["params"]:
            opt.state[param]["momentum_buffer"] = torch.full_like(param, RANK)
    mpicomp.broadcast_optimizer_state(opt, root, model=net)
    assert all((state["momentum_buffer"] == root).all() for state in opt.state.values())


@several
def test_other_optimizers():
    net = model(0)
    wrong = [
        optimizer(OPTIMIZERS["adam"], net),
        SGD([{"params": list(net[0].parameters())}]),
        SGD([{"params": list(net[0].parameters())}, {"params": list(net[0].parameters())[:1] * 0}]),
    ]
    for other in wrong:
        opt = other if RANK == SIZE - 1 else optimizer(SGD, net)
        with pytest.raises(MismatchError, match=r"(?s)rank.*SGD with groups.*rank"):
            mpicomp.broadcast_optimizer_state(opt)
