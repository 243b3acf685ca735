"""Ok-Topk: every rank adds up one region of the ranks' top-k, and only large sums come back.

Reference: S. Li and T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning",
PPoPP 2022, algorithms 1 and 2. Survivors are not evened out between ranks before the last round,
as in the authors' code: a gather of unequal lengths moves the same bytes.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import (
    AllToAll,
    Answer,
    Bucket,
    Capabilities,
    Exchange,
    Exchanged,
    GatherV,
    Message,
    State,
    Sum,
    wide,
)
from .registry import register
from .scalars import count_step, scalar, scalars, set_scalar, step_of, steps
from .select import above, above_at_most, largest
from .sparse import (
    Pairs,
    Sparse,
    Sparsifier,
    add_up,
    average_all,
    index_dtype,
    pack_pairs,
    unpack_pairs,
)

_EASE = 1.036  # what the global threshold is divided by when too little survives


@register("oktopk")
@dataclass(frozen=True)
class OkTopk(Sparsifier):
    """About the k = ``int(density * n)`` largest elements of the sum of all ranks' top-k.

    State: the slots ``local_threshold`` and ``global_threshold``; ``boundaries``, where the regions
    end, in elements of the bucket; and ``step``.

    Args:
        density: fraction of elements kept, in (0, 1].
        error_feedback: whether what was not sent is carried to the next step.
        reselect: steps from one exact choice of both thresholds to the next, at least 1.
        repartition: steps from one division into regions to the next, at least 1.
    """

    density: float = 0.01
    error_feedback: bool = True
    reselect: int = 32
    repartition: int = 64

    capabilities: ClassVar[Capabilities] = Capabilities(
        biased=True, stateful=True, linear=False, rounds=3, min_ndim=2
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("reselect", "repartition"):
            value = getattr(self, option)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"oktopk: {option} must be an integer from 1 up, got {value!r}")

    def init(self, bucket: Bucket) -> State:
        return {
            "local_threshold": scalars(bucket, 0.0),
            "global_threshold": scalars(bucket, 0.0),
            "boundaries": {n: torch.zeros(bucket.size, dtype=torch.int64) for n in bucket},
            "step": steps(bucket),
        }

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        flat, k = bucket.flat, self.num_kept(bucket.flat.numel())
        if self.dense_is_cheaper(flat.numel(), flat.element_size(), size=bucket.size):
            return (yield from average_all(bucket))
        exact = step_of(state) % self.reselect == 0
        chosen, local = choose(flat, k, None if exact else scalar(state, "local_threshold"))
        ends = yield from self._regions(bucket, state, chosen)
        values = flat[chosen].to(wide(flat.dtype))
        own = values, chosen.to(index_dtype(flat.numel()))
        sums = yield from _add_up_region(bucket, own, ends)
        survivors, threshold = yield from _gather_largest(
            sums, k, scalar(state, "global_threshold"), exact=exact
        )
        taken = torch.isin(own[1], survivors[1], assume_unique=True)

        def commit(skip: frozenset[str]) -> None:
            set_scalar(state, "local_threshold", local, skip)
            set_scalar(state, "global_threshold", threshold, skip)
            _set_boundaries(state, ends, skip)
            count_step(state, skip)

        return Exchanged(
            mean=Sparse(survivors[1], survivors[0] / bucket.size),
            sent=Sparse(own[1][taken], own[0][taken]),
            commit=commit,
        )

    def _regions(
        self, bucket: Bucket, state: State, chosen: Tensor
    ) -> Generator[Message, Answer, Tensor]:
        """Where each rank's region ends (size,), ascending, on the host."""
        if step_of(state) % self.repartition:
            return _boundaries(bucket, state)
        proposal = torch.zeros(bucket.size, dtype=torch.int64)
        if bool(bucket.flat[chosen].any()):  # zeros, as of ranks without data, do not count
            shares = torch.arange(1, bucket.size, device=chosen.device) * len(chosen)
            proposal[:-1] = chosen[shares // bucket.size]
            proposal[-1] = 1  # a vote
        (total,) = yield Sum((proposal,))
        votes = int(total[-1])
        if not votes:
            return equal_regions(bucket)
        ends: Tensor = total // votes
        ends[-1] = bucket.flat.numel()
        return ends

    def dense_is_cheaper(self, numel: int, element_bytes: int, *, size: int) -> bool:
        pair_bytes = max(element_bytes, 4) + index_dtype(numel).itemsize
        return 2 * self.num_kept(numel) * pair_bytes >= 2 * numel * element_bytes


# ----------------------------------------------------------------------------------- thresholds


def most(k: int) -> int:
    """How many elements a choice of about k may have."""
    return max(4 * k // 3, 1)


def choose(flat: Tensor, k: int, threshold: float | None) -> tuple[Tensor, float]:
    """Indices, ascending, of about k elements, and the threshold that they pass.

    What ``threshold`` lets pass, if that is between 2/3 k and 4/3 k; the k largest otherwise.
    """
    if threshold is not None:
        chosen = above(flat, threshold)
        if 2 * k <= 3 * len(chosen) and len(chosen) <= most(k):
            return chosen, threshold
    chosen = largest(flat, k).sort().values
    return chosen, float(flat[chosen].abs().min())


def next_threshold(survivors: Tensor, k: int, threshold: float, *, exact: bool) -> float:
    """The threshold for sums in the next step, after these magnitudes have come through."""
    if (exact or len(survivors) > most(k)) and len(survivors):
        return float(survivors.topk(min(k, len(survivors)), sorted=False).values.min())
    return threshold / _EASE if 3 * len(survivors) < 2 * k else threshold


def _gather_largest(
    sums: Pairs, k: int, threshold: float, *, exact: bool
) -> Generator[Message, Answer, tuple[Pairs, float]]:
    """What is large among all ranks' ``sums``, on every rank, and the threshold from now on.

    If ``exact``, the k largest and what equals the last of them: they are among the k largest of
    each region. If not, what passes the threshold.
    """
    parts = yield GatherV(
        _strongest(sums, 0.0, k) if exact else _strongest(sums, threshold, most(k))
    )
    values, indices = (torch.cat(column) for column in zip(*parts, strict=True))
    threshold = next_threshold(values.abs(), k, threshold, exact=exact)
    if exact:
        values, indices = _strongest((values, indices), threshold, len(values))
    return (values, indices), threshold


def _strongest(pairs: Pairs, threshold: float, limit: int) -> Pairs:
    """The pairs whose magnitude is ``threshold`` or more; the largest if more than ``limit``."""
    values, indices = pairs
    strong = above_at_most(values, threshold, limit)
    return values[strong], indices[strong]


# -------------------------------------------------------------------------------------- regions


def _add_up_region(bucket: Bucket, own: Pairs, ends: Tensor) -> Generator[Message, Answer, Pairs]:
    """Hand every pair to the rank whose region it lies in, and add up those of this rank's."""
    values, indices = own
    stops = torch.searchsorted(indices, ends.to(indices)).tolist()
    lengths = [stop - start for start, stop in zip([0, *stops], stops, strict=False)]
    outgoing = pack_pairs(values, indices).split(lengths)
    incoming = yield AllToAll(tuple(rows.view(-1) for rows in outgoing))
    dtypes = {"values": values.dtype, "indices": indices.dtype}
    return add_up([unpack_pairs(packed, **dtypes) for packed in incoming])


def equal_regions(bucket: Bucket) -> Tensor:
    return torch.arange(1, bucket.size + 1) * bucket.flat.numel() // bucket.size


def _boundaries(bucket: Bucket, state: State) -> Tensor:
    """Those of the parameter that has come furthest, if they are of a bucket like this one."""
    latest = max(bucket, key=lambda name: int(state["step"][name]))
    ends = state["boundaries"][latest]
    if len(ends) != bucket.size or int(ends[-1]) != bucket.flat.numel():
        return equal_regions(bucket)
    return ends.clone()


def _set_boundaries(state: State, ends: Tensor, skip: frozenset[str]) -> None:
    for name, tensor in state["boundaries"].items():
        if name not in skip and tensor.shape == ends.shape:  # else ranks have run out of data
            tensor.copy_(ends)
