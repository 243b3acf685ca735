from __future__ import annotations

import pytest
import torch

from mpicomp.compress import (
    CLTK,
    Broadcast,
    Feedback,
    Mean,
    Simulation,
    bucket_of,
    simulate,
)


class Ranks:
    """Steps of bare vectors, past the rules, and what was sent in the last one."""

    def __init__(self, compressor, numel, size, dtype=torch.float64):
        self.compressor, self.messages = compressor, []
        params = {"w": torch.empty(numel)}
        self.buckets = [bucket_of(params, dtype, rank=rank, size=size) for rank in range(size)]
        self.states = [compressor.init(bucket) for bucket in self.buckets]

    def step(self, rows):
        """The mean; the same on all ranks, which the laws test."""
        for bucket, state, row in zip(self.buckets, self.states, rows, strict=True):
            grad = torch.as_tensor(row, dtype=bucket.flat.dtype)
            self.compressor.load_(bucket, state, "w", grad)
        self.messages = []

        def tap(rank, message):
            self.messages.append((type(message), [t.clone() for t in message.tensors]))

        outcomes = simulate(self.compressor, self.buckets, self.states, tap=tap)
        for outcome, bucket in zip(outcomes, self.buckets, strict=True):
            outcome.commit(frozenset())
            outcome.mean.store_(bucket)
        return self.buckets[0].flat.clone()

    def residuals(self):
        return [state["residual"].flat.tolist() for state in self.states]


ROWS = [[4, -1, 0.5, 3], [-1, -1, 2, 0.25]]


def test_worked_example():
    """Rank 0 chooses in the first step; other semantics of top-1 give other vectors."""
    ranks = Ranks(Feedback(CLTK(density=0.25)), 4, 2)
    assert ranks.step(ROWS).tolist() == [1.5, 0, 0, 0]
    assert ranks.residuals() == [[0, -1, 0.5, 3], [0, -1, 2, 0.25]]


def test_the_lead_goes_round():
    ranks = Ranks(Feedback(CLTK(density=0.25)), 4, 2)
    ranks.step(ROWS)
    # rank 1 leads now, and its largest accumulated element is the third: 2 + 2, mean with 0.5 + 0.5
    assert ranks.step(ROWS).tolist() == [0, 0, 2.5, 0]
    # then rank 0 again: 3 + 3 + 3, mean with three times 0.25
    assert ranks.step(ROWS).tolist() == [0, 0, 0, 4.875]


def test_one_broadcast_of_places_and_one_mean_of_values():
    ranks = Ranks(CLTK(density=0.1), 50, 3, torch.float32)
    ranks.step(torch.randn(3, 50, generator=torch.Generator().manual_seed(0)))
    assert [kind for kind, _ in ranks.messages] == [Broadcast] * 3 + [Mean] * 3
    assert all(t.dtype == torch.int32 and t.numel() == 5 for _, (t,) in ranks.messages[:3])
    assert all(t.dtype == torch.float32 and t.numel() == 5 for _, (t,) in ranks.messages[3:])


def test_commutes_with_averaging_for_the_places_of_the_leader():
    rows = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)).double()
    mean = Ranks(CLTK(density=0.1), 40, 3).step(rows)
    chosen = torch.topk(rows[0].abs(), 4).indices
    expected = torch.zeros(40).double()
    expected[chosen] = rows.mean(0)[chosen]
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 3])
def test_a_low_pass_only_weighs_the_residual(size):
    """E' = e + beta (g - sent), so what is missing of the sum of gradients is e / beta."""
    params = {"w": torch.empty(10, 10, dtype=torch.float64)}
    simulation = Simulation("cltk:density=0.05,low_pass=0.25", params, size=size)
    generator = torch.Generator().manual_seed(2)
    given, means = torch.zeros(10, 10).double(), torch.zeros(10, 10).double()
    for _ in range(7):
        grads = torch.randn(size, 10, 10, generator=generator, dtype=torch.float64)
        given += grads.mean(0)
        means += simulation.step([{"w": grad} for grad in grads]).means[0]["w"]
    states = simulation.groups[0].states
    residual = torch.stack([state["residual"]["w"] for state in states]).mean(0)
    torch.testing.assert_close(means + residual / 0.25, given, rtol=1e-12, atol=1e-12)


def test_fewer_ranks_than_before():
    """Ranks that have run out of data do not lead; the lead goes round among the others."""
    ranks = Ranks(Feedback(CLTK(density=0.25)), 4, 3)
    ranks.step([*ROWS, ROWS[0]])
    ranks.step([*ROWS, ROWS[0]])
    ranks.buckets, ranks.states = ranks.buckets[:2], ranks.states[:2]
    for bucket in ranks.buckets:
        bucket.size = 2
    assert ranks.step(ROWS).count_nonzero() == 1


def test_density_is_checked():
    with pytest.raises(ValueError, match=r"cltk: density must be in \(0, 1\], got 0"):
        CLTK(density=0)
