"""Many parameters in few buckets: which goes where, and the memory for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpicomp.comm.communicator import Communicator
from mpicomp.comm.waiting import Task
from mpicomp.compress.base import Bucket, Compressor, Entry, State
from mpicomp.compress.dense import NoCompression

_ALIGN_BYTES = 64
_FIRST_BYTES = 1 << 20  # of the first bucket: the network has work soon after backward begins


@dataclass(frozen=True, slots=True)
class Plan:
    """A bucket before it has memory."""

    compressor: Compressor
    device: torch.device
    dtype: torch.dtype
    entries: tuple[Entry, ...]
    dense_bytes: int  # of these parameters' gradients as they are

    @property
    def numel(self) -> int:
        return sum(entry.numel for entry in self.entries)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


def plan(
    params: Sequence[tuple[str, Tensor]],
    compressors: Mapping[str, Compressor],
    bucket_bytes: float,
) -> list[Plan]:
    """Divide ``params`` among buckets of about ``bucket_bytes``; the first is at most about 1 MB.

    Parameters of one bucket share compressor, device and element type, and lie in the order given,
    which should be that in which gradients arrive. The buckets are in the order in which they will
    be complete.
    """
    open_buckets: dict[tuple[Compressor, torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
    done: list[tuple[int, Plan]] = []
    last: dict[tuple[Compressor, torch.device, torch.dtype], int] = {}
    for position, (name, param) in enumerate(params):
        compressor = compressors[name]
        key = (compressor, param.device, compressor.bucket_dtype(param.dtype))
        members = open_buckets.setdefault(key, [])
        members.append((name, param))
        last[key] = position
        full = bucket_bytes if done else min(bucket_bytes, _FIRST_BYTES)
        if sum(p.numel() for _, p in members) * key[2].itemsize >= full:
            done.append((position, _close(key, open_buckets.pop(key))))
    done += [(last[key], _close(key, members)) for key, members in open_buckets.items()]
    return [bucket for _, bucket in sorted(done, key=lambda item: item[0])]


def _close(
    key: tuple[Compressor, torch.device, torch.dtype], members: list[tuple[str, Tensor]]
) -> Plan:
    entries, offset = [], 0
    for name, param in members:
        entries.append(Entry(name, tuple(param.shape), memory_strides(param), offset))
        offset += param.numel()
    dense_bytes = sum(p.numel() * p.element_size() for _, p in members)
    return Plan(*key, tuple(entries), dense_bytes)


def memory_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of ``tensor`` if it fills its memory without gaps; else contiguous ones.

    A channels-last or transposed parameter keeps its order of dimensions in the bucket, so that
    its gradient, which autograd lays out like the parameter, is copied straight through.
    """
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= length
    return tensor.stride()


def _shares(bucket: Plan) -> bool:
    return bucket.device.type == "cpu" and isinstance(bucket.compressor, NoCompression)


def _offsets(plans: Sequence[Plan]) -> Iterator[int]:
    """Where the buckets that are shared begin in their block, and last its size; in bytes."""
    sizes = (-(-p.num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES for p in plans if _shares(p))
    return itertools.accumulate(sizes, initial=0)


class Buckets:
    """The buckets of one optimizer, their memory, and what their compressors remember.

    Gradients that travel as they are lie in shared memory, to be reduced in place.
    """

    def __init__(self, plans: Sequence[Plan], communicator: Communicator, block: Tensor) -> None:
        self.plans = list(plans)
        self._communicator, self._block = communicator, block
        offsets = _offsets(plans)
        self.buckets: list[Bucket] = []
        for p in plans:
            if _shares(p):
                start = next(offsets)
                flat = self._block[start : start + p.num_bytes].view(p.dtype)
            else:
                flat = torch.empty(p.numel, dtype=p.dtype, device=p.device)
            self.buckets.append(
                Bucket(flat, p.entries, rank=communicator.rank, size=communicator.size)
            )
        self.reset()

    @classmethod
    def make(cls, plans: Sequence[Plan], communicator: Communicator) -> Task[Buckets]:
        """All ranks make the same buckets at the same time."""
        *_, total = _offsets(plans)
        block = yield from communicator.allocate(total)
        return cls(plans, communicator, block)

    def release(self) -> None:
        """Give up the memory; gradients that still lie in it keep their part alive."""
        self._communicator.release(self._block)

    def reset(self) -> None:
        """Let the compressors begin anew."""
        pairs = zip(self.plans, self.buckets, strict=True)
        self.states: list[State] = [plan.compressor.init(bucket) for plan, bucket in pairs]

    def memory(self) -> dict[str, dict[str, Tensor]]:
        """What the compressors remember: slot, then parameter name, then tensor (not a copy)."""
        slots: dict[str, dict[str, Tensor]] = {}
        for state in self.states:
            for slot, tensors in state.items():
                slots.setdefault(slot, {}).update(tensors)
        return slots

    def restore(self, memory: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over what another set of buckets remembered, by parameter name and shape."""
        for state in self.states:
            for slot, tensors in state.items():
                for name in tensors:
                    old = memory.get(slot, {}).get(name)
                    if old is not None and old.shape == tensors[name].shape:
                        tensors[name].copy_(old)
