"""One example by hand that tells apart what methods mean by "the largest elements"."""

from __future__ import annotations

import pytest
import torch

from mpicomp.compress import bucket_of, parse, simulate, with_feedback

FIRST, SECOND = (4.0, -1.0, 0.5, 3.0), (-1.0, -1.0, 2.0, 0.25)

# what comes out, and what each rank keeps
EXPECTED = {
    "topk:density=0.25": ((2, 0, 1, 0), (0, -1, 0.5, 3), (-1, -1, 0, 0.25)),
    "topk:density=0.25,union=true": ((1.5, 0, 1.25, 0), (0, -1, 0, 3), (0, -1, 0, 0.25)),
    "cltk:density=0.25": ((1.5, 0, 0, 0), (0, -1, 0.5, 3), (0, -1, 2, 0.25)),
}


@pytest.mark.parametrize("spec", EXPECTED)
def test_one_element_of_four_from_two_ranks(spec):
    compressor = with_feedback(parse(spec))
    buckets = [bucket_of({"w": torch.empty(4)}, torch.float32, rank=r, size=2) for r in range(2)]
    states = [compressor.init(bucket) for bucket in buckets]
    for bucket, state, row in zip(buckets, states, (FIRST, SECOND), strict=True):
        compressor.load_(bucket, state, "w", torch.tensor(row))
    for outcome, bucket in zip(simulate(compressor, buckets, states), buckets, strict=True):
        outcome.commit(frozenset())
        outcome.mean.store_(bucket)
    mean, *kept = EXPECTED[spec]
    assert [bucket.flat.tolist() for bucket in buckets] == [list(mean)] * 2
    assert [state["residual"]["w"].tolist() for state in states] == [list(rest) for rest in kept]
