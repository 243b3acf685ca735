from __future__ import annotations

import math

import pytest
import torch

from mpicomp.compress import available, bucket_of, parse, simulate, with_feedback
from mpicomp.compress.residual import residuals
from mpicomp.observe.unsent import Measured, Tally, norm

SIZE = 3
LIKE = {"weight": torch.empty(30, 20), "bias": torch.empty(20), "other": torch.empty(7, 9)}


def exchanged(spec, *, unit=1.0, commit=True):
    """Tallies, norms of what was accumulated, outcomes, buckets and states of one exchange."""
    compressor = with_feedback(parse(spec))
    dtype = compressor.bucket_dtype(torch.float32)
    buckets = [bucket_of(LIKE, dtype, rank=rank, size=SIZE) for rank in range(SIZE)]
    states = [compressor.init(bucket) for bucket in buckets]
    for rank, bucket in enumerate(buckets):
        generator = torch.Generator().manual_seed(rank)
        for name in bucket:
            grad = torch.randn(bucket[name].shape, generator=generator)
            compressor.load_(bucket, states[rank], name, grad)
    before = [bucket.flat.clone() for bucket in buckets]
    tallies = [Tally() for _ in buckets]
    outcomes = []
    runs = [Measured(compressor, tally, unit) for tally in tallies]

    class Each(Measured):  # every rank has a tally of its own
        def exchange(self, bucket, state):
            return (yield from runs[bucket.rank].exchange(bucket, state))

    outcomes = simulate(Each(compressor, Tally(), unit), buckets, states)
    if commit:
        for outcome in outcomes:
            outcome.commit(frozenset())
    return tallies, before, outcomes, buckets, states


@pytest.mark.parametrize("name", available())
def test_it_is_what_was_accumulated_less_what_was_sent(name):
    tallies, before, outcomes, buckets, _ = exchanged(name, commit=False)
    for tally, flat, outcome, bucket in zip(tallies, before, outcomes, buckets, strict=True):
        assert math.sqrt(tally.accumulated) == pytest.approx(float(flat.norm()), rel=1e-5)
        if name == "none":
            assert tally.relative_error == 0
            continue
        if name in ("fp16", "bf16"):
            left = flat - flat.to(getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[name]))
        else:
            sent = bucket.like()
            outcome.sent.subtract_(sent)
            left = flat + sent.flat
        assert tally.relative_error == pytest.approx(
            float(left.norm() / flat.norm()), rel=1e-4, abs=1e-6
        )
        assert tally.relative_error < 1.6  # rounding at random, and means, may lie far off


@pytest.mark.parametrize(
    ("spec", "tolerance"),
    [
        ("topk:density=0.1", 1e-6),
        ("powersgd:rank=1", 1e-5),
        ("efsign", 1e-5),
        ("topk:density=0.1,residual=bf16", 0.01),
        ("topk:density=0.1,residual=int8", 0.02),
        ("dgc:density=0.1,momentum=0", 1e-5),
    ],
)
def test_the_residual_is_what_was_left_unsent(spec, tolerance):
    tallies, _, _, buckets, states = exchanged(spec)
    for tally, bucket, state in zip(tallies, buckets, states, strict=True):
        kept = norm(residuals(bucket, state))
        assert kept == pytest.approx(math.sqrt(tally.unsent), rel=tolerance)
        assert kept > 0


def test_nothing_is_remembered_without_feedback():
    _, _, _, buckets, states = exchanged("qsgd")
    assert list(residuals(buckets[0], states[0])) == []


def test_topk_keeps_the_largest():
    (tally, *_), (flat, *_), *_ = exchanged("topk:density=0.1")
    kept = flat.abs().sort(descending=True).values[: int(0.1 * flat.numel())]
    expected = math.sqrt(1 - float(kept.square().sum() / flat.square().sum()))
    assert tally.relative_error == pytest.approx(expected, rel=1e-4)


def test_a_loss_scale_is_taken_out():
    plain, scaled = exchanged("qsgd")[0][0], exchanged("qsgd", unit=0.25)[0][0]
    assert scaled.accumulated == pytest.approx(plain.accumulated / 16)
    assert scaled.relative_error == pytest.approx(plain.relative_error)


def test_without_a_gradient_there_is_no_error():
    assert math.isnan(Tally().relative_error)


def test_norms_are_of_all_elements_and_do_not_overflow():
    assert norm([]) == 0
    assert norm([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]) == 5
    assert norm([torch.full((4,), 60000.0, dtype=torch.float16)]) == pytest.approx(120000, rel=1e-3)
    assert norm([torch.full((1,), 1e38)] * 4) == pytest.approx(2e38)
    assert norm([torch.tensor([3.0 + 4.0j])]) == 5
