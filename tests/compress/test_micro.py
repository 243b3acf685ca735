"""MiCRO, and what ExDyna has in common with it, in whole steps."""

from __future__ import annotations

import math

import pytest
import torch

from mpicomp.compress import Gather, GatherV, Mean, Simulation, bucket_of, parse, simulate
from mpicomp.compress.threshold_control import even_bounds

METHODS = ["micro", "exdyna"]
SHAPE = (400, 100)
TARGET = 2000  # of 40 000, at a density of 0.05
SIZE = 4


class Run:
    """Steps of Gaussian gradients: what passed the threshold, and what each rank chose."""

    def __init__(self, spec, *, size=SIZE, profile=1.0, shape=SHAPE):
        self.size, self.profile, self.shape = size, profile, shape
        self.simulation = Simulation(spec, {"w": torch.empty(shape)}, size=size, tap=self._tap)
        self.generator = torch.Generator().manual_seed(0)
        self.passed, self.chosen = [], []

    def _tap(self, rank, message):
        if isinstance(message, Gather):
            if rank == 0:
                self.passed.append(0)
                self.chosen.append([])
            self.passed[-1] += int(message.tensors[0][0])
        elif isinstance(message, GatherV):
            self.chosen[-1].append(message.tensors[0].clone())

    def steps(self, number, scale=1.0):
        """How many elements were chosen in each of these steps."""
        for _ in range(number):
            draws = torch.randn(self.size, *self.shape, generator=self.generator)
            self.simulation.step([{"w": draw * self.profile * scale} for draw in draws])
        return [sum(map(len, step)) for step in self.chosen[-number:]]

    @property
    def threshold(self):
        return float(self.simulation.groups[0].states[0]["threshold"]["w"])


def off(counts, target=TARGET):
    return max(abs(count - target) for count in counts) / target


@pytest.mark.parametrize(
    ("numel", "start"), [(14_728_266, 0.0041200), (28_949_319, 0.0029387), (269_722, 0.0304855)]
)
def test_first_threshold_of_the_papers(numel, start):
    bucket = bucket_of({"w": torch.empty(numel, device="meta")}, torch.float32, rank=0, size=8)
    state = parse("micro:density=0.001,initial=paper").init(bucket)
    assert float(state["threshold"]["w"]) == pytest.approx(start, abs=5e-8)


@pytest.mark.parametrize("method", METHODS)
def test_lock_in_from_the_threshold_of_the_papers(method):
    spec = f"{method}:density=0.05,error_feedback=false,adapt=false,symmetric=false,initial=paper"
    run = Run(spec)
    start = run.threshold
    assert start == 1 / (2 * math.sqrt(TARGET))
    end = 1.959964 * 0.01  # where 5 % of N(0, 0.01^2) pass
    expected = math.log(end / start) / math.log(1.005)
    counts = run.steps(int(expected) + 30, scale=0.01)
    taken = next(i for i, passed in enumerate(run.passed) if passed <= 1.1 * TARGET)
    assert abs(taken - expected) <= 10
    assert max(counts) <= 2 * TARGET < run.passed[0]
    assert off(counts[taken:]) < 0.15


@pytest.mark.parametrize("feedback", ["true", "false"])
@pytest.mark.parametrize("method", METHODS)
def test_density_stays_within_a_tenth(method, feedback):
    """From the first step on, also while residuals grow."""
    counts = Run(f"{method}:density=0.05,error_feedback={feedback}").steps(60)
    assert off(counts) <= 0.1


@pytest.mark.parametrize("method", METHODS)
def test_in_the_long_run_the_threshold_alone_keeps_the_density(method):
    """What passes is within the tenth by itself, so nobody has to select exactly any more."""
    run = Run(f"{method}:density=0.05")
    run.steps(160)
    assert off(run.passed[130:]) <= 0.1


@pytest.mark.parametrize("jump", [10.0, 0.1])
@pytest.mark.parametrize("feedback", ["true", "false"])
@pytest.mark.parametrize("method", METHODS)
def test_a_jump_of_the_scale_is_absorbed(method, feedback, jump):
    run = Run(f"{method}:density=0.05,error_feedback={feedback}")
    run.steps(40)
    counts = run.steps(30, scale=jump)
    assert run.passed[40] > 5 * TARGET or run.passed[40] < 0.9 * TARGET
    assert max(counts) <= 2 * TARGET
    assert off(counts[20:]) <= 0.1
    assert off(counts) <= 0.1
    if feedback == "false":
        assert off(run.passed[40 + 5 :]) <= 0.25  # the threshold itself has followed


