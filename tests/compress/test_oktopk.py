from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress import (
    AllToAll,
    GatherV,
    Mean,
    OkTopk,
    Simulation,
    Sum,
    bucket_of,
    simulate,
    with_feedback,
)
from mpicomp.compress.oktopk import choose, equal_regions, most, next_threshold

SIZES = [1, 2, 3, 5]


def normal(size, shape, *, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [{"w": torch.randn(shape, generator=generator).to(dtype)} for _ in range(size)]


def run(compressor, steps, *, tap=None):
    """The simulation after ``steps``, one list of gradients each, and the means."""
    simulation = Simulation(compressor, steps[0][0], size=len(steps[0]), tap=tap)
    means = [simulation.step(grads).means[0]["w"] for grads in steps]
    return simulation, means


def states(simulation):
    return simulation.groups[0].states


def top(flat, k):
    out = torch.zeros_like(flat)
    indices = flat.abs().topk(k).indices
    out[indices] = flat[indices]
    return out


def test_worked_example():
    """Both send 4 and 2 to the owners of these places; only the 4 comes back."""
    grads = [
        {"w": torch.tensor([row], dtype=torch.float64)}
        for row in ([4, -1, 0.5, 3, *[0.0] * 6], [-1, -1, 2, 0.25, *[0.0] * 6])
    ]
    simulation, means = run("oktopk:density=0.1", [grads])
    assert means[0].tolist() == [[2, 0, 0, 0, *[0.0] * 6]]
    residuals = [state["residual"]["w"].tolist() for state in states(simulation)]
    assert residuals == [[[0, -1, 0.5, 3, *[0.0] * 6]], grads[1]["w"].tolist()]


@pytest.mark.parametrize("size", SIZES)
def test_the_first_step_is_the_largest_of_the_sum_of_local_choices(size):
    grads = normal(size, (20, 30), seed=size)
    _, (mean,) = run("oktopk:density=0.05", [grads])
    total = torch.stack([top(grad["w"].view(-1), 30) for grad in grads]).sum(0)
    torch.testing.assert_close(mean.view(-1), top(total, 30) / size, rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("size", SIZES)
def test_later_steps_apply_both_thresholds(size):
    """Without feedback, what is sent is what a threshold lets pass, and so is what comes back."""
    steps = [normal(size, (20, 30), seed=seed) for seed in range(6)]
    compressor = OkTopk(density=0.05, error_feedback=False)
    simulation = Simulation(compressor, steps[0][0], size=size)
    for step, grads in enumerate(steps):
        local = [float(s["local_threshold"]["w"]) for s in states(simulation)]
        limit = float(states(simulation)[0]["global_threshold"]["w"])
        mean = simulation.step(grads).means[0]["w"].view(-1)
        if step == 0:
            continue
        flats = [grad["w"].view(-1) for grad in grads]
        passed = [torch.where(f.abs() >= t, f, 0.0) for f, t in zip(flats, local, strict=True)]
        counts = [int(p.count_nonzero()) for p in passed]
        passed = [
            p if 20 <= count <= 40 else top(f, 30)
            for p, count, f in zip(passed, counts, flats, strict=True)
        ]
        total = torch.stack(passed).sum(0)
        expected = torch.where(total.abs() >= limit, total, 0.0) / size
        torch.testing.assert_close(mean, expected, rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("size", [2, 5])
def test_both_thresholds_are_exact_again_when_it_is_time(size):
    steps = [normal(size, (20, 30), seed=seed) for seed in range(7)]
    compressor = OkTopk(density=0.05, error_feedback=False, reselect=3)
    _, means = run(compressor, steps)
    for step in (0, 3, 6):
        total = torch.stack([top(grad["w"].view(-1), 30) for grad in steps[step]]).sum(0)
        torch.testing.assert_close(
            means[step].view(-1), top(total, 30) / size, rtol=1e-14, atol=0.0
        )


@pytest.mark.parametrize("size", SIZES)
def test_conservation_over_all_special_steps(size):
    steps = [normal(size, (20, 30), seed=seed) for seed in range(70)]
    simulation, means = run("oktopk:density=0.02", steps)
    residual = torch.stack([state["residual"]["w"] for state in states(simulation)]).mean(0)
    given_ = torch.stack([grad["w"] for grads in steps for grad in grads]).sum(0) / size
    torch.testing.assert_close(torch.stack(means).sum(0) + residual, given_, atol=1e-11, rtol=0)
    assert int(states(simulation)[0]["step"]["w"]) == 70


def test_feedback_keeps_what_was_sent_but_did_not_survive():
    """At a place of the result each rank keeps nothing of what it sent; elsewhere everything."""
    grads = normal(3, (20, 30))
    simulation, (mean,) = run("oktopk:density=0.05", [grads])
    for grad, state in zip(grads, states(simulation), strict=True):
        sent = (top(grad["w"].view(-1), 30) != 0).view(20, 30) & (mean != 0)
        assert torch.equal(state["residual"]["w"], torch.where(sent, 0.0, grad["w"]))


@pytest.mark.parametrize("size", SIZES)
def test_regions_cover_the_bucket_and_have_equal_shares(size):
    """All that is large lies at the end, so the first region is the longest."""
    grads = normal(size, (40, 50))
    for grad in grads:
        grad["w"][:30] *= 1e-3
    simulation, _ = run("oktopk:density=0.1", [grads])
    bounds = [state["boundaries"]["w"] for state in states(simulation)]
    assert all(torch.equal(bounds[0], other) for other in bounds)
    ends = bounds[0].tolist()
    assert len(ends) == size
    assert ends == sorted(ends)
    assert ends[-1] == 2000
    for start, stop in zip([1500, *ends], ends, strict=False):
        assert stop - start == pytest.approx(500 / size, rel=0.3)


def test_regions_are_divided_anew_when_it_is_time():
    grads = normal(2, (40, 50))
    other = [{"w": grad["w"].clone()} for grad in grads]
    for grad in other:
        grad["w"][:30] *= 1e-3
    compressor = OkTopk(density=0.1, error_feedback=False, repartition=3)
    simulation = Simulation(compressor, grads[0], size=2)
    ends = []
    for step in range(5):
        simulation.step(grads if step == 0 else other)
        ends.append(int(states(simulation)[0]["boundaries"]["w"][0]))
    assert ends[0] == ends[1] == ends[2]
    assert ends[0] == pytest.approx(1000, abs=200)
    assert ends[3] == ends[4]
    assert ends[3] == pytest.approx(1750, abs=100)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 7), st.integers(3, 60), st.floats(0.01, 0.4), st.integers(0, 2**32 - 1))
def test_any_number_of_ranks_and_elements(size, numel, density, seed):
    """Fewer elements chosen than ranks, values in clusters, ties, ranks with zeros only."""
    generator = torch.Generator().manual_seed(seed)
    params = {"w": torch.empty(1, numel, dtype=torch.float64)}
    compressor = OkTopk(density=density, reselect=2, repartition=3)
    simulation = Simulation(compressor, params, size=size)
    total = torch.zeros(1, numel, dtype=torch.float64)
    for _ in range(5):
        grads = [
            {"w": torch.randint(-2, 3, (1, numel), generator=generator).double()}
            for _ in range(size)
        ]
        grads[0]["w"].zero_()
        total += torch.stack([grad["w"] for grad in grads]).mean(0)
        total -= simulation.step(grads).means[0]["w"]
        ends = states(simulation)[0]["boundaries"]["w"].tolist()
        assert ends == sorted(ends)
        assert ends[-1] in (0, numel)  # 0: all went dense
    residual = torch.stack([state["residual"]["w"] for state in states(simulation)]).mean(0)
    torch.testing.assert_close(residual, total, atol=1e-12, rtol=0)


@pytest.mark.parametrize("size", [2, 4, 5])
def test_volume_is_at_most_six_k(size):
    """Elements sent and received by a rank in a usual step, with balanced regions: values and
    indices, for k sent to the owners, as many received, and k that come back.
    """
    numel, k = 8000, 80
    generator = torch.Generator().manual_seed(size)
    grads = []
    for rank in range(size):
        flat = 0.01 * torch.rand(numel, generator=generator)
        flat[rank::100] += 1.0  # k large ones, spread evenly, at other places on each rank
        grads.append({"w": flat.view(80, 100)})
    moved = [0.0] * size

    def tap(rank, message):
        for to in range(size):
            if to != rank and isinstance(message, AllToAll):
                moved[rank] += message.tensors[to].nbytes / 4
                moved[to] += message.tensors[to].nbytes / 4
            elif to != rank and isinstance(message, GatherV):
                moved[to] += message.num_bytes / 4

    simulation, _ = run(OkTopk(density=k / numel, error_feedback=False), [grads], tap=tap)
    bound = 6 * k * (size - 1) / size
    for _ in range(3):
        moved[:] = [0.0] * size
        simulation.step(grads)
        assert sum(moved) / size <= bound
        assert max(moved) <= 1.05 * bound  # survivors are not evened out
        assert min(moved) > 0.9 * bound  # and nothing was forgotten


def test_a_rank_never_sends_much_more_than_k():
    """Though both thresholds are far too low: what follows zeros, and what has grown."""
    sizes = []

    def tap(rank, message):
        if isinstance(message, AllToAll):
            sizes.append(message.num_bytes / 12)
        elif isinstance(message, GatherV):
            sizes.append(len(message.tensors[0]))

    zeros = [{"w": torch.zeros(20, 30, dtype=torch.float64)}] * 3
    grown = [[{"w": g["w"] * 10.0**s} for g in normal(3, (20, 30), seed=s)] for s in range(4)]
    simulation, means = run(OkTopk(0.05, error_feedback=False), [zeros, *grown], tap=tap)
    assert max(sizes) <= most(30)
    assert not means[0].any()
    assert all(int(mean.count_nonzero()) >= 20 for mean in means[1:])
    assert float(states(simulation)[0]["global_threshold"]["w"]) > 1.0


def test_density_is_held_on_stationary_input():
    steps = [normal(4, (40, 50), seed=seed, dtype=torch.float32) for seed in range(70)]
    _, means = run("oktopk:density=0.02", steps)
    counts = [int(mean.count_nonzero()) for mean in means[10:]]
    assert 40 * 0.75 <= sum(counts) / len(counts) <= 40 * 1.25


@pytest.mark.parametrize(
    ("reselect", "repartition", "votes"), [(1, 2, [0, 2, 4]), (4, 1, range(5)), (2, 64, [0])]
)
def test_messages_follow_the_step(reselect, repartition, votes):
    seen = []
    steps = [normal(2, (20, 30), seed=seed, dtype=torch.float32) for seed in range(5)]
    compressor = OkTopk(0.05, reselect=reselect, repartition=repartition)
    run(compressor, steps, tap=lambda r, m: seen.append(type(m)) if r == 0 else None)
    expected = []
    for step in range(5):
        expected += [*([Sum] if step in votes else []), AllToAll, GatherV]
    assert seen == expected


@pytest.mark.parametrize(("density", "kind"), [(0.49, Sum), (0.5, Mean)])
def test_dense_where_that_moves_fewer_bytes(density, kind):
    seen = []
    grads = normal(2, (10, 10), dtype=torch.float32)
    run(OkTopk(density), [grads], tap=lambda _, m: seen.append(type(m)))
    assert seen[0] is kind


def test_a_rank_without_data_takes_part():
    """It has zeros, calls itself rank 0, and nobody sends it anything."""
    params = {"w": torch.empty(20, 30)}
    bucket = bucket_of(params, torch.float32, rank=0, size=2)
    compressor = OkTopk(0.05)
    state = compressor.init(bucket)
    grads = normal(2, (20, 30), dtype=torch.float32)
    others = [bucket_of(params, torch.float32, rank=rank, size=2) for rank in range(2)]
    for other, grad in zip(others, grads, strict=True):
        other["w"].copy_(grad["w"])
    answers = []
    theirs = [compressor.init(other) for other in others]

    class Recorded(OkTopk):
        def exchange(self, bucket, state):
            inner, answer = super().exchange(bucket, state), None
            while True:
                try:
                    message = inner.send(answer)
                except StopIteration as stop:
                    return stop.value
                answer = yield message
                if bucket.rank == 0:
                    answers.append(answer)

    results = simulate(Recorded(0.05), others, theirs)
    exchange = compressor.exchange(bucket, state)
    (vote,) = exchange.send(None).tensors
    assert not vote.any()
    exchange.send(tuple(t.clone() for t in answers[0]))
    exchange.send(tuple(torch.empty(0, dtype=torch.uint8) for _ in answers[1]))
    with pytest.raises(StopIteration) as stop:
        exchange.send(answers[2])
    outcome = stop.value.value
    for one in (outcome, *results):
        one.commit(frozenset())
    outcome.mean.store_(bucket)
    results[0].mean.store_(others[0])
    assert torch.equal(bucket.flat, others[0].flat)
    for slot in ("global_threshold", "boundaries", "step"):
        assert torch.equal(state[slot]["w"], theirs[0][slot]["w"])


def test_a_parameter_that_comes_late_takes_over_what_the_bucket_knows():
    """Unused parameters keep their memory; the one that has come furthest speaks for all."""
    params = {"v": torch.empty(20, 30), "w": torch.empty(20, 30)}
    simulation = Simulation("oktopk:density=0.05", params, size=2)
    grads = [{**grad, "v": None} for grad in normal(2, (20, 30), dtype=torch.float32)]
    for _ in range(3):
        simulation.step(grads)
    state = states(simulation)[0]
    assert [int(state["step"][name]) for name in "vw"] == [0, 3]
    assert int(state["boundaries"]["v"][-1]) == 0
    simulation.step([{**grad, "v": grad["w"]} for grad in grads])
    assert [int(state["step"][name]) for name in "vw"] == [4, 4]
    assert torch.equal(state["boundaries"]["v"], state["boundaries"]["w"])


def test_boundaries_of_another_bucket_are_not_used():
    compressor = OkTopk(0.05, repartition=1000)
    for shape, size in (((20, 31), 2), ((20, 30), 3)):
        params = {"w": torch.empty(shape)}
        simulation = Simulation(compressor, params, size=size)
        for state in states(simulation):
            state["step"]["w"].fill_(5)
            old = torch.tensor([7, 600])  # two ranks, 20 x 30
            if size == 2:
                state["boundaries"]["w"].copy_(old)
            else:
                state["boundaries"]["w"] = old
        simulation.step(normal(size, shape, dtype=torch.float32))
        bucket = simulation.groups[0].buckets[0]
        if size == 2:
            kept = states(simulation)[0]["boundaries"]["w"]
            assert torch.equal(kept, equal_regions(bucket))


def test_choice():
    flat = torch.tensor([0.0, 3.0, -5.0, 1.0, 2.0, -4.0])
    assert [x if isinstance(x, float) else x.tolist() for x in choose(flat, 3, None)] == [
        [1, 2, 5], 3.0,
    ]  # fmt: skip
    for threshold, expected in ((3.5, [2, 5]), (1.5, [1, 2, 4, 5])):  # 2/3 k and 4/3 k will do
        chosen, kept = choose(flat, 3, threshold)
        assert (chosen.tolist(), kept) == (expected, threshold)
    for threshold in (4.5, 0.5, 0.0):
        chosen, kept = choose(flat, 3, threshold)
        assert (chosen.tolist(), kept) == ([1, 2, 5], 3.0)


def test_next_threshold():
    survivors = torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0])
    assert next_threshold(survivors, 3, 0.5, exact=False) == 3.0  # 5 are too many
    assert next_threshold(survivors[:4], 3, 0.5, exact=False) == 0.5
    assert next_threshold(survivors[:2], 3, 0.5, exact=False) == 0.5
    assert next_threshold(survivors[:1], 3, 0.5, exact=False) == 0.5 / 1.036
    assert next_threshold(survivors[:4], 3, 0.5, exact=True) == 2.0
    assert next_threshold(survivors[:0], 3, 0.5, exact=True) == 0.5 / 1.036


def test_low_precision_is_added_up_in_fp32():
    params = {"w": torch.empty(1, 11, dtype=torch.bfloat16)}
    grads = [{"w": torch.zeros(1, 11).bfloat16().index_fill(1, torch.tensor([0]), x)}
             for x in (256, 1, 1, 2)]  # fmt: skip
    simulation = Simulation("oktopk:density=0.1,error_feedback=false", params, size=4)
    assert simulation.step(grads).means[0]["w"][0, 0].item() == 65.0


def test_settings():
    assert with_feedback(OkTopk()) != OkTopk()
    with pytest.raises(ValueError, match="oktopk: reselect must be an integer from 1 up"):
        OkTopk(reselect=0)
    with pytest.raises(ValueError, match="oktopk: repartition must be an integer from 1 up"):
        OkTopk(repartition=-1)
    with pytest.raises(ValueError, match="oktopk: density must be in"):
        OkTopk(density=2.0)
