from __future__ import annotations

import pytest
import torch

from mpicomp.compress import FetchSGD, Simulation, Sketch, assign, bucket_of, parse


class Always(Sketch):
    """Sketches even where that does not pay, so that tests can be small."""

    def dense_is_cheaper(self, numel, element_bytes, *, size):
        return False


class AlwaysFetch(FetchSGD):
    def dense_is_cheaper(self, numel, element_bytes, *, size):
        return False


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step(simulation, rows):
    """One step with a gradient per rank of the one parameter, as the mean and as the states."""
    like = simulation.groups[0].buckets[0]["w"]
    grads = [{"w": torch.as_tensor(row, dtype=like.dtype).view(like.shape)} for row in rows]
    return simulation.step(grads).means[0]["w"].flatten()


def simulation_of(method, numel, size, dtype=torch.float64):
    return Simulation(method, {"w": torch.empty(numel, 1, dtype=dtype)}, size=size)


def slot(simulation, rank, name):
    return simulation.groups[0].states[rank][name]["w"].flatten()


# ------------------------------------------------------------------------------- known answers

REGRESSION = [  # k of 2 elements, momentum, and w after the first and the second step
    (1.0, 0.0, (0.28, 0.34), (0.172, 0.204)),
    (0.5, 0.0, (0.0, 0.34), (0.3288, 0.34)),
    (0.5, 0.9, (0.0, 0.34), (0.5808, 0.34)),
]


