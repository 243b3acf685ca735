"""Error feedback: what a step did not send is added to the gradient of the next one.

References: F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to
Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014; S. P. Karimireddy et al.,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019, algorithm 2,
with the learning rate left outside the memory. The low-pass filter is that of C.-Y. Chen et al.,
"ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed
Training", NeurIPS 2020, equation 5.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Bucket, Capabilities, Compressor, Exchange, Exchanged, State, wide
from .residual import STORES
from .wrapper import Wrapper, innermost


@dataclass(frozen=True)
class Feedback(Wrapper):
    """A biased compressor with a memory of what it has not sent.

    The memory is the state's slot ``residual``, in unscaled units: a changed loss scale does not
    touch it. With a accumulated and s sent, the residual e becomes
    ``decay`` (e + ``low_pass`` (a - s - e)), which is a - s unless the options say otherwise.

    Args:
        inner: the compressor to wrap.
        decay: what the residual is multiplied with at each step, in [0, 1].
        low_pass: the share of the new in the residual, in (0, 1].
        residual: how the memory is held: ``"fp32"`` (fp64 for fp64 gradients, so that small
            remainders do not round away), or ``"bf16"`` and ``"int8"``, rounded at random so that
            they are right on average.
    """

    inner: Compressor
    decay: float = 1.0
    low_pass: float = 1.0
    residual: str = "fp32"

    spec_options: ClassVar = {"decay": "decay", "low_pass": "low_pass", "residual": "residual"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.inner, Feedback):
            raise ValueError(
                f"feedback: inner must be a compressor without feedback, got {self.inner!r}; "
                "use it as it is"
            )
        if self.inner.capabilities.own_feedback:
            raise ValueError(
                "feedback: inner must be a compressor without a memory of its own, got "
                f"{self.inner!r}; use it as it is, without decay, low_pass and residual"
            )
        if not self.inner.capabilities.biased:
            raise ValueError(
                f"feedback: inner must be a biased compressor, got {self.inner!r}; use it as it "
                "is, without decay, low_pass and residual: feedback would only add variance to an "
                "unbiased method"
            )
        if not getattr(innermost(self.inner), "error_feedback", True):
            raise ValueError(
                f"feedback: decay, low_pass and residual need error_feedback, got {self.inner!r}"
            )
        if not 0.0 <= self.decay <= 1.0:
            raise ValueError(f"feedback: decay must be in [0, 1], got {self.decay!r}")
        if not 0.0 < self.low_pass <= 1.0:
            raise ValueError(f"feedback: low_pass must be in (0, 1], got {self.low_pass!r}")
        if self.residual not in STORES:
            names = ", ".join(STORES)
            raise ValueError(f"feedback: residual must be one of {names}, got {self.residual!r}")

    @property
    def capabilities(self) -> Capabilities:
        inner = self.inner.capabilities
        exact = self.decay == self.low_pass == 1.0 and self.residual == "fp32"
        return dataclasses.replace(inner, stateful=True, conserves=inner.conserves and exact)

    def bucket_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return wide(self.inner.bucket_dtype(dtype))

    def init(self, bucket: Bucket) -> State:
        dtype = bucket.flat.dtype
        if dtype != self.bucket_dtype(dtype):
            raise ValueError(
                f"feedback: bucket must be float32 or float64, got {dtype}; ask bucket_dtype()"
            )
        return {**self.inner.init(bucket), **STORES[self.residual].init(bucket)}

    def load_(
        self, bucket: Bucket, state: State, name: str, grad: Tensor | None, *, scale: float = 1.0
    ) -> None:
        STORES[self.residual].load_(bucket, state, name, grad, scale=scale)

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        outcome = yield from self.inner.exchange(bucket, state)
        store = STORES[self.residual]

        def commit(skip: frozenset[str]) -> None:
            outcome.commit(skip)
            # the bucket is free now: the mean is stored next
            outcome.sent.subtract_(bucket)
            if self.low_pass != 1.0:
                for name, view in bucket.items():
                    old = store.read(bucket, state, name).to(view.dtype)
                    view.copy_(torch.lerp(old, view, self.low_pass))
            if self.decay != 1.0:
                bucket.flat.mul_(self.decay)
            store.write_(bucket, state, skip)

        return Exchanged(mean=outcome.mean, sent=outcome.sent, commit=commit)


def with_feedback(compressor: Compressor) -> Compressor:
    """Wrap a biased compressor whose option ``error_feedback`` is on; leave any other alone."""
    if isinstance(compressor, Feedback) or not compressor.capabilities.biased:
        return compressor
    wanted = getattr(innermost(compressor), "error_feedback", False)
    return Feedback(compressor) if wanted else compressor
