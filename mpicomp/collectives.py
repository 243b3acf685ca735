"""Collectives on tensors, for scripts: same names and arguments as in Horovod.

Every call is compared across ranks before any data moves: ranks that want different things all get
a `MismatchError` that says who wanted what. Calls are to come from one thread.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpicomp import world as _world
from mpicomp.errors import MismatchError

if TYPE_CHECKING:
    from mpicomp.comm.communicator import Communicator, Op


class ReduceOp(Enum):
    """How the tensors of all ranks are combined."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


Average, Sum, Min, Max, Product = ReduceOp


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """The combination of ``tensor`` over all ranks, as a new tensor; the mean by default.

    Args:
        tensor: of any layout and dtype; the same shape and dtype on all ranks. A sum of bool is
            *or*, a product *and*; a mean of integers is rounded towards zero.
        average: Horovod's older way to say ``op=Average`` (True) or ``op=Sum`` (False).
        name: distinguishes calls in error messages; compared across ranks.
        compression: accepted for Horovod scripts; only None.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`.
        prescale_factor: multiplies the tensor before.
        postscale_factor: multiplies the result.

    Raises:
        MismatchError: ranks called with different arguments; on every rank.
    """
    if compression is not None:
        raise ValueError("allreduce: compression must be None; compress in DistributedOptimizer")
    result = _dense(tensor).clone(memory_format=torch.contiguous_format)
    return _allreduce_("allreduce", result, average, name, op, prescale_factor, postscale_factor)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """As `allreduce`, in place; returns ``tensor``."""
    work = _dense(tensor)
    flat = work.resolve_conj().resolve_neg().contiguous()
    result = _allreduce_("allreduce", flat, average, name, op, prescale_factor, postscale_factor)
    if result.data_ptr() != work.data_ptr():
        work.copy_(result)
    return tensor


def _allreduce_(
    kind: str,
    tensor: Tensor,
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    prescale_factor: float,
    postscale_factor: float,
) -> Tensor:
    op = _which_op(kind, average, op, tensor)
    real = tensor.is_floating_point() or tensor.is_complex()
    if not real and (prescale_factor, postscale_factor) != (1.0, 1.0):
        raise ValueError(f"{kind}: scale factors must be 1 for {tensor.dtype}")
    scales = [
        f"{which} {factor}"
        for which, factor in (("prescale", prescale_factor), ("postscale", postscale_factor))
        if factor != 1.0
    ]
    comm = _agree(kind, name, tensor, f"op {op.name}", *scales)
    linear = op in (Average, Sum)
    if not linear and prescale_factor != 1.0:
        tensor.mul_(prescale_factor)
    scale = postscale_factor * (prescale_factor if linear else 1.0)
    if op is Average and real:
        scale /= comm.size
    total = tensor if real or op is not Average else tensor.long()  # the sum may need more bits
    task = comm.reduce_(total.view(-1), _mpi_op(op), scale if scale != 1.0 else None)
    _world.wait(task, _label(kind, name))
    if op is Average and not real:
        tensor.copy_(torch.div(total, comm.size, rounding_mode="trunc"))
    return tensor


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """The tensors of all ranks, one after another along the first dimension.

    Args:
        tensor: the first dimension may differ between ranks; a 0-d tensor counts as one element.
        name: as for `allreduce`.
    """
    if tensor.ndim == 0:
        tensor = tensor.view(1)
    comm = _agree("allgather", name, tensor, first_dim_free=True)
    packed = _bytes(tensor)
    row_bytes = tensor.shape[1:].numel() * tensor.element_size()
    label = _label("allgather", name)
    rows = _world.wait(comm.lengths(len(tensor)), label)
    parts = _world.wait(comm.gather(packed, [n * row_bytes for n in rows]), label)
    return _tensor(torch.cat(parts), tensor, (sum(rows), *tensor.shape[1:]))


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """The ``tensor`` of rank ``root_rank``, as a new tensor; same shape and dtype on all ranks."""
    return broadcast_(tensor.detach().clone(), root_rank, name)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """As `broadcast`, in place; returns ``tensor``."""
    comm = _agree("broadcast", name, tensor, f"root_rank {root_rank}")
    if not 0 <= root_rank < comm.size:
        raise ValueError(f"broadcast: root_rank must be in [0, {comm.size}), got {root_rank}")
    move_(tensor, root_rank, _label("broadcast", name))
    return tensor


