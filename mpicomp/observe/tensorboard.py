"""Scalars of the gradient exchange for TensorBoard, or whatever else takes scalars."""

from __future__ import annotations

from typing import Protocol

from mpicomp import world as _world
from mpicomp.compress.base import Compressor
from mpicomp.compress.residual import residuals
from mpicomp.fusion import Buckets
from mpicomp.observe.unsent import Measured, Tally, norm
from mpicomp.optimizer import DistributedOptimizer
from mpicomp.step import Around


class Writer(Protocol):
    """What a `torch.utils.tensorboard.SummaryWriter` is to us."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Keep ``value`` under ``tag``."""


class TensorBoard:
    """Writes scalars of this rank's exchanges, each time that there were ``every`` of them.

    ``bytes_per_step``, ``ratio`` and ``hidden_fraction`` are those of `mpicomp.stats` since the
    last time, of all optimizers of the process; ``hidden_fraction`` is the part of encoding,
    communicating and decoding that went on behind the backward pass. The others are norms, over
    all of the optimizer's buckets, of the very step at which they are written:

    ``relative_error`` is ||a - s|| / ||a||. Here a is the accumulated gradient of this rank: its
    own gradient and the residual added to it (with momentum, its velocities), without a loss
    scale. s is what this rank's messages decode to: ``Exchanged.sent``, which is what error
    feedback takes away. PowerSGD (unless ``local_residual=true``) and FetchSGD take away the mean
    of all ranks; their error includes how far this rank is from the others. In a bad step it is
    NaN, or that of the buckets that travel as they are.

    ``residual_norm`` is ||e||, of what is remembered for the next step; with plain error feedback
    it is ||a - s||. It is not written if nothing is remembered.

    Sparse gradients, and those that came too late for their bucket, are in the bytes and not in
    the norms. With one rank nothing is exchanged, and nothing written.

    Args:
        opt: whose exchanges to look at, from now on. It can be looked at by one at a time.
        writer: has ``add_scalar(tag, value, step)``; None will do on ranks that do not write.
        every: how many exchanges lie between two times. Norms cost a copy and two passes over
            the gradients, at the steps that are written only.
        step: exchanges that went before, in training that goes on from a checkpoint.
        all_ranks: write on every rank, with writers of their own, and not on rank 0 only.
        prefix: of the tags, as in ``mpicomp/ratio``.

    Raises:
        TypeError: ``opt`` or ``writer`` is none.
        ValueError: ``every`` is below 1, or ``opt`` is looked at already.
    """

    def __init__(
        self,
        opt: DistributedOptimizer,
        writer: Writer | None,
        *,
        every: int = 10,
        step: int = 0,
        all_ranks: bool = False,
        prefix: str = "mpicomp",
    ) -> None:
        if not isinstance(opt, DistributedOptimizer):
            raise TypeError(f"TensorBoard: opt must be a DistributedOptimizer, got {opt!r}")
        if every < 1:
            raise ValueError(f"TensorBoard: every must be at least 1, got {every}")
        self._every, self._step, self._prefix = every, step, prefix
        self._before = _world.stats()
        self._tally = Tally()
        if _world.rank() > 0 and not all_ranks:
            return
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(
                "TensorBoard: writer must have add_scalar(tag, value, step), as "
                f"torch.utils.tensorboard.SummaryWriter() has, got {writer!r}"
            )
        assert writer is not None
        self._writer = writer
        opt.watch(self)

    def begins(self) -> Around | None:
        """See `mpicomp.step.Observer`."""
        self._step += 1
        if self._step % self._every:
            return None
        self._tally = Tally()
        return self._measured

    def ended(self, buckets: Buckets) -> None:
        """See `mpicomp.step.Observer`."""
        if self._step % self._every:
            return
        for name, value in self._scalars(buckets).items():
            self._writer.add_scalar(f"{self._prefix}/{name}", value, self._step)

    def _measured(self, compressor: Compressor, unit: float) -> Compressor:
        return Measured(compressor, self._tally, unit)

    def _scalars(self, buckets: Buckets) -> dict[str, float]:
        now = _world.stats()
        since, self._before = now - self._before, now
        scalars = {
            "bytes_per_step": since.bytes_sent / since.steps,
            "ratio": since.ratio,
            "hidden_fraction": since.hidden_seconds / max(since.worked_seconds, 1e-9),
            "relative_error": self._tally.relative_error,
        }
        kept = [
            residual
            for bucket, state in zip(buckets.buckets, buckets.states, strict=True)
            for residual in residuals(bucket, state)
        ]
        return scalars | ({"residual_norm": norm(kept)} if kept else {})
