"""The same start on all ranks: parameters, optimizer state and Python objects from one rank."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mpicomp import collectives
from mpicomp import world as _world

T = TypeVar("T")


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Tensor | None]] | Iterable[Tensor],
    root_rank: int = 0,
) -> None:
    """Overwrite tensors with those of rank ``root_rank``, in place.

    Args:
        params: a ``state_dict()``, ``named_parameters()``, ``named_buffers()`` or
            ``parameters()``; what is not a tensor is passed over.
        root_rank: whose values are taken.

    Raises:
        MismatchError: ranks have tensors of other names, shapes or dtypes; on every rank.
    """
    items = params.items() if isinstance(params, Mapping) else params
    named = [item if isinstance(item, tuple) else ("", item) for item in items]
    tensors = [(name, t.data) for name, t in named if isinstance(t, Tensor)]
    _check_root(root_rank)
    if _world.size() == 1:
        return
    text = "; ".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors)
    collectives.agree_on("broadcast_parameters", f"{text}, root_rank {root_rank}")
    for name, tensor in tensors:
        collectives.move_(tensor, root_rank, f"broadcast of {name or 'a parameter'}")


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: nn.Module | None = None
) -> None:
    """Give every rank the optimizer state of rank ``root_rank``.

    Args:
        optimizer: any torch optimizer, wrapped or not.
        root_rank: whose state is taken; it may be empty.
        model: accepted for Horovod scripts; not needed.

    Raises:
        MismatchError: ranks have other optimizers, or groups of other parameters; on every rank.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    _check_root(root_rank)
    if _world.size() == 1:
        return
    groups = [[tuple(p.shape) for p in group["params"]] for group in inner.param_groups]
    text = f"{type(inner).__name__} with groups {groups}, root_rank {root_rank}"
    collectives.agree_on("broadcast_optimizer_state", text)
    tensors: list[Tensor] = []

    def stub(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        return _Stub(len(tensors) - 1, tuple(value.shape), value.dtype, value.device.type)

    own = _map(inner.state_dict(), stub) if _world.rank() == root_rank else None
    state = broadcast_object(own, root_rank, "the optimizer's state")
    filled: dict[int, Tensor] = {}

    def receive(value: Any) -> Any:
        if not isinstance(value, _Stub):
            return value
        tensor = tensors[value.index] if _world.rank() == root_rank else value.empty()
        filled[value.index] = tensor
        collectives.move_(tensor, root_rank, "broadcast of the optimizer's state")
        return tensor

    state = _map(state, receive)
    if _world.rank() != root_rank:
        inner.load_state_dict(state)


def broadcast_object(obj: T, root_rank: int = 0, name: str | None = None) -> T:
    """``obj`` of rank ``root_rank``, pickled and unpickled on the others."""
    _check_root(root_rank)
    if _world.size() == 1:
        return obj
    is_root = _world.rank() == root_rank
    data = torch.frombuffer(bytearray(pickle.dumps(obj) if is_root else b"\0"), dtype=torch.uint8)
    length = collectives.broadcast(torch.tensor(len(data)), root_rank, name)
    data = data if is_root else torch.empty(int(length), dtype=torch.uint8)
    collectives.broadcast_(data, root_rank, name)
    return obj if is_root else pickle.loads(data.numpy().tobytes())


def allgather_object(obj: T, name: str | None = None) -> list[T]:
    """The objects of all ranks, in rank order."""
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    lengths = collectives.allgather(torch.tensor([len(data)]), name)
    parts = collectives.allgather(data, name).split([int(n) for n in lengths])
    return [pickle.loads(part.numpy().tobytes()) for part in parts]


def _check_root(root_rank: int) -> None:
    if not 0 <= root_rank < _world.size():
        raise ValueError(f"root_rank must be in [0, {_world.size()}), got {root_rank}")


class _Stub:
    """Stands for a tensor while the rest of the state travels."""

    def __init__(self, index: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        self.index, self._shape, self._dtype, self._device = index, shape, dtype, device

    def empty(self) -> Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)


def _map(tree: Any, function: Any) -> Any:
    """``tree`` of dicts, lists and tuples with ``function`` applied to its leaves."""
    if isinstance(tree, dict):
        return {key: _map(value, function) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map(value, function) for value in tree)
    return function(tree)
