"""Error feedback: what a step did not send is added to the gradient of the next one.

References: F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to
Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014; S. P. Karimireddy et al.,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019, algorithm 2,
with the learning rate left outside the memory.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Bucket, Capabilities, Compressor, Exchange, Exchanged, State


@dataclass(frozen=True)
class Feedback(Compressor):
    """A biased compressor with a memory of what it has not sent.

    The memory is the state's slot ``residual``, in unscaled units and fp32 (fp64 for fp64
    gradients): a changed loss scale does not touch it, and small remainders do not round away.

    Args:
        inner: the compressor to wrap.
    """

    inner: Compressor

    def __post_init__(self) -> None:
        if isinstance(self.inner, Feedback):
            raise ValueError(
                f"feedback: inner must be a compressor without feedback, got {self.inner!r}; "
                "use it as it is"
            )
        if self.inner.capabilities.own_feedback:
            raise ValueError(
                f"feedback: inner must be a compressor without a memory of its own, got "
                f"{self.inner!r}; use it as it is"
            )
        if not self.inner.capabilities.biased:
            raise ValueError(
                f"feedback: inner must be a biased compressor, got {self.inner!r}; use it as it "
                "is, feedback would only add variance to an unbiased method"
            )

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(self.inner.capabilities, stateful=True)

    def helps(self, shape: tuple[int, ...]) -> bool:
        return self.inner.helps(shape)

    def bucket_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(self.inner.bucket_dtype(dtype), torch.float32)

    def init(self, bucket: Bucket) -> State:
        dtype = bucket.flat.dtype
        if dtype != self.bucket_dtype(dtype):
            raise ValueError(
                f"feedback: bucket must be float32 or float64, got {dtype}; ask bucket_dtype()"
            )
        return {**self.inner.init(bucket), "residual": bucket.like()}

    def load_(
        self, bucket: Bucket, state: State, name: str, grad: Tensor | None, *, scale: float = 1.0
    ) -> None:
        residual = state["residual"][name]
        if grad is None:
            bucket[name].copy_(residual)
        else:
            torch.add(residual, grad, alpha=1.0 / scale, out=bucket[name])

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        outcome = yield from self.inner.exchange(bucket, state)
        residual = state["residual"]
        assert isinstance(residual, Bucket)

        def commit(skip: frozenset[str]) -> None:
            outcome.commit(skip)
            residual.flat.copy_(bucket.flat)
            outcome.sent.subtract_(residual)
            for name in skip & residual.keys():  # no gradient anywhere: what was loaded is old
                residual[name].copy_(bucket[name])

        return Exchanged(mean=outcome.mean, sent=outcome.sent, commit=commit)


def with_feedback(compressor: Compressor) -> Compressor:
    """Wrap a biased compressor whose option ``error_feedback`` is on; leave any other alone."""
    if isinstance(compressor, Feedback) or not compressor.capabilities.biased:
        return compressor
    return Feedback(compressor) if getattr(compressor, "error_feedback", False) else compressor
