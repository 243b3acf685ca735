"""Compose a sparsifier with a quantiser: choose elements, then send their values in fewer bits.

Reference: D. Basu et al., "Qsparse-local-SGD: Distributed SGD with Quantization, Sparsification,
and Local Computations", NeurIPS 2019.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Answer, Bucket, Compressor, Exchange, Exchanged, Gather, GatherV, Message, State
from .blocks import dequantize_blocks, quantize_blocks
from .wrapper import Wrapper, innermost

_CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}
_BLOCK = 256  # values that share a scale


@dataclass(frozen=True)
class Values(Wrapper):
    """Does what ``inner`` does, but the values that it gathers travel as ``dtype``.

    What they lose by it stays in the residual, as ``inner`` takes what it sent from the answer.
    So does what is above the range of ``dtype``; without a residual that becomes infinite.

    Args:
        inner: a compressor that gathers pairs of values and indices.
        dtype: ``"fp16"``, ``"bf16"``, or ``"int8"`` with an fp32 scale for every 256 values.
    """

    inner: Compressor
    dtype: str

    spec_options: ClassVar = {"dtype": "values"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in (*_CASTS, "int8"):
            raise ValueError(f"values: dtype must be fp16, bf16 or int8, got {self.dtype!r}")
        if not self.inner.capabilities.gathers_values:
            raise ValueError(
                "values: inner must gather values and indices, as topk, threshold and dgc do, got "
                f"{self.inner!r}"
            )

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        run = self.inner.exchange(bucket, state)
        answer: Answer = None
        while True:
            try:
                message = run.send(answer)
            except StopIteration as stop:
                outcome: Exchanged = stop.value
                return outcome
            gathers = isinstance(message, Gather | GatherV)
            answer = yield from self._narrowed(message) if gathers else _as_is(message)

    def _narrowed(self, message: Message) -> Generator[Message, Answer, Answer]:
        """Send the floating-point tensors of a gather in the narrow type."""
        like = message.tensors
        coded = [self._encode(t) if t.is_floating_point() else (t,) for t in like]
        parts = yield type(message)(tuple(part for parts in coded for part in parts))
        lengths = [len(parts) for parts in coded]
        return tuple(self._decoded(part, like, lengths) for part in parts)

    def _decoded(
        self, tensors: tuple[Tensor, ...], like: tuple[Tensor, ...], lengths: list[int]
    ) -> tuple[Tensor, ...]:
        parts = iter(tensors)
        coded = [[next(parts) for _ in range(length)] for length in lengths]
        return tuple(
            self._decode(part, t.dtype) if t.is_floating_point() else part[0]
            for part, t in zip(coded, like, strict=True)
        )

    def _encode(self, values: Tensor) -> tuple[Tensor, ...]:
        if self.dtype in _CASTS:
            narrow = _CASTS[self.dtype]
            if getattr(innermost(self.inner), "error_feedback", True):
                values = _within(values, torch.finfo(narrow).max)
            return (values.to(narrow, copy=True),)
        return quantize_blocks(values, bits=8, block=_BLOCK)

    def _decode(self, coded: list[Tensor], dtype: torch.dtype) -> Tensor:
        if self.dtype in _CASTS:
            return coded[0].to(dtype)
        codes, scales = coded
        return dequantize_blocks(codes, scales, bits=8, block=_BLOCK, numel=len(codes), dtype=dtype)


def _within(values: Tensor, limit: float) -> Tensor:
    """Finite ``values`` cut down to ``limit``: infinite, they would make every step a bad one."""
    return torch.where(values.isfinite(), values.clamp(-limit, limit), values)


def _as_is(message: Message) -> Generator[Message, Answer, Answer]:
    return (yield message)
