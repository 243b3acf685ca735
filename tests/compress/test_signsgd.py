from __future__ import annotations

import math

import pytest
import torch

from mpicomp.compress import AllToAll, GatherV, SignSGD, Simulation


def means(spec, rows, tap=None):
    grads = [{"w": torch.as_tensor(row)} for row in rows]
    results = Simulation(spec, grads[0], size=len(rows), tap=tap).step(grads).means
    for mean in results:
        torch.testing.assert_close(results[0]["w"], mean["w"], rtol=0, atol=0, equal_nan=True)
    return results[0]["w"]


def normal(seed):
    return torch.randn(6, 40, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_the_sign_of_the_sum_of_signs(size):
    """Ties of an even number of ranks come out as zero."""
    rows = [normal(rank) for rank in range(size)]
    votes = sum(row.sign() for row in rows).sign()
    assert torch.equal(means("signsgd:scale=one", rows), votes)
    assert torch.equal(means("signsgd", rows).sign(), votes)
    assert bool((votes == 0).any()) == (size % 2 == 0)


@pytest.mark.parametrize("size", [2, 3])
def test_the_mean_magnitude(size):
    """On two ranks of everything; above, of the chunk of each owner."""
    rows = [torch.full((2, 12), -2.0 - rank) for rank in range(size)]
    torch.testing.assert_close(means("signsgd", rows), sum(rows) / size)
    torch.testing.assert_close(means("signsgd:per=row", rows), sum(rows) / size)


def test_one_large_gradient_does_not_outvote_two():
    rows = [torch.full((4, 8), 1e30), torch.full((4, 8), -1.0), torch.full((4, 8), -1.0)]
    assert means("signsgd:scale=one", rows).tolist() == [[-1.0] * 8] * 4


@pytest.mark.parametrize("scale", ["one", "mean"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_zeros(scale, size):
    rows = [torch.zeros(4, 8) for _ in range(size)]
    assert not means(f"signsgd:scale={scale}", rows).any()
    for row in rows:
        row[1] = -1.0
    out = means(f"signsgd:scale={scale},per=row", rows)
    assert out[1].tolist() == [-1.0] * 8
    assert not out[[0, 2, 3]].any()


@pytest.mark.parametrize("size", [2, 3])
def test_a_row_of_zeros_abstains(size):
    rows = [torch.zeros(4, 8) for _ in range(size)]
    rows[-1].fill_(-1.0)
    assert means("signsgd:scale=one,per=row", rows).tolist() == [[-1.0] * 8] * 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scale", ["one", "mean"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_not_finite_shows(bad, scale, size):
    rows = [normal(rank) for rank in range(size)]
    rows[0][2, 3] = bad
    out = means(f"signsgd:per=row,scale={scale}", rows)
    assert not out[2, 3].isfinite()
    assert out[5].isfinite().all()


@pytest.mark.parametrize("size", [3, 4, 8])
def test_bytes_do_not_depend_on_the_number_of_ranks(size):
    """A bit per element there; two bits per element back, in all ranks together."""
    d = 64 * 96
    seen = []
    means("signsgd", [torch.ones(64, 96)] * size, tap=lambda rank, m: seen.append((rank, m)))
    for rank in range(size):
        there, back = (message for r, message in seen if r == rank)
        assert (type(there), type(back)) == (AllToAll, GatherV)
        assert there.num_bytes == d / 8 + 4 * size  # 32 times smaller than fp32
        assert back.num_bytes == d / 4 / size + 4


def test_scale_is_known():
    with pytest.raises(ValueError, match=r"signsgd: scale must be one of mean, one, got 'max'"):
        SignSGD(scale="max")
