from __future__ import annotations

import dataclasses

import pytest
import torch

from mpicomp.compress import (
    DGC,
    Feedback,
    Gather,
    Mean,
    Simulation,
    parse,
    simulate,
    with_feedback,
)
from mpicomp.compress.dgc import clipped

PARAMS = {"w": torch.empty(6, 8), "b": torch.empty(6), "v": torch.empty(4, 5), "s": torch.empty(())}


def normal(seed, params=PARAMS, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(p.shape, generator=generator, dtype=dtype).to(p.dtype)
        for n, p in params.items()
    }


def doubles(params):
    return {name: param.double() for name, param in params.items()}


def state_of(simulation, rank=0):
    (group,) = simulation.groups
    return group.states[rank]


def row(*values):
    return {"w": torch.tensor([values], dtype=torch.float64)}


def test_momentum_correction_by_hand():
    """One of four elements is sent per step; the others' velocities add up, momentum included."""
    simulation = Simulation(DGC(density=0.25, momentum=0.5), row(0, 0, 0, 0), size=1)
    # u: (4, 2, 1, 0), v the same: 4 is sent, and both its sums stop
    assert simulation.step([row(4, 2, 1, 0)]).means[0]["w"].tolist() == [[4, 0, 0, 0]]
    assert state_of(simulation)["momentum"]["w"].tolist() == [[0, 2, 1, 0]]
    assert state_of(simulation)["velocity"]["w"].tolist() == [[0, 2, 1, 0]]
    # u: (1, 0.5 * 2 + 1, 0.5, 0) = (1, 2, 0.5, 0); v: (1, 4, 1.5, 0)
    assert simulation.step([row(1, 1, 0, 0)]).means[0]["w"].tolist() == [[0, 4, 0, 0]]
    assert state_of(simulation)["momentum"]["w"].tolist() == [[1, 0, 0.5, 0]]
    assert state_of(simulation)["velocity"]["w"].tolist() == [[1, 0, 1.5, 0]]
    # u: (0.5, 0, 1.25, 0); v: (1.5, 0, 2.75, 0)
    assert simulation.step([row(0, 0, 1, 0)]).means[0]["w"].tolist() == [[0, 0, 2.75, 0]]
    assert state_of(simulation)["velocity"]["w"].tolist() == [[1.5, 0, 0, 0]]


def test_nesterov_by_hand():
    compressor = DGC(density=0.25, momentum=0.5, nesterov=True)
    simulation = Simulation(compressor, row(0, 0, 0, 0), size=1)
    # u: (4, 2, 0, 0); v: g + 0.5 u = (6, 3, 0, 0)
    assert simulation.step([row(4, 2, 0, 0)]).means[0]["w"].tolist() == [[6, 0, 0, 0]]
    assert state_of(simulation)["momentum"]["w"].tolist() == [[0, 2, 0, 0]]
    # u: (0, 0.5 * 2 + 2, 0, 0) = 3; v: 3 + 2 + 0.5 * 3 = 6.5
    assert simulation.step([row(0, 2, 0, 0)]).means[0]["w"].tolist() == [[0, 6.5, 0, 0]]


def test_two_ranks_by_hand():
    simulation = Simulation(DGC(density=0.25, momentum=0.5), row(0, 0, 0, 0), size=2)
    first = simulation.step([row(4, -1, 0.5, 3), row(-1, -1, 2, 0.25)])
    assert [mean["w"].tolist() for mean in first.means] == [[[2, 0, 1, 0]]] * 2
    # v0: (0, -1, 0.5, 3) + 0.5 * the same + g; v1: (-1, -1, 0, 0.25) * 1.5 + g
    second = simulation.step([row(0, 0, 0, 1), row(0, -2, 0, 0)])
    assert [mean["w"].tolist() for mean in second.means] == [[[0, -1.75, 0, 2.75]]] * 2
    assert state_of(simulation, 1)["velocity"]["w"].tolist() == [[-1.5, 0, 0, 0.375]]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("density", [0.1, 1.0])
def test_what_goes_dense_is_ordinary_momentum_sgd(density, nesterov):
    """Biases always, and with density 1 all parameters: what `torch.optim.SGD` does by itself."""
    params = {n: torch.nn.Parameter(p) for n, p in normal(99, doubles(PARAMS)).items()}
    ours = {n: p.detach().clone() for n, p in params.items()}
    sgd = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9, nesterov=nesterov)
    simulation = Simulation(DGC(density, nesterov=nesterov), ours, size=3)
    for step in range(5):
        grads = [normal(10 * step + rank, ours) for rank in range(3)]
        for name, param in params.items():
            param.grad = torch.stack([grad[name] for grad in grads]).mean(0)
        sgd.step()
        for name, mean in simulation.step(grads).means[0].items():
            ours[name] -= 0.1 * mean
    for name, param in params.items():
        same = torch.allclose(ours[name], param.detach(), rtol=1e-12, atol=1e-12)
        assert same == (density == 1.0 or param.dim() < 2)


