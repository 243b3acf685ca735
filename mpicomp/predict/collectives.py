"""How many messages, and how many bytes, lie one after another in a collective.

A collective over n ranks takes ``rounds * alpha + num_bytes * beta`` seconds: alpha for each
message on the longest way, beta for each byte on it. For all-reduce and broadcast ``num_bytes`` is
the length of the vector; for all-gather what each rank hands over; for all-to-all what each rank
hands over to all, itself included; for a message what it hands over to one.

References: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication
Operations in MPICH", IJHPCA 2005, sections 4.1 (all-gather), 4.2 (broadcast), 4.3 (all-to-all) and
4.5 (all-reduce), without the time for arithmetic, which is part of beta where beta is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias


class Work(NamedTuple):
    """Messages and bytes on the longest way through a collective."""

    rounds: float
    num_bytes: float

    def seconds(self, alpha: float, beta: float) -> float:
        return self.rounds * alpha + self.num_bytes * beta


Algorithm: TypeAlias = Callable[[int, float], Work]


def log2(n: int) -> int:
    """Rounds in which a pairing of n ranks reaches all."""
    return math.ceil(math.log2(n)) if n > 1 else 0


def ring_allreduce(n: int, num_bytes: float) -> Work:
    return Work(2 * (n - 1), 2 * (n - 1) / n * num_bytes)


def recursive_doubling_allreduce(n: int, num_bytes: float) -> Work:
    return Work(log2(n), log2(n) * num_bytes)


def halving_doubling_allreduce(n: int, num_bytes: float) -> Work:
    """Rabenseifner's: reduce-scatter by halving, all-gather by doubling."""
    return Work(2 * log2(n), 2 * (n - 1) / n * num_bytes)


def ring_allgather(n: int, num_bytes: float) -> Work:
    return Work(n - 1, (n - 1) * num_bytes)


def doubling_allgather(n: int, num_bytes: float) -> Work:
    return Work(log2(n), (n - 1) * num_bytes)


def tree_broadcast(n: int, num_bytes: float) -> Work:
    return Work(log2(n), log2(n) * num_bytes)


def scatter_broadcast(n: int, num_bytes: float) -> Work:
    """Van de Geijn's: a scatter by a tree, then an all-gather around a ring."""
    return Work(log2(n) + n - 1, 2 * (n - 1) / n * num_bytes)


def pairwise_alltoall(n: int, num_bytes: float) -> Work:
    return Work(n - 1, (n - 1) / n * num_bytes)


def direct_message(n: int, num_bytes: float) -> Work:
    """From each rank to one other."""
    return Work(1, num_bytes) if n > 1 else Work(0, 0)


ALGORITHMS: Mapping[str, Mapping[str, Algorithm]] = {
    "all-reduce": {
        "recursive doubling": recursive_doubling_allreduce,
        "halving and doubling": halving_doubling_allreduce,
        "ring": ring_allreduce,
    },
    "all-gather": {"doubling": doubling_allgather, "ring": ring_allgather},
    "broadcast": {"tree": tree_broadcast, "scatter": scatter_broadcast},
    "all-to-all": {"pairwise": pairwise_alltoall},
    "message": {"direct": direct_message},
}
"""By collective; an MPI takes the one that is fastest for the length at hand."""


def fastest(collective: str, n: int, num_bytes: float, alpha: float, beta: float) -> Work:
    """The work of the algorithm that is fastest with this ``alpha`` and ``beta``."""
    works = [algorithm(n, num_bytes) for algorithm in ALGORITHMS[collective].values()]
    return min(works, key=lambda work: work.seconds(alpha, beta))
