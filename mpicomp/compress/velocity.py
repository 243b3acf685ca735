"""Momentum before compression: each rank adds up velocities, not gradients, until they are sent.

The parts of a bucket that travel uncompressed get momentum too, so that one method serves a whole
model: there the mean of all ranks' velocities is the velocity of the mean, as in ordinary SGD.

References: Y. Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for
Distributed Training", ICLR 2018, section 3 (momentum correction and momentum factor masking);
N. Ivkin et al., "Communication-efficient Distributed SGD with Sketching", NeurIPS 2019, alg. 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Bucket, Decoded, Exchange, Exchanged, Mean, State, all_finite, wide
from .sparse import Sparse, Sparsifier

# ------------------------------------------------------------------------------------- methods


class MomentumSparsifier(Sparsifier):
    """A sparsifier that applies momentum before it chooses.

    It takes all parameters, as those that go dense need the momentum too.
    """

    def helps(self, shape: tuple[int, ...]) -> bool:
        return True

    def bucket_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return wide(dtype)

    def goes_dense(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape travels as it is: vectors, and what would not gain."""
        return len(shape) < 2 or not super().helps(shape)

    def parts(self, bucket: Bucket) -> tuple[Ranges, Ranges]:
        """The part of ``bucket`` that goes dense, and the rest; all dense where that is cheaper."""
        dense, rest = split(bucket, self.goes_dense)
        if self.dense_is_cheaper(rest.numel, bucket.flat.element_size(), size=bucket.size):
            return split(bucket, lambda shape: True)
        return dense, rest


# ---------------------------------------------------------------------------------- velocities


def init_velocity(bucket: Bucket) -> State:
    """Slots ``momentum`` (u) and ``velocity`` (v, the velocities not sent yet), both zero."""
    return {"momentum": bucket.like(), "velocity": bucket.like()}


def load_velocity_(
    bucket: Bucket,
    state: State,
    name: str,
    grad: Tensor | None,
    *,
    scale: float,
    momentum: float,
    nesterov: bool = False,
) -> None:
    """Put v + u into ``bucket[name]``, where u is now ``momentum`` u + ``grad / scale``.

    With ``nesterov`` it is v + ``momentum`` u + ``grad / scale``, with the new u. The gradient
    may lie in the bucket's own memory.
    """
    view, u, v = bucket[name], state["momentum"][name], state["velocity"][name]
    if grad is None:
        view.copy_(v)
    else:
        torch.add(v, grad, alpha=(1.0 + momentum * nesterov) / scale, out=view)
    view.add_(u, alpha=momentum**2 if nesterov else momentum)


def exchange_velocity(
    bucket: Bucket,
    state: State,
    dense: Ranges,
    compressed: Callable[[], Exchange],
    *,
    momentum: float,
    nesterov: bool = False,
) -> Exchange:
    """Average the ``dense`` part as it is, the rest by ``compressed``, and commit velocities.

    Args:
        bucket: as `load_velocity_` left it.
        dense: what ``compressed`` leaves out.
        compressed: starts the exchange of the rest; not called if there is none. What it says it
            has sent must be `Sparse`, with indices into the bucket outside ``dense``.
        momentum: as given to `load_velocity_`.
        nesterov: as given to `load_velocity_`.
    """
    nowhere = torch.empty(0, dtype=torch.int64, device=bucket.flat.device)
    nothing = Sparse(nowhere, bucket.flat[nowhere])
    rest = Exchanged(mean=nothing, sent=nothing)
    means: tuple[Tensor, ...] = ()
    if dense.numel:
        (flat,) = yield Mean((dense.take(bucket.flat),))
        means = flat.split([stop - start for start, stop in dense.bounds])
    if dense.numel < bucket.flat.numel():
        rest = yield from compressed()
    sent = PartlyDense(dense, dense.views(bucket.flat), rest.sent)

    def commit(skip: frozenset[str]) -> None:
        rest.commit(skip)
        commit_velocity(bucket, state, sent, skip, momentum=momentum, nesterov=nesterov)

    return Exchanged(mean=PartlyDense(dense, means, rest.mean), sent=sent, commit=commit)