def test_a_step_that_goes_dense_leaves_no_velocity_but_the_momentum():
    """After few-element steps, all that has added up is sent; u runs on."""
    params = {"w": torch.empty(10, 10, dtype=torch.float64)}
    simulation = Simulation(DGC(density=0.1), params, size=2)
    simulation.step([normal(0, params), normal(1, params)])
    (group,) = simulation.groups
    before = [state["momentum"]["w"].clone() for state in group.states]
    waiting = [state["velocity"]["w"].clone() for state in group.states]
    grads = [normal(2, params), normal(3, params)]
    for bucket, state, grad in zip(group.buckets, group.states, grads, strict=True):
        group.compressor.load_(bucket, state, "w", grad["w"])
    outcomes = simulate(DGC(density=1.0), group.buckets, group.states)
    for rank, outcome in enumerate(outcomes):
        outcome.commit(frozenset())
        outcome.mean.store_(group.buckets[rank])
        assert not group.states[rank]["velocity"].flat.any()
        expected = 0.9 * before[rank] + grads[rank]["w"]
        torch.testing.assert_close(group.states[rank]["momentum"]["w"], expected)
    total = [w + 0.9 * u + g["w"] for w, u, g in zip(waiting, before, grads, strict=True)]
    torch.testing.assert_close(group.buckets[0]["w"], torch.stack(total).mean(0))


@pytest.mark.parametrize("spec", ["dgc:density=0.1", "dgc:density=0.1,nesterov=true,momentum=0.7"])
def test_velocities_are_conserved(spec):
    """The sum of means and the mean of what waits are the mean of all velocities."""
    params, compressor = doubles(PARAMS), parse(spec)
    simulation = Simulation(compressor, params, size=3)
    total = {name: torch.zeros_like(param) for name, param in params.items()}
    for step, scale in enumerate([1.0, 65536.0, 128.0, 128.0]):
        grads = [normal(10 * step + rank, params) for rank in range(3)]
        for rank, grad in enumerate(grads):
            u = state_of(simulation, rank)["momentum"]
            for name in params:
                new = compressor.momentum * u[name] + grad[name]
                if compressor.nesterov:
                    new = compressor.momentum * new + grad[name]
                total[name] += new / 3
        scaled = [{name: g * scale for name, g in grad.items()} for grad in grads]
        for name, mean in simulation.step(scaled, scale=scale).means[0].items():
            total[name] -= mean
    for name in params:
        waiting = torch.stack([state_of(simulation, r)["velocity"][name] for r in range(3)])
        torch.testing.assert_close(waiting.mean(0), total[name], rtol=1e-12, atol=1e-12)
        assert bool(waiting.any()) == (params[name].dim() > 1)


def test_without_momentum_it_is_top_k_with_feedback():
    params = {"w": torch.empty(12, 10, dtype=torch.float64)}
    ours = Simulation("dgc:density=0.1,momentum=0", params, size=2)
    theirs = Simulation("topk:density=0.1", params, size=2)
    for step in range(4):
        grads = [normal(2 * step + rank, params) for rank in range(2)]
        torch.testing.assert_close(ours.step(grads).means, theirs.step(grads).means)


def test_masking_stops_both_sums_where_something_was_sent():
    params = doubles(PARAMS)
    seen = []

    def tap(rank, message):
        if isinstance(message, Gather):
            seen.append((rank, message.tensors[1].clone()))

    simulation = Simulation(DGC(density=0.1), params, size=2, tap=tap)
    for step in range(3):
        seen.clear()
        simulation.step([normal(2 * step + rank, params) for rank in range(2)])
        for rank, indices in seen:
            assert len(indices) == 6  # int(0.1 * 68): the matrices' elements
            for slot in ("momentum", "velocity"):
                flat = state_of(simulation, rank)[slot].flat
                assert not flat[indices].any()
                assert int((flat == 0).sum()) == 6 + (slot == "velocity") * 7


def test_a_parameter_that_no_rank_used_keeps_both_sums():
    params = doubles(PARAMS)
    simulation = Simulation(DGC(density=0.1), params, size=2)
    simulation.step([normal(0, params), normal(1, params)])
    before = {
        (rank, slot, name): state_of(simulation, rank)[slot][name].clone()
        for rank in range(2)
        for slot in ("momentum", "velocity")
        for name in params
    }
    grads = [{**normal(seed, params), "v": None, "b": None} for seed in (2, 3)]
    means = simulation.step(grads).means[0]
    assert means["v"] is None
    assert means["b"] is None
    for (rank, slot, name), old in before.items():
        same = torch.equal(state_of(simulation, rank)[slot][name], old)
        assert same == (name in "vb" or (slot == "velocity" and name == "s"))