def alltoall(
    tensor: Tensor, splits: Sequence[int] | Tensor | None = None, name: str | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Send a part of ``tensor`` to every rank and receive one from each.

    Args:
        tensor: cut along its first dimension.
        splits: rows for each rank; equal parts if left out.
        name: as for `allreduce`.

    Returns:
        What the ranks sent here, in rank order; with ``splits`` also the rows from each (size,).
    """
    if tensor.ndim == 0:
        raise ValueError("alltoall: tensor must have a first dimension, got a 0-d tensor")
    comm = _agree("alltoall", name, tensor, first_dim_free=True)
    rows = [int(n) for n in splits] if splits is not None else _equal_split(tensor, comm.size)
    if len(rows) != comm.size or sum(rows) != len(tensor) or min(rows) < 0:
        raise ValueError(
            f"alltoall: splits must be {comm.size} numbers that add up to {len(tensor)}, got {rows}"
        )
    row_bytes = tensor.shape[1:].numel() * tensor.element_size()
    label = _label("alltoall", name)
    counts = [torch.tensor([n]) for n in rows]
    received = [int(n) for n in _world.wait(comm.all_to_all(counts, [1] * comm.size), label)]
    parts = list(_bytes(tensor).split([n * row_bytes for n in rows]))
    incoming = _world.wait(comm.all_to_all(parts, [n * row_bytes for n in received]), label)
    result = _tensor(torch.cat(incoming), tensor, (sum(received), *tensor.shape[1:]))
    return result if splits is None else (result, torch.tensor(received))


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """The part of `allreduce` that belongs to this rank, along the first dimension.

    Rows are dealt out in rank order; the first ranks get one more if they do not divide evenly.
    The arguments are those of `allreduce`.
    """
    if tensor.ndim == 0:
        raise ValueError("reducescatter: tensor must have a first dimension, got a 0-d tensor")
    if compression is not None:
        raise ValueError("reducescatter: compression must be None; see DistributedOptimizer")
    whole = _dense(tensor).clone(memory_format=torch.contiguous_format)
    _allreduce_("reducescatter", whole, None, name, op, prescale_factor, postscale_factor)
    size, rank = _world.size(), _world.rank()
    base, rest = divmod(len(tensor), size)
    start = rank * base + min(rank, rest)
    return whole[start : start + base + (rank < rest)].clone()


def barrier() -> None:
    """Return when every rank has called this."""
    comm = _agree("barrier", None, torch.empty(0))
    _world.wait(comm.barrier(), "barrier")


# ------------------------------------------------------------------------------------- helpers


def _which_op(kind: str, average: bool | None, op: ReduceOp | None, tensor: Tensor) -> ReduceOp:
    if average is not None and op is not None:
        raise ValueError(f"{kind}: give op or average, not both")
    if op is None:
        op = Sum if average is False else Average
    if not isinstance(op, ReduceOp):
        raise ValueError(f"{kind}: op must be Average, Sum, Min, Max or Product, got {op!r}")
    if op is Average and tensor.dtype == torch.bool:
        raise ValueError(f"{kind}: a tensor of bool has no mean; use op=Sum (or) or Product (and)")
    return op


def _mpi_op(op: ReduceOp) -> Op:
    from mpicomp.comm.communicator import Op

    return Op.SUM if op is Average else Op[op.name]


def _agree(
    kind: str, name: str | None, tensor: Tensor, *details: str, first_dim_free: bool = False
) -> Communicator:
    """Compare this call with that of the other ranks; returns the communicator to use."""
    comm = _world.get().communicator
    if comm.size == 1:
        return comm
    shape = (*("*" if first_dim_free else tensor.shape[:1]), *tensor.shape[1:])
    told = "".join(f", {detail}" for detail in details)
    agree_on(_label(kind, name), f"{tensor.dtype} {shape}{told}")
    return comm


def agree_on(call: str, arguments: str) -> None:
    """Collective: `MismatchError` on every rank unless all are in ``call`` with ``arguments``."""
    comm = _world.get().communicator
    text = f"{call} of {arguments}"
    if not _world.wait(comm.same(zlib.crc32(text.encode())), call):
        raise MismatchError(_describe(comm.comm.allgather(text)))


def move_(tensor: Tensor, root_rank: int, what: str) -> None:
    """Overwrite ``tensor`` with that of rank ``root_rank``; ranks are known to agree."""
    packed = _bytes(tensor)
    _world.wait(_world.get().communicator.broadcast_(packed, root_rank), what)
    with torch.no_grad():
        tensor.copy_(_tensor(packed, tensor, tensor.shape))


def _describe(texts: Sequence[str]) -> str:
    """What the ranks wanted, one line for each different text, with the ranks that wanted it."""
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(str(rank))
    lines = [
        f"  {'rank' if len(who) == 1 else 'ranks'} {', '.join(who)}: {text}"
        for text, who in ranks.items()
    ]
    return "collectives: ranks must make the same call, got\n" + "\n".join(lines)


def _label(kind: str, name: str | None) -> str:
    return f"{kind} '{name}'" if name else kind


def _equal_split(tensor: Tensor, size: int) -> list[int]:
    if len(tensor) % size:
        raise ValueError(
            f"alltoall: without splits the first dimension must be a multiple of {size}, "
            f"got {len(tensor)}"
        )
    return [len(tensor) // size] * size


def _dense(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided:
        raise ValueError(f"collectives: tensor must be dense, got {tensor.layout}; use .to_dense()")
    return tensor.detach()


def _bytes(tensor: Tensor) -> Tensor:
    """The elements in order, as bytes in host memory, not shared with ``tensor``."""
    from mpicomp.comm.buffers import as_bytes

    dense = _dense(tensor).resolve_conj().resolve_neg().contiguous()
    return as_bytes(dense).to("cpu", copy=True)


def _tensor(packed: Tensor, like: Tensor, shape: Sequence[int]) -> Tensor:
    flat = packed.view(like.dtype) if len(packed) else packed.to(like.dtype)
    return flat.view(tuple(shape)).to(like.device)
