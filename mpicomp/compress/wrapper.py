"""A compressor around a compressor: what all wrappers have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from .base import Bucket, Capabilities, Compressor, Exchange, State


class Wrapper(Compressor):
    """Does what ``inner`` does, but for what a subclass changes; a frozen dataclass.

    Attributes:
        spec_options: the name in spec strings of each of the subclass's own fields.
    """

    inner: Compressor
    spec_options: ClassVar[Mapping[str, str]]

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compressor):
            raise TypeError(
                f"{type(self).__name__}: inner must be a compressor, as TopK() is or parse(spec) "
                f"returns, got {self.inner!r}"
            )

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def helps(self, shape: tuple[int, ...]) -> bool:
        return self.inner.helps(shape)

    def bucket_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.inner.bucket_dtype(dtype)

    def uncompressed(self) -> Compressor | None:
        return self.inner.uncompressed()

    def init(self, bucket: Bucket) -> State:
        return self.inner.init(bucket)

    def load_(
        self, bucket: Bucket, state: State, name: str, grad: Tensor | None, *, scale: float = 1.0
    ) -> None:
        self.inner.load_(bucket, state, name, grad, scale=scale)

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        return (yield from self.inner.exchange(bucket, state))


def innermost(compressor: Compressor) -> Compressor:
    """The method inside all wrappers."""
    while isinstance(compressor, Wrapper):
        compressor = compressor.inner
    return compressor