def test_a_bad_step_leaves_both_sums():
    params = doubles(PARAMS)
    simulation = Simulation(DGC(density=0.1, clip=1.0), params, size=2)
    simulation.step([normal(0, params), normal(1, params)])
    before = [t.clone() for t in state_of(simulation).values() for t in t.values()]
    for name in ("w", "b"):
        for value in (float("nan"), float("inf")):
            bad = normal(3, params)
            bad[name].view(-1)[1] = value
            result = simulation.step([normal(2, params), bad])
            assert not result.good
            assert result.means[0][name].isnan().all()
    after = [t for t in state_of(simulation).values() for t in t.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_clipping_by_hand():
    """The norm of (3, 4) is 5; on four ranks a bound of 2 leaves 4, whatever the loss scale."""
    params = {"w": torch.empty(1, 2), "b": torch.empty(2)}
    for scale in (1.0, 1024.0):
        simulation = Simulation(DGC(density=1.0, clip=2.0), params, size=4)
        grad = {"w": torch.tensor([[3.0, 4.0]]) * scale, "b": torch.tensor([0.6, 0.0]) * scale}
        means = simulation.step([grad] * 4, scale=scale).means[0]
        torch.testing.assert_close(means["w"], torch.tensor([[2.4, 3.2]]))
        torch.testing.assert_close(means["b"], torch.tensor([0.6, 0.0]))  # short enough


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_clipping_in_every_precision(dtype):
    grad = torch.full((64, 64), 6e4, dtype=dtype)  # squares overflow in fp16
    torch.testing.assert_close(clipped(grad, 1.0).double().norm().item(), 1.0, rtol=1e-2, atol=0.0)
    assert not clipped(torch.zeros(3, dtype=dtype), 1.0).any()
    if dtype != torch.float16:
        large = torch.full((4,), 1e30, dtype=dtype)
        torch.testing.assert_close(clipped(large, 1.0).double(), torch.full((4,), 0.5).double())
    for bad in (float("nan"), float("inf"), float("-inf")):
        grad[0, 0] = bad
        assert not clipped(grad, 1.0).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_add_up_in_fp32(dtype):
    params = {"w": torch.empty(1, 8, dtype=dtype)}
    simulation = Simulation(DGC(density=0.01, momentum=0.0), params, size=1)
    grad = {"w": torch.tensor([[256.0] + [1.0] * 7], dtype=dtype)}
    for _ in range(3):
        simulation.step([grad])
    assert state_of(simulation)["velocity"].flat.dtype == torch.float32
    assert state_of(simulation)["velocity"]["w"].tolist() == [[0.0] + [3.0] * 7]


@pytest.mark.parametrize(
    ("density", "size", "kinds"),
    [(0.1, 2, [Mean, Gather]), (0.5, 2, [Mean]), (0.24, 4, [Mean, Gather]), (0.25, 4, [Mean])],
)  # fmt: skip
def test_messages(density, size, kinds):
    params = {"w": torch.empty(10, 10), "b": torch.empty(10)}
    seen = []
    simulation = Simulation(
        DGC(density), params, size=size, tap=lambda r, m: seen.append(m) if r == 0 else None
    )
    result = simulation.step([normal(rank, params) for rank in range(size)])
    assert [type(message) for message in seen] == kinds
    pairs = int(density * 100)
    assert result.bytes_sent[0] == (40 + 8 * pairs if Gather in kinds else 440)


def test_only_matrices_send_one_message():
    seen = []
    params = {"w": torch.empty(10, 10)}
    simulation = Simulation(DGC(0.1), params, size=2, tap=lambda _, m: seen.append(type(m)))
    simulation.step([normal(0, params), normal(1, params)])
    assert seen == [Gather] * 2


def test_every_parameter_is_its_own_business():
    assert all(DGC().helps(shape) for shape in [(), (3,), (0,), (2, 1), (64, 3, 3, 3)])
    assert with_feedback(DGC()) == DGC()
    with pytest.raises(ValueError, match="memory of its own"):
        Feedback(DGC())


def test_capabilities():
    capabilities = DGC().capabilities
    assert capabilities.momentum
    assert capabilities.own_feedback
    assert not capabilities.conserves
    assert not DGC(momentum=0.0).capabilities.momentum
    assert DGC(momentum=0.0).capabilities.conserves


def test_another_density_is_one_replacement_away():
    early = dataclasses.replace(DGC(density=0.001, clip=2.0), density=0.25)
    assert early == DGC(density=0.25, clip=2.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"density": 0.0}, "density must be in"), ({"density": 1.5}, "density must be in"),
     ({"momentum": 1.0}, "momentum must be in"), ({"momentum": -0.1}, "momentum must be in"),
     ({"momentum": float("nan")}, "momentum must be in"),
     ({"momentum": 0.0, "nesterov": True}, "nesterov must be false"),
     ({"clip": -1.0}, "clip must be"), ({"clip": float("nan")}, "clip must be"),
     ({"clip": float("inf")}, "clip must be")],
)  # fmt: skip
def test_options_are_checked(options, words):
    with pytest.raises(ValueError, match=f"dgc: {words}"):
        DGC(**options)