@pytest.mark.parametrize("cls", [Always, AlwaysFetch])
@pytest.mark.parametrize(("density", "momentum", "first", "second"), REGRESSION)
def test_linear_regression_by_hand(cls, density, momentum, first, second):
    """Two rows of data per rank; the sketch is wide enough to be exact, gradients are summed."""
    x, y = torch.arange(8.0).double().view(4, 2), torch.arange(4.0).double()
    simulation = simulation_of(cls(density=density, momentum=momentum), 2, size=2)
    w = torch.zeros(2, dtype=torch.float64)
    for expected in (first, second):
        halves = [(x[:2], y[:2]), (x[2:], y[2:])]
        grads = [-2 * xs.T @ (ys - xs @ w) for xs, ys in halves]
        w = w - 2 * 0.005 * step(simulation, grads)  # a sum is twice the mean
        torch.testing.assert_close(w, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("cls", [Always, AlwaysFetch])
def test_one_parameter_by_hand(cls):
    x = torch.arange(4.0).double()
    simulation = simulation_of(cls(density=1.0, momentum=0.0), 1, size=2)
    w = torch.zeros(1, dtype=torch.float64)
    for expected in (0.14, 0.2604):
        grads = [-2 * (xs * (xs - xs * w)).sum().view(1) for xs in (x[:2], x[2:])]
        w = w - 2 * 0.005 * step(simulation, grads)
        assert float(w) == pytest.approx(expected, rel=1e-9)


def test_the_largest_of_the_mean_is_chosen_not_the_largest_of_a_rank():
    simulation = simulation_of(Always(density=0.25, momentum=0.0), 4, size=2)
    grads = [(4.0, -1.0, 0.5, 3.0), (-1.0, -1.0, 2.0, 0.25)]
    assert step(simulation, grads).tolist() == [0.0, 0.0, 0.0, 1.625]
    assert slot(simulation, 0, "velocity").tolist() == [4.0, -1.0, 0.5, 0.0]
    assert slot(simulation, 1, "velocity").tolist() == [-1.0, -1.0, 2.0, 0.0]


def test_masking_stops_both_sums_where_something_was_sent():
    simulation = simulation_of(Always(density=0.25, momentum=0.5), 4, size=1)
    assert step(simulation, [(8.0, 4.0, 0.0, 1.0)]).tolist() == [8.0, 0.0, 0.0, 0.0]
    assert slot(simulation, 0, "momentum").tolist() == [0.0, 4.0, 0.0, 1.0]
    assert slot(simulation, 0, "velocity").tolist() == [0.0, 4.0, 0.0, 1.0]
    # u becomes (1, 2, 0, .5), v + u is (1, 6, 0, 1.5)
    assert step(simulation, [(1.0, 0.0, 0.0, 0.0)]).tolist() == [0.0, 6.0, 0.0, 0.0]
    assert slot(simulation, 0, "momentum").tolist() == [1.0, 0.0, 0.0, 0.5]
    assert slot(simulation, 0, "velocity").tolist() == [1.0, 0.0, 0.0, 1.5]


def test_with_everything_kept_masking_switches_momentum_off():
    simulation = simulation_of(Always(density=1.0, momentum=0.9), 50, size=2)
    for seed in range(3):
        grads = [normal(50, seed=seed), normal(50, seed=seed + 9)]
        torch.testing.assert_close(step(simulation, grads), (grads[0] + grads[1]) / 2)


# -------------------------------------------------------------------------------- sketched-sgd


def test_the_second_round_makes_values_exact_even_if_the_choice_is_poor():
    simulation = simulation_of("sketch:density=0.01,rows=1,columns=0.1,candidates=1", 20_000, 3)
    grads = [normal(20_000, seed=seed) for seed in range(3)]
    out, mean = step(simulation, grads), torch.stack(grads).mean(0)
    chosen = out.nonzero().squeeze(1)
    assert len(chosen) == 200
    torch.testing.assert_close(out[chosen], mean[chosen])
    largest = mean.abs().topk(200).indices
    assert torch.isin(largest, chosen).double().mean() < 0.5  # so the choice was poor indeed


def test_all_elements_as_candidates_give_the_true_top_k():
    simulation = simulation_of(Always(density=0.1, columns=0.1, candidates=10), 2000, size=3)
    grads = [normal(2000, seed=seed) for seed in range(3)]
    out, mean = step(simulation, grads), torch.stack(grads).mean(0)
    expected = torch.zeros(2000, dtype=torch.float64)
    top = mean.abs().topk(200).indices
    expected[top] = mean[top]
    torch.testing.assert_close(out, expected)


def test_more_candidates_and_columns_choose_better():
    def kept(options):
        simulation = simulation_of(f"sketch:density=0.01,{options}", 50_000, 1)
        return float(step(simulation, [normal(50_000) ** 3]).square().sum())

    assert kept("columns=2,candidates=1") < kept("columns=2,candidates=4")
    assert kept("columns=0.5,candidates=4") < kept("columns=8,candidates=4")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_velocities_are_conserved(momentum):
    """What was sent and what is left add up to all velocities, masked ones included."""
    simulation = simulation_of(f"sketch:density=0.02,rows=3,momentum={momentum}", 3000, 2)
    assert simulation.groups[0].compressor.capabilities.conserves is (momentum == 0.0)
    velocities, sent = torch.zeros(3000).double(), torch.zeros(3000).double()
    for seed in range(4):
        grads = [normal(3000, seed=seed), normal(3000, seed=seed + 9)]
        before = [slot(simulation, rank, "momentum").clone() for rank in range(2)]
        for grad, u in zip(grads, before, strict=True):
            velocities += (momentum * u + grad) / 2
        sent += step(simulation, grads)
        left = (slot(simulation, 0, "velocity") + slot(simulation, 1, "velocity")) / 2
        torch.testing.assert_close(sent + left, velocities, rtol=1e-12, atol=1e-12)


def test_places_are_drawn_anew_in_each_step():
    tables = []

    def tap(rank, message):
        if message.tensors[0].dim() == 2:
            tables.append(message.tensors[0].clone())

    simulation = Simulation("sketch:density=0.01", {"w": torch.empty(100, 100)}, size=1, tap=tap)
    simulation.step([{"w": torch.ones(100, 100)}])
    simulation.groups[0].states[0]["velocity"].flat.zero_()
    simulation.groups[0].states[0]["momentum"].flat.zero_()
    simulation.step([{"w": torch.ones(100, 100)}])
    assert tables[0].shape == (5, 200)
    assert not torch.equal(tables[0], tables[1])


def test_the_seed_of_rank_0_counts_for_all():
    params = {"w": torch.empty(60, 50)}
    methods = [Sketch(density=0.02, seed=seed) for seed in (3, 4)]
    buckets = [bucket_of(params, torch.float32, rank=rank, size=2) for rank in range(2)]
    states = [method.init(bucket) for method, bucket in zip(methods, buckets, strict=True)]
    for rank, bucket in enumerate(buckets):
        bucket.flat.copy_(normal(3000, seed=rank))
    runs = [m.exchange(b, s) for m, b, s in zip(methods, buckets, states, strict=True)]
    seeds = [int(next(run).tensors[0]) for run in runs]
    assert seeds == [3, 4]
    tables = [run.send((torch.tensor([seeds[0]]),)).tensors[0] for run in runs]
    assert tables[0].shape == tables[1].shape == (5, 120)
    twin = Sketch(density=0.02, seed=3).exchange(buckets[1], states[1])
    next(twin)
    assert torch.equal(twin.send((torch.tensor([3]),)).tensors[0], tables[1])


def test_vectors_and_small_buckets_are_dense_with_ordinary_momentum():
    params = {"b": torch.empty(7), "w": torch.empty(10, 10)}
    simulation = Simulation("sketch:momentum=0.5", params, size=2)
    (group,) = simulation.groups
    u = {name: torch.zeros(p.shape) for name, p in params.items()}
    for seed in range(3):
        grads = [
            {n: normal(*p.shape, seed=seed + r).float() for n, p in params.items()} for r in (0, 9)
        ]
        means = simulation.step(grads).means[1]
        for name in params:
            u[name] = 0.5 * u[name] + (grads[0][name] + grads[1][name]) / 2
            torch.testing.assert_close(means[name], u[name])
        assert not group.states[0]["velocity"].flat.any()


def test_skipped_parameters_keep_both_sums():
    params = {"w": torch.empty(40, 40), "v": torch.empty(40, 40)}
    simulation = Simulation("sketch:density=0.02", params, size=1)
    grads = {name: normal(40, 40, seed=i).float() for i, name in enumerate(params)}
    simulation.step([grads])
    (state,) = simulation.groups[0].states
    before = {s: state[s]["v"].clone() for s in ("momentum", "velocity", "step")}
    assert simulation.step([{"w": grads["w"]}]).means[0]["v"] is None
    assert all(torch.equal(state[s]["v"], old) for s, old in before.items())
    assert [int(state["step"][name]) for name in "wv"] == [2, 1]


def test_the_same_mean_gradient_gives_the_same_training_for_any_number_of_ranks():
    simulations = [simulation_of("sketch:density=0.01", 20_000, size) for size in (1, 2, 8)]
    for seed in range(5):
        grads = [normal(20_000, seed=8 * seed + part) for part in range(8)]
        outs = []
        for simulation in simulations:
            chunks = torch.stack(grads).chunk(simulation.size)
            outs.append(step(simulation, [chunk.mean(0) for chunk in chunks]))
        for out in outs:
            assert out.count_nonzero() == 200
            torch.testing.assert_close(out, outs[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [4, 16])
def test_bytes_are_those_of_the_table_and_the_candidates(size):
    params = {"w": torch.empty(200, 100), "b": torch.empty(10)}
    simulation = Simulation("sketch:density=0.01,rows=5,columns=2,candidates=4", params, size=size)
    zeros = [{n: torch.zeros(p.shape) for n, p in params.items()}] * size
    simulation.step(zeros)
    assert simulation.step(zeros).bytes_sent == [4 * (5 * 400 + 800 + 10)] * size


def test_16_bit_parameters_have_sums_and_tables_in_fp32():
    params = {"w": torch.empty(60, 50, dtype=torch.bfloat16)}
    types = []
    for spec in ("sketch:density=0.02", "fetchsgd:density=0.02"):
        simulation = Simulation(
            spec, params, size=1, tap=lambda _, message: types.append(message.tensors[0].dtype)
        )
        simulation.step([{"w": torch.ones(60, 50, dtype=torch.bfloat16)}])
    assert set(types) == {torch.int64, torch.float32}


# ------------------------------------------------------------------------------------ fetchsgd


def tables(simulation, rank=0):
    state = simulation.groups[0].states[rank]
    return state["sketch_momentum"]["w"], state["sketch_error"]["w"]


def test_momentum_and_error_are_tables_of_the_mean():
    simulation = simulation_of("fetchsgd:density=0.01,momentum=0.5", 3000, 2)
    grads = [normal(3000, seed=0), normal(3000, seed=1)]
    out = step(simulation, grads)
    assert out.count_nonzero() == 30
    (group,) = simulation.groups
    sketch = group.compressor._sketches(group.buckets[0], 0)["w"]
    table, touched = sketch.encode((grads[0] + grads[1]) / 2), sketch.encode(out) != 0
    left = torch.where(touched, 0.0, table)
    for memory in tables(simulation):
        torch.testing.assert_close(memory, left)
    # next: momentum is half of that and the new table, the error what was left and this
    step(simulation, grads)
    sums = left + (0.5 * left + table)
    rest = tables(simulation)[1]
    torch.testing.assert_close(rest[rest != 0], sums[rest != 0])
    assert 0 < (rest == 0).double().mean() < 0.2


def test_what_is_not_applied_is_applied_later():
    simulation = simulation_of(AlwaysFetch(density=0.25, momentum=0.0), 4, size=1)
    seen = [step(simulation, [(8.0, 4.0, 2.0, 1.0)])]
    seen += [step(simulation, [torch.zeros(4)]) for _ in range(4)]
    assert torch.stack(seen).tolist() == [
        [8.0, 0.0, 0.0, 0.0],
        [0.0, 4.0, 0.0, 0.0],
        [0.0, 0.0, 2.0, 0.0],
        [0.0, 0.0, 0.0, 1.0],
        [0.0, 0.0, 0.0, 0.0],
    ]


def test_the_k_largest_are_chosen_over_all_parameters():
    params = {"w": torch.empty(100, 30), "v": torch.empty(100, 30)}
    simulation = Simulation("fetchsgd:density=0.01,width=0.19", params, size=1)
    grads = {name: torch.zeros(p.shape) for name, p in params.items()}
    grads["v"].view(-1)[::50] = 1.0
    means = simulation.step([grads]).means[0]
    assert means["v"].count_nonzero() == 60
    assert not means["w"].any()


def test_places_of_a_parameter_do_not_depend_on_its_bucket():
    w, other = torch.empty(60, 50), torch.empty(70, 40)
    method = FetchSGD()
    buckets = [
        bucket_of(params, torch.float32, rank=rank, size=2)
        for rank, params in enumerate(({"w": w}, {"other": other, "w": w}))
    ]
    first, second = (method._sketches(bucket, 5) for bucket in buckets)
    assert first["w"] == second["w"]
    assert second["w"] != second["other"]
    assert first["w"] != method._sketches(buckets[0], 6)["w"]


def test_vectors_have_ordinary_momentum_and_no_table():
    params = {"b": torch.empty(7), "w": torch.empty(60, 50)}
    simulation = Simulation("fetchsgd:momentum=0.5", params, size=2)
    ones = {name: torch.ones(p.shape) for name, p in params.items()}
    for expected in (1.0, 1.5, 1.75):
        assert torch.equal(simulation.step([ones, ones]).means[0]["b"], torch.full((7,), expected))
    (state, _) = simulation.groups[0].states
    assert state["sketch_momentum"]["b"].shape == (7,)
    assert state["sketch_momentum"]["w"].shape == (5, 300)
    assert list(state["sketch_error"]) == ["w"]


def test_training_does_not_diverge_where_estimates_are_mostly_noise():
    """Flat gradients, a small table: subtracting what was applied would grow without bounds."""
    simulation = simulation_of("fetchsgd:density=0.05,width=0.02,momentum=0", 5000, 1)
    w = torch.ones(5000).double()
    for _ in range(60):
        w = w - 0.05 * step(simulation, [w])
    assert w.norm() < 2 * 5000**0.5


# -------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sketch:rows=4", "sketch: rows must be an odd integer from 1 up, got 4"),
        ("sketch:rows=-1", "rows must be an odd"),
        ("sketch:columns=0", "sketch: columns must be finite and above 0, got 0.0"),
        ("sketch:columns=inf", "columns must be finite"),
        ("sketch:candidates=0", "sketch: candidates must be an integer from 1 up, got 0"),
        ("sketch:momentum=1", r"sketch: momentum must be in \[0, 1\), got 1.0"),
        ("sketch:density=0", r"sketch: density must be in \(0, 1\]"),
        ("fetchsgd:rows=2", "fetchsgd: rows must be an odd integer"),
        ("fetchsgd:width=0", r"fetchsgd: width must be in \(0, 1\], got 0.0"),
        ("fetchsgd:momentum=-0.1", r"fetchsgd: momentum must be in \[0, 1\)"),
    ],
)
def test_options_are_checked(spec, message):
    with pytest.raises(ValueError, match=message):
        parse(spec)


def test_momentum_is_the_methods_own():
    for name in ("sketch", "fetchsgd"):
        assert parse(name).capabilities.momentum
        assert not parse(f"{name}:momentum=0").capabilities.momentum
        chosen = assign(name, [("w", (100, 100), torch.float32), ("b", (100,), torch.float32)])
        assert set(chosen.values()) == {parse(name)}
