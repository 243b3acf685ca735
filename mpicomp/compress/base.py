"""What a compressor is: buckets in, messages out, answers back, a mean and a commit at the end.

A compressor says *what* travels and never sends it. ``exchange`` is a generator that yields
messages and is sent the answers, so the same code runs over MPI, in a simulation of many ranks in
one process, and under the audit.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

# ------------------------------------------------------------------------------------- buckets


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one parameter lies in a bucket: ``strides`` and ``offset`` count elements."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Bucket(Mapping[str, Tensor]):
    """Gradients exchanged together: one flat tensor, and where each parameter lies in it.

    A mapping from parameter name to the view with that parameter's shape and strides. There is
    no padding: the entries tile ``flat`` without gaps.

    Args:
        flat: 1-d tensor.
        entries: one per parameter, in order of ``offset``.
        rank: whose gradients these are.
        size: how many ranks take part in the exchange.
    """

    def __init__(
        self, flat: Tensor, entries: tuple[Entry, ...], *, rank: int = 0, size: int = 1
    ) -> None:
        self.flat = flat
        self.entries = entries
        self.rank = rank
        self.size = size
        self._by_name = {entry.name: entry for entry in entries}
        self._views = {
            entry.name: flat.as_strided(
                entry.shape, entry.strides, flat.storage_offset() + entry.offset
            )
            for entry in entries
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def matrix(self, name: str) -> Tensor:
        """The parameter as a 2-d view (n, m), its dimensions taken in the order of memory.

        For a contiguous tensor this is first dimension x the rest; a transposed or channels-last
        tensor is seen through its own strides, so that rows and columns stay what they are.
        """
        entry = self._by_name[name]
        rows = entry.shape[outermost_dim(entry.shape, entry.strides)]
        return self.flat[entry.offset : entry.offset + entry.numel].view(rows, -1)

    def like(self, dtype: torch.dtype | None = None) -> Bucket:
        """A bucket of the same layout and device, filled with zeros."""
        flat = torch.zeros_like(self.flat, dtype=dtype)
        return Bucket(flat, self.entries, rank=self.rank, size=self.size)


def outermost_dim(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """The dimension that varies slowest in memory; the first of equals."""
    return max(range(len(shape)), key=lambda dim: (strides[dim], shape[dim], -dim))


# ------------------------------------------------------------------------------------ messages


@dataclass(frozen=True, slots=True)
class Message:
    """Tensors that one rank hands over in one round.

    The driver may overwrite them, and the answer may share their memory: a compressor must not
    read a tensor again once it has yielded it.
    """

    tensors: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)


class Mean(Message):
    """Answer: a tuple of tensors, each the element-wise mean over ranks."""


class Sum(Message):
    """Answer: a tuple of tensors, each the element-wise sum over ranks."""


class Max(Message):
    """Answer: a tuple of tensors, each the element-wise maximum over ranks."""


class Gather(Message):
    """Same shapes on every rank. Answer: for each rank in order, the tuple of its tensors."""


class GatherV(Message):
    """As `Gather`, but the first dimension may differ from rank to rank."""


@dataclass(frozen=True, slots=True)
class Broadcast(Message):
    """Answer: the tensors of rank ``root``; all ranks hand over tensors of the same shapes."""

    root: int = 0


class AllToAll(Message):
    """One 1-d tensor for each rank, lengths free. Answer: the tensor that each rank had for us."""


Answer: TypeAlias = Any  # tuple[Tensor, ...], or tuple[tuple[Tensor, ...], ...] for the gathers

# ------------------------------------------------------------------------------------- results


class Decoded(abc.ABC):
    """A gradient in the form it travelled in, which can be written out or taken away in place.

    Keeping the compact form until it is needed saves a dense copy of every bucket.
    """

    @abc.abstractmethod
    def store_(self, bucket: Bucket) -> None:
        """Write the gradient over the contents of ``bucket``."""

    @abc.abstractmethod
    def subtract_(self, bucket: Bucket) -> None:
        """Take the gradient away from the contents of ``bucket``."""

    @abc.abstractmethod
    def is_finite(self) -> bool:
        """Whether what travelled is free of NaN and infinity; the same on all ranks for a mean."""


@dataclass(frozen=True, slots=True)
class Dense(Decoded):
    """All elements of the bucket; ``values`` is 1-d and may be the bucket's own memory.

    They have the bucket's type: what is too large for it has to show before anything is committed.
    """

    values: Tensor

    def store_(self, bucket: Bucket) -> None:
        if self.values.data_ptr() != bucket.flat.data_ptr():
            bucket.flat.copy_(self.values)

    def subtract_(self, bucket: Bucket) -> None:
        bucket.flat.sub_(self.values)

    def is_finite(self) -> bool:
        return all_finite(self.values)


@dataclass(frozen=True, slots=True)
class Coded(Decoded):
    """A gradient as codes; ``decode`` makes the 1-d tensor of its values when asked."""

    decode: Callable[[], Tensor]

    def store_(self, bucket: Bucket) -> None:
        bucket.flat.copy_(self.decode())

    def subtract_(self, bucket: Bucket) -> None:
        bucket.flat.sub_(self.decode())

    def is_finite(self) -> bool:
        return all_finite(self.decode())


Commit: TypeAlias = Callable[[frozenset[str]], None]


def nothing_to_commit(skip: frozenset[str]) -> None:
    """The commit of a compressor without memory."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The outcome of one exchange.

    Attributes:
        mean: the mean gradient, equal bit for bit on all ranks.
        sent: what this rank's messages decode to; its mean over ranks is ``mean``.
        commit: makes the changes to the state, which ``exchange`` left as it was. Called before
            ``mean`` is stored, and only when all ranks agreed that the step is good. It leaves
            the memory of the parameters named in ``skip`` (used on no rank) alone, and may use the
            bucket as scratch memory.
    """

    mean: Decoded
    sent: Decoded
    commit: Commit = nothing_to_commit


State: TypeAlias = dict[str, MutableMapping[str, Tensor] | Bucket]  # slot -> parameter -> tensor

PRIVATE_SLOTS = frozenset({"residual", "residual_scale", "momentum", "velocity", "local_threshold"})
"""Slots of a state that belong to one rank; every other slot is equal on all ranks."""

Exchange: TypeAlias = Generator[Message, Answer, Exchanged]

# --------------------------------------------------------------------------------- compressors


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a compressor promises and needs; illegal combinations raise when they are built.

    Attributes:
        biased: the expectation of ``mean`` is not the mean gradient; wants error feedback.
        stateful: keeps memory between steps, so a bad step has to be agreed and undone.
        linear: the payload of a sum is the sum of payloads, so it can be all-reduced.
        rounds: messages per exchange, at most; None where the number of ranks decides.
        min_ndim: tensors of fewer dimensions go dense.
        mean_of_sent: the mean over ranks of ``sent`` is ``mean``.
        conserves: with error feedback nothing is lost: the sum of means and the mean residual add
            up to the sum of mean gradients.
        own_feedback: remembers what it has not sent itself; `Feedback` must not wrap it.
        momentum: applies momentum before compression; the optimizer must not apply its own.
        gathers_values: hands over the values it has chosen in a gather, beside their indices, and
            takes what it sent from the answer; they may be quantised on the way.
        chunks: on more than two ranks, each puts together the mean of its own chunk of the bucket.
    """

    biased: bool
    stateful: bool
    linear: bool
    rounds: int | None
    min_ndim: int = 0
    mean_of_sent: bool = True
    conserves: bool = True
    own_feedback: bool = False
    momentum: bool = False
    gathers_values: bool = False
    chunks: bool = False


