"""How error feedback holds its memory: exactly, or in fewer bits and right on average.

A store keeps one number for each element of a bucket, by parameter name, in slots that begin with
``residual``. Narrow stores round up or down at random, with a chance that makes the expectation
exact: rounded to nearest, a remainder that is small beside what is there would be lost at every
step.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator

import torch
from torch import Tensor

from .base import Bucket, State
from .blocks import dequantize_blocks, quantize_blocks
from .draws import own_generator
from .scalars import count_step, step_of, steps

_BLOCK = 256  # elements that share a scale
_LIMIT = torch.finfo(torch.bfloat16).max
"""The largest residual in a narrow store: an infinite one would make every later step a bad one."""


class Store(abc.ABC):
    """One way to hold residuals in a state."""

    @abc.abstractmethod
    def init(self, bucket: Bucket) -> State:
        """The slots, all zero."""

    @abc.abstractmethod
    def read(self, bucket: Bucket, state: State, name: str) -> Tensor:
        """The residual of one parameter, in its shape; not to be changed."""

    @abc.abstractmethod
    def write_(self, bucket: Bucket, state: State, skip: frozenset[str]) -> None:
        """Keep the contents of ``bucket``, but for the parameters named in ``skip``.

        The bucket may be used as scratch memory.
        """

    def load_(
        self, bucket: Bucket, state: State, name: str, grad: Tensor | None, *, scale: float
    ) -> None:
        """Put the residual plus ``grad / scale`` into ``bucket[name]``."""
        residual = self.read(bucket, state, name)
        if grad is None:
            bucket[name].copy_(residual)
        else:
            torch.add(residual, grad, alpha=1.0 / scale, out=bucket[name])


class Exact(Store):
    """In the precision of the bucket; one pass over memory to load."""

    def init(self, bucket: Bucket) -> State:
        return {"residual": bucket.like()}

    def read(self, bucket: Bucket, state: State, name: str) -> Tensor:
        return state["residual"][name]

    def write_(self, bucket: Bucket, state: State, skip: frozenset[str]) -> None:
        residual = state["residual"]
        assert isinstance(residual, Bucket)
        if not skip & residual.keys():
            residual.flat.copy_(bucket.flat)
            return
        for name in residual.keys() - skip:
            residual[name].copy_(bucket[name])


class Half(Store):
    """In bfloat16: half the memory."""

    def init(self, bucket: Bucket) -> State:
        return {"residual": bucket.like(torch.bfloat16), "residual_step": steps(bucket)}

    def read(self, bucket: Bucket, state: State, name: str) -> Tensor:
        return state["residual"][name]

    def write_(self, bucket: Bucket, state: State, skip: frozenset[str]) -> None:
        bucket.flat.clamp_(-_LIMIT, _LIMIT)
        draw = own_generator(bucket, "residual", step_of(state, "residual_step"))
        for name in state["residual"].keys() - skip:
            state["residual"][name].copy_(rounded_to_bfloat16(bucket[name], draw))
        count_step(state, skip, "residual_step")


class Int8(Store):
    """In 8-bit codes with an fp32 scale for every 256 elements: a quarter of the memory."""

    def init(self, bucket: Bucket) -> State:
        device = bucket.flat.device
        codes, scales = {}, {}
        for entry in bucket.entries:
            zeros = torch.zeros(entry.numel, device=device)
            codes[entry.name], scales[entry.name] = quantize_blocks(zeros, bits=8, block=_BLOCK)
        return {"residual": codes, "residual_scale": scales, "residual_step": steps(bucket)}

    def read(self, bucket: Bucket, state: State, name: str) -> Tensor:
        view = bucket[name]
        flat = dequantize_blocks(
            state["residual"][name],
            state["residual_scale"][name],
            bits=8,
            block=_BLOCK,
            numel=view.numel(),
            dtype=view.dtype,
        )
        return flat.as_strided(view.shape, view.stride())

    def write_(self, bucket: Bucket, state: State, skip: frozenset[str]) -> None:
        bucket.flat.clamp_(-_LIMIT, _LIMIT)
        draw = own_generator(bucket, "residual", step_of(state, "residual_step"))
        for entry in bucket.entries:
            if entry.name in skip:
                continue
            flat = bucket.flat[entry.offset : entry.offset + entry.numel]
            codes, scales = quantize_blocks(flat, bits=8, block=_BLOCK, generator=draw)
            state["residual"][entry.name].copy_(codes)
            state["residual_scale"][entry.name].copy_(scales)
        count_step(state, skip, "residual_step")


STORES: dict[str, Store] = {"fp32": Exact(), "bf16": Half(), "int8": Int8()}


def residuals(bucket: Bucket, state: State) -> Iterator[Tensor]:
    """What ``state`` holds of gradients that were not sent yet, parameter by parameter."""
    if "residual" in state:
        store = STORES["int8" if "residual_scale" in state else "fp32"]
        yield from (store.read(bucket, state, name) for name in bucket)
    elif "velocity" in state:
        yield from state["velocity"].values()


def rounded_to_bfloat16(values: Tensor, draw: torch.Generator) -> Tensor:
    """Finite ``values`` rounded up or down at random, so that the expectation is exact."""
    bits = values.float().contiguous().view(torch.int32)
    noise = torch.empty_like(bits).random_(0, 1 << 16, generator=draw)
    return (bits + noise).bitwise_and_(-1 << 16).view(torch.float32).to(torch.bfloat16)