@pytest.mark.parametrize("jump", [10.0, 0.1])
@pytest.mark.parametrize("method", METHODS)
def test_the_rule_of_the_papers_alone_takes_long_but_never_sends_too_much(method, jump):
    run = Run(f"{method}:density=0.05,error_feedback=false,adapt=false")
    run.steps(5)
    counts = run.steps(20, scale=jump)
    assert max(counts) <= 2 * TARGET
    assert off(counts[-1:]) > 0.5


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_chosen_twice_and_all_of_it_is_averaged(method):
    run = Run(f"{method}:density=0.05", size=3)
    run.steps(5)
    for step in run.chosen:
        union = torch.cat(step)
        assert len(step) == 3
        assert len(union.unique()) == len(union)


def test_partitions_go_round():
    run = Run("micro:density=0.05", size=3)
    run.steps(6)
    bounds = torch.tensor(even_bounds(40_000, 3)[1:])
    visits = []
    for t, step in enumerate(run.chosen):
        parts = [torch.bucketize(own, bounds, right=True).unique().tolist() for own in step]
        assert parts == [[(t + rank) % 3] for rank in range(3)]
        visits.append([part for (part,) in parts])
    assert all(sorted(row) == [0, 0, 1, 1, 2, 2] for row in zip(*visits, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_all_of_the_gradient_in_one_partition(method):
    """As with embeddings: ranks whose partitions are empty make way for the one that has some."""
    profile = torch.zeros(SHAPE)
    profile[:90] = 1.0
    run = Run(f"{method}:density=0.05", profile=profile)
    counts = run.steps(20)
    assert max(counts) <= 1.1 * TARGET
    assert off(counts[5:]) <= 0.1


@pytest.mark.parametrize("method", METHODS)
def test_ties_do_not_send_everything(method):
    simulation = Run(f"{method}:density=0.05,error_feedback=false")
    for _ in range(6):
        simulation.simulation.step([{"w": torch.ones(SHAPE)}] * SIZE)
    assert max(sum(map(len, step)) for step in simulation.chosen) <= 1.1 * TARGET


@pytest.mark.parametrize("method", METHODS)
def test_zeros_spoil_nothing(method):
    """One dummy a rank travels meanwhile; the threshold is measured anew afterwards."""
    run = Run(f"{method}:density=0.05,error_feedback=false")
    run.steps(2)
    assert run.steps(30, scale=0.0) == [SIZE] * 30
    assert off(run.steps(3)) <= 0.1


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("method", METHODS)
def test_one_element_a_rank_at_least(method, size):
    counts = Run(f"{method}:density=1e-9", size=size, shape=(20, 10)).steps(10)
    assert max(counts) <= 2 * size
    assert min(counts) >= 1


@pytest.mark.parametrize("method", METHODS)
def test_fewer_ranks_than_before_and_all_again(method):
    compressor = parse(f"{method}:density=0.05")
    params = {"w": torch.empty(80, 50)}
    buckets = [bucket_of(params, torch.float32, rank=rank, size=3) for rank in range(3)]
    states = [compressor.init(bucket) for bucket in buckets]
    generator = torch.Generator().manual_seed(3)
    for size in (3, 3, 2, 1, 2, 3, 3):
        active = buckets[:size]
        for bucket in active:
            bucket.size = size
            bucket.flat.copy_(torch.randn(4000, generator=generator))
        outcomes = simulate(compressor, active, states[:size])
        for state in states:  # ranks without data follow what all share
            for slot, tensors in states[0].items():
                for name, tensor in tensors.items():
                    state[slot][name].copy_(tensor)
        for outcome in outcomes:
            outcome.commit(frozenset())
        assert 0.9 * 200 <= outcomes[0].mean.indices.numel() <= 1.1 * 200


@pytest.mark.parametrize("method", METHODS)
def test_everything_wanted_goes_dense(method):
    kinds = []
    simulation = Simulation(
        parse(f"{method}:density=0.7"),
        {"w": torch.empty(20, 20)},
        size=2,
        tap=lambda _, m: kinds.append(type(m)),
    )
    simulation.step([{"w": torch.ones(20, 20)}] * 2)
    assert kinds == [Mean, Mean]


@pytest.mark.parametrize("method", METHODS)
def test_options_are_checked(method):
    with pytest.raises(ValueError, match=f"{method}: initial must be quantile or paper, got 'x'"):
        parse(f"{method}:initial=x")
    with pytest.raises(ValueError, match=rf"{method}: density must be in \(0, 1\], got 2"):
        parse(f"{method}:density=2")