class Compressor(abc.ABC):
    """One way to exchange a bucket of gradients; a frozen dataclass of hyper-parameters.

    All memory between steps is in the state, by parameter name. Which messages are yielded, and
    in which order, depends on shapes and step number only, never on values.
    """

    @property
    @abc.abstractmethod
    def capabilities(self) -> Capabilities:
        """What holds for this compressor; a class constant, or derived from what is wrapped."""

    def bucket_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The element type that the bucket must have for gradients of type ``dtype``."""
        return dtype

    def helps(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape gains by this method; if not, it goes dense."""
        return len(shape) >= self.capabilities.min_ndim

    def uncompressed(self) -> Compressor | None:
        """What a single rank does with its gradients: nothing, unless there is momentum."""
        return None

    def init(self, bucket: Bucket) -> State:
        """The memory to begin with; only the layout of ``bucket`` matters, not its values."""
        return {}

    def load_(
        self, bucket: Bucket, state: State, name: str, grad: Tensor | None, *, scale: float = 1.0
    ) -> None:
        """Put ``grad / scale`` into ``bucket[name]`` in one pass; None stands for zeros."""
        view = bucket[name]
        if grad is None:
            view.zero_()
        elif scale != 1.0:
            torch.mul(grad, 1.0 / scale, out=view)
        elif grad.data_ptr() != view.data_ptr():
            view.copy_(grad)

    @abc.abstractmethod
    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        """Yield messages, be sent their answers, return an `Exchanged`.

        ``bucket`` may be used as scratch memory, unless error feedback needs it: a compressor
        with ``capabilities.biased`` leaves it as it was.
        """


def all_finite(flat: Tensor) -> bool:
    """Whether no element is NaN or infinite; a sum is the cheapest pass that can tell."""
    if bool(torch.isfinite(flat.sum())):
        return True
    return bool(torch.isfinite(flat).all())  # a sum of large finite numbers overflows too


def wide(dtype: torch.dtype) -> torch.dtype:
    """What gradients of type ``dtype`` are added up and remembered in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)
