from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress import AllToAll, Gather, GatherV, Simulation, bucket_of, parse, simulate
from mpicomp.compress.codecs import Signs
from mpicomp.compress.two_sided import Plan, average_codes

SPECS = ["int8", "int4:block=24", "efsign", "efsign:per=row", "onebit", "onebit:per=parameter"]
PARAMS = {
    "odd": torch.empty(7, 11),
    "even": torch.empty(6, 40),
    "rows": torch.empty(50, 3),
    "small": torch.empty(2, 5),
}


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def buckets_of(rows, size=None):
    """A bucket for each of ``rows`` of numbers, as a matrix of one row."""
    size = size or len(rows)
    params = {"w": torch.empty(1, len(rows[0]))}
    buckets = [bucket_of(params, rows[0].dtype, rank=rank, size=size) for rank in range(len(rows))]
    for bucket, row in zip(buckets, rows, strict=True):
        bucket.flat.copy_(row)
    return buckets


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("params", [PARAMS, {"tiny": torch.empty(1, 13)}], ids=["some", "tiny"])
@pytest.mark.parametrize("spec", SPECS)
def test_nothing_is_lost_in_many_steps(spec, params, size):
    params = {name: param.double() for name, param in params.items()}
    simulation = Simulation(spec, params, size=size)
    balance = {name: torch.zeros_like(param) for name, param in params.items()}
    for step in range(25):
        grads = [
            {n: normal(*p.shape, seed=97 * step + rank) + 0.1 for n, p in params.items()}
            for rank in range(size)
        ]
        means = simulation.step(grads).means[0]
        for name in params:
            balance[name] += sum(g[name] for g in grads) / size - means[name]
    (group,) = simulation.groups
    for name in params:
        left = sum(state["residual"][name] for state in group.states) / size
        torch.testing.assert_close(left, balance[name], rtol=1e-11, atol=1e-11)
        assert left.abs().max() < 30  # in 25 steps with gradients of size 1 nothing blew up


@pytest.mark.parametrize("spec", SPECS)
def test_residuals_stay_bounded(spec):
    """The owner's account does not feed on itself: without gradients it is paid off."""
    params = {"w": torch.empty(24, 20)}
    simulation = Simulation(spec, params, size=5)

    def left():
        states = simulation.groups[0].states
        return float(torch.stack([state["residual"].flat for state in states]).norm())

    for step in range(20):
        simulation.step([{"w": normal(24, 20, seed=9 * step + r).float()} for r in range(5)])
    before = left()
    for _ in range(60):
        simulation.step([{"w": torch.zeros(24, 20)}] * 5)
    assert left() < 0.5 * before


def signed(x):
    return torch.where(x >= 0, 1.0, -1.0).double() * x.abs().mean()


def test_the_second_error_is_on_the_account_of_the_owner():
    rows = [normal(48, seed=rank) for rank in range(3)]
    buckets = buckets_of(rows)
    outcomes = simulate(parse("efsign"), buckets, [{}] * 3)
    mean = outcomes[0].mean.values
    for rank, (row, outcome) in enumerate(zip(rows, outcomes, strict=True)):
        sent = buckets[rank].like()
        outcome.sent.store_(sent)
        for owner in range(3):
            chunk = slice(16 * owner, 16 * owner + 16)
            signs = [signed(r[chunk]) for r in rows]
            exact = sum(signs) / 3
            again = signed(exact)
            torch.testing.assert_close(mean[chunk], again)
            account = 3 * (again - exact) if owner == rank else 0.0
            torch.testing.assert_close(sent.flat[chunk], signs[rank] + account)
        assert torch.equal(buckets[rank].flat, row)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_messages_and_their_bytes(size):
    """Everybody to everybody on up to two ranks; above, d bits, and d / size bits back."""
    d = 64 * 24
    buckets = buckets_of([normal(d, seed=rank, dtype=torch.float32) for rank in range(size)])
    seen = []
    simulate(parse("efsign"), buckets, [{}] * size, tap=lambda rank, m: seen.append((rank, m)))
    mine = [message for rank, message in seen if rank == size - 1]
    if size <= 2:
        assert [type(m) for m in mine] == [Gather]
        assert [t.numel() for t in mine[0].tensors] == [1, d // 8]
        assert mine[0].num_bytes == d // 8 + 4
    else:
        assert [type(m) for m in mine] == [AllToAll, GatherV]
        assert [t.numel() for t in mine[0].tensors] == [d // 8 // size + 4] * size
        assert mine[1].num_bytes == d // 8 // size + 4
    dtypes = {t.dtype for m in mine for t in m.tensors}
    assert dtypes <= {torch.uint8, torch.float32}


@pytest.mark.parametrize("spec", [*SPECS, "signsgd", "int8:stochastic=true"])
def test_a_rank_without_data_calls_along(spec):
    """Nothing is sent to it, and it has to hand over messages of the right kinds."""
    compressor = parse(spec)
    bucket = bucket_of(PARAMS, torch.float32, rank=0, size=3)
    run = compressor.exchange(bucket, compressor.init(bucket))
    message = next(run)
    assert isinstance(message, AllToAll)
    empty = torch.empty(0, dtype=torch.uint8)
    message = run.send((empty, empty, empty))
    assert isinstance(message, GatherV)
    d = bucket.flat.numel()
    others = [bucket_of(PARAMS, torch.float32, rank=rank, size=3) for rank in range(3)]
    for rank, other in enumerate(others):
        other.flat.copy_(normal(d, seed=rank))
    pieces = {}

    def keep(rank, message):
        if isinstance(message, GatherV):
            pieces[rank] = tuple(t.clone() for t in message.tensors)

    states = [compressor.init(other) for other in others]
    outcomes = simulate(compressor, others, states, tap=keep)
    with pytest.raises(StopIteration) as stop:
        run.send(tuple(pieces[rank] for rank in range(3)))
    assert torch.equal(stop.value.value.mean.values, outcomes[1].mean.values)


def test_combine_and_another_codec_on_the_way_back():
    rows = [torch.full((24,), float(rank + 1)) for rank in range(3)]

    class Method:
        def exchange(self, bucket, state):
            tiles = ((1, 24),)
            largest = lambda parts: torch.stack(list(parts)).amax(0)  # noqa: E731
            return (
                yield from average_codes(bucket, tiles, align=8, codec=Signs(), combine=largest)
            )

    outcomes = simulate(Method(), buckets_of(rows), [{}] * 3)
    assert outcomes[2].mean.values.tolist() == [3.0] * 24


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=4),
    st.integers(3, 9),
    st.sampled_from([8, 24, 256]),
)
def test_plans_tile_the_bucket(tiles, size, align):
    numel = sum(rows * width for rows, width in tiles)
    plan = Plan.of(numel, tuple(tiles), size=size, align=align)
    assert (plan.bounds[0], plan.bounds[-1], len(plan.bounds)) == (0, numel, size + 1)
    assert all(bound % align == 0 for bound in plan.bounds[:-1] if bound < numel)
    lengths = [b - a for a, b in zip(plan.bounds, plan.bounds[1:], strict=False)]
    assert all(length >= 0 for length in lengths)
    assert max(lengths) - min(lengths) < 2 * align
    assert [sum(r * c for r, c in chunk) for chunk in plan.chunks] == lengths
