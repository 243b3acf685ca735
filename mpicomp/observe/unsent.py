"""What compression leaves unsent, measured beside an exchange."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from mpicomp.compress.base import Bucket, Compressor, Exchange, Exchanged, State
from mpicomp.compress.cast import Cast
from mpicomp.compress.dense import NoCompression
from mpicomp.compress.wrapper import Wrapper


def norm(tensors: Iterable[Tensor]) -> float:
    """The L2 norm of all elements of ``tensors`` together, in fp64."""
    return math.sqrt(math.fsum(_norm(tensor) ** 2 for tensor in tensors))


def _norm(tensor: Tensor) -> float:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return float(torch.linalg.vector_norm(real, dtype=torch.float64))


@dataclass(slots=True)
class Tally:
    """The sums of squares of one step, in unscaled units, added to bucket by bucket.

    Attributes:
        accumulated: of what the buckets held when they left.
        unsent: of what was left of it when the messages' contents were taken away.
    """

    accumulated: float = 0.0
    unsent: float = 0.0

    @property
    def relative_error(self) -> float:
        """The norm of what is unsent over that of what was accumulated; NaN if there was none."""
        return math.sqrt(self.unsent / self.accumulated) if self.accumulated else math.nan


@dataclass(frozen=True)
class Measured(Wrapper):
    """Does what ``inner`` does, and adds to ``tally`` what it leaves unsent.

    Args:
        inner: a compressor with all its wrappers.
        tally: of the step.
        unit: what to multiply the bucket's contents with to remove a loss scale.
    """

    inner: Compressor
    tally: Tally = field(compare=False)
    unit: float

    spec_options: ClassVar = {}

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        rest = bucket.like()
        rest.flat.copy_(bucket.flat)
        self.tally.accumulated += (self.unit * norm([rest.flat])) ** 2
        outcome = yield from self.inner.exchange(bucket, state)
        self._take_away_(rest, outcome)
        self.tally.unsent += (self.unit * norm([rest.flat])) ** 2
        return outcome

    def _take_away_(self, rest: Bucket, outcome: Exchanged) -> None:
        if isinstance(self.inner, NoCompression):  # what these say they sent is the mean
            rest.flat.zero_()
        elif isinstance(self.inner, Cast):
            rest.flat.sub_(rest.flat.to(self.inner.dtype))
        else:
            outcome.sent.subtract_(rest)