def commit_velocity(
    bucket: Bucket,
    state: State,
    sent: Decoded,
    skip: frozenset[str],
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> None:
    """Keep both sums, take away from v what was ``sent``, and stop u there (masking).

    Dense parts leave u as it is. ``bucket`` holds what `load_velocity_` put there. Parameters in
    ``skip`` keep what they had.
    """
    u, v = state["momentum"], state["velocity"]
    assert isinstance(u, Bucket)
    assert isinstance(v, Bucket)
    before = {name: (u[name].clone(), v[name].clone()) for name in skip & v.keys()}
    if nesterov:  # bucket = v + (1 + momentum) * (new u) - momentum * (old u)
        u.flat.mul_(momentum).add_(bucket.flat).sub_(v.flat).div_(1.0 + momentum)
    else:
        torch.sub(bucket.flat, v.flat, out=u.flat)
    v.flat.copy_(bucket.flat)
    sent.subtract_(v)
    masked = sent.rest if isinstance(sent, PartlyDense) else sent
    assert isinstance(masked, Sparse)
    u.flat[masked.indices] = 0.0
    for name, (old_u, old_v) in before.items():
        u[name].copy_(old_u)
        v[name].copy_(old_v)


# ------------------------------------------------------------------------- parts of a bucket


@dataclass(frozen=True, slots=True)
class Ranges:
    """Some elements of a flat bucket, in order: from each start up to its stop."""

    bounds: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        return sum(stop - start for start, stop in self.bounds)

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        return tuple(flat[start:stop] for start, stop in self.bounds)

    def take(self, flat: Tensor) -> Tensor:
        """The elements one after another (numel,), in memory of their own."""
        return torch.cat(self.views(flat)) if self.bounds else flat.new_empty(0)

    def positions(self, indices: Tensor) -> Tensor:
        """Where the elements ``indices`` (k,) of what `take` gives lie in the bucket."""
        starts = torch.tensor([start for start, _ in self.bounds], dtype=torch.int64)
        ends = torch.tensor([stop - start for start, stop in self.bounds]).cumsum(0)
        shifts = starts - torch.cat([ends.new_zeros(1), ends[:-1]])
        which = torch.searchsorted(ends.to(indices.device), indices, right=True)
        return indices + shifts.to(indices.device)[which]


def split(bucket: Bucket, goes_dense: Callable[[tuple[int, ...]], bool]) -> tuple[Ranges, Ranges]:
    """The parts of ``bucket`` whose shapes go dense, and the rest; neighbours are joined."""
    parts: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for entry in bucket.entries:
        part, stop = parts[goes_dense(entry.shape)], entry.offset + entry.numel
        if part and part[-1][1] == entry.offset:
            part[-1] = (part[-1][0], stop)
        elif entry.numel:
            part.append((entry.offset, stop))
    return Ranges(tuple(parts[True])), Ranges(tuple(parts[False]))


@dataclass(frozen=True, slots=True)
class PartlyDense(Decoded):
    """``values``, one tensor for each of the ``dense`` ranges, and the ``rest`` elsewhere."""

    dense: Ranges
    values: tuple[Tensor, ...]
    rest: Decoded

    def store_(self, bucket: Bucket) -> None:
        self.rest.store_(bucket)
        for view, values in zip(self.dense.views(bucket.flat), self.values, strict=True):
            view.copy_(values)

    def subtract_(self, bucket: Bucket) -> None:
        self.rest.subtract_(bucket)
        for view, values in zip(self.dense.views(bucket.flat), self.values, strict=True):
            view.sub_(values)

    def is_finite(self) -> bool:
        return self.rest.is_finite() and all(all_finite(values) for values in self.values)
