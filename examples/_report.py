"""What the examples share: progress on rank 0, and what training sends over the wire."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import mpicomp


class Report:
    """Shows progress on rank 0: a bar on a terminal, plain lines elsewhere.

    Every rank calls the same methods at the same steps, as `line` averages the loss over ranks.

    Args:
        steps: how many steps the training takes.
        samples_per_step: on all ranks together.
    """

    def __init__(self, *, steps: int, samples_per_step: int) -> None:
        self._console = Console(quiet=mpicomp.rank() != 0, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("train", total=steps)
        self._steps = steps
        self._samples_per_step = samples_per_step
        self._done = 0

    def __enter__(self) -> Report:
        self._bar.start()
        self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def _begin(self) -> None:
        self._losses: list[Tensor] = []
        self._before = mpicomp.stats()
        self._started = self._stepped = time.perf_counter()

    def step(self, loss: Tensor) -> None:
        """Count one optimizer step, whose loss on this rank was ``loss`` (0-d)."""
        self._losses.append(loss.detach().clone())
        self._done += 1
        self._stepped = time.perf_counter()
        self._bar.update(self._task, completed=self._done)

    def line(self, measure: str) -> None:
        """Report the steps since the last line; time spent evaluating does not count."""
        steps = len(self._losses)
        loss = float(mpicomp.allreduce(sum(self._losses[1:], self._losses[0]) / steps))
        speed = steps * self._samples_per_step / (self._stepped - self._started)
        self.text(
            f"step {self._done:>{len(str(self._steps))}}/{self._steps}   loss {loss:.4f}   "
            f"held-out {measure}   samples/s {speed:,.0f}   {self._traffic(steps)}"
        )
        self._begin()

    def text(self, text: str) -> None:
        """Print ``text`` on rank 0."""
        self._console.print(text, markup=False)

    def _traffic(self, steps: int) -> str:
        spent = mpicomp.stats() - self._before
        share = spent.bytes_sent / spent.dense_bytes if spent.dense_bytes else 0.0
        return f"bytes/step {spent.bytes_sent / steps:,.0f} ({share:.2%} of dense)"
