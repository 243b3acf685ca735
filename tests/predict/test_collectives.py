"""Costs worked by hand, and what must hold for any number of ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomp.predict.collectives import ALGORITHMS, Work, fastest


@pytest.mark.parametrize(
    ("collective", "algorithm", "ranks", "expected"),
    [
        ("all-reduce", "ring", 4, Work(6, 1200)),  # 2 (n - 1) messages of a quarter
        ("all-reduce", "recursive doubling", 4, Work(2, 1600)),
        ("all-reduce", "recursive doubling", 5, Work(3, 2400)),
        ("all-reduce", "halving and doubling", 4, Work(4, 1200)),
        ("all-gather", "ring", 4, Work(3, 2400)),
        ("all-gather", "doubling", 8, Work(3, 5600)),
        ("broadcast", "tree", 8, Work(3, 2400)),
        ("broadcast", "scatter", 4, Work(5, 1200)),
        ("all-to-all", "pairwise", 4, Work(3, 600)),
        ("message", "direct", 4, Work(1, 800)),
    ],
)
def test_by_hand(collective, algorithm, ranks, expected):
    assert ALGORITHMS[collective][algorithm](ranks, 800) == expected


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_one_rank_costs_nothing(collective):
    for algorithm in ALGORITHMS[collective].values():
        assert algorithm(1, 1000) == (0, 0)


def test_short_vectors_go_by_doubling_and_long_ones_by_pieces():
    short = fastest("all-reduce", 16, 8, alpha=1e-5, beta=1e-9)
    long = fastest("all-reduce", 16, 1e8, alpha=1e-5, beta=1e-9)
    assert short == (4, 32)
    assert long == (8, 2 * 15 / 16 * 1e8)


@given(
    collective=st.sampled_from(sorted(ALGORITHMS)),
    ranks=st.integers(1, 4096),
    num_bytes=st.floats(0, 1e9),
    alpha=st.floats(0, 1e-2),
    beta=st.floats(0, 1e-6),
)
def test_the_fastest_is_no_slower_than_any(collective, ranks, num_bytes, alpha, beta):
    chosen = fastest(collective, ranks, num_bytes, alpha, beta).seconds(alpha, beta)
    for algorithm in ALGORITHMS[collective].values():
        assert chosen <= algorithm(ranks, num_bytes).seconds(alpha, beta)
