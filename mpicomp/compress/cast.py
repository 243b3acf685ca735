"""Gradients as 16-bit floating-point numbers: half the bytes of fp32, no memory.

The driver adds up in fp32 and rounds the mean once. A value too large for the type becomes
infinite and is seen by the caller, as with mixed-precision training.

Reference: P. Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Bucket, Capabilities, Compressor, Dense, Exchange, Exchanged, Mean, State
from .registry import register


class Cast(Compressor):
    """Sends ``dtype`` in place of wider types; 16-bit gradients travel as they are."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        biased=False, stateful=False, linear=True, rounds=1
    )
    dtype: ClassVar[torch.dtype]

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        flat = bucket.flat
        narrow = flat.element_size() <= self.dtype.itemsize
        (mean,) = yield Mean((flat if narrow else flat.to(self.dtype),))
        return Exchanged(mean=Dense(mean), sent=Dense(mean))


@register("fp16")
@dataclass(frozen=True)
class Float16(Cast):
    """IEEE half precision: 11 significant bits, largest value 65504."""

    dtype: ClassVar[torch.dtype] = torch.float16


@register("bf16")
@dataclass(frozen=True)
class BFloat16(Cast):
    """bfloat16: 8 significant bits, the range of fp32."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16
