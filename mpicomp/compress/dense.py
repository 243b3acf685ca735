"""No compression: the plain mean over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Bucket, Capabilities, Compressor, Dense, Exchange, Exchanged, Mean, State
from .registry import register


@register("none")
@dataclass(frozen=True)
class NoCompression(Compressor):
    """All elements, as they are: what DistributedDataParallel does."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        biased=False, stateful=False, linear=True, rounds=1
    )

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        (mean,) = yield Mean((bucket.flat,))
        return Exchanged(mean=Dense(mean), sent=Dense(mean))
