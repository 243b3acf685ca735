"""What all ranks must know alike: whether they hold the same model, and how a step went."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch

from mpicomp.comm.communicator import Communicator, Op
from mpicomp.comm.waiting import Task
from mpicomp.errors import MismatchError

_SHOWN = 5  # differences that an error names


class Mark(IntEnum):
    """What a rank may say of a parameter; a row of the ballot each."""

    USED = 0  # it has a gradient
    LATE = 1  # it has a gradient that is not in its bucket
    SPARSE = 2  # it has a sparse gradient
    TRAINED = 3  # it may get gradients


@dataclass(slots=True)
class Ballot:
    """The marks of all parameters, one byte each, and how the step went.

    Attributes:
        marks: (marks, parameters) bool.
        bad: something was not finite.
        failed: a backward pass ended with an exception.
    """

    marks: torch.Tensor
    bad: bool = False
    failed: bool = False

    @classmethod
    def blank(cls, num_params: int) -> Ballot:
        return cls(torch.zeros(len(Mark), num_params, dtype=torch.bool))

    def set(self, mark: Mark, index: int) -> None:
        self.marks[mark, index] = True

    def marked(self, mark: Mark) -> list[int]:
        """The parameters with ``mark``, in order."""
        return [int(i) for i in self.marks[mark].nonzero()]

    def cast(self, communicator: Communicator) -> Task[Ballot]:
        """The marks that any rank has set, and whether any rank's step was bad or failed."""
        flat = torch.cat([self.marks.view(-1), torch.tensor([self.bad, self.failed])])
        yield from communicator.reduce_(flat, Op.MAX)
        return Ballot(flat[:-2].view_as(self.marks), bool(flat[-2]), bool(flat[-1]))


def agree_on_models(communicator: Communicator, lines: Mapping[str, str]) -> Task[None]:
    """Raise `MismatchError` on every rank unless all have the same ``lines``.

    Args:
        communicator: the ranks to compare.
        lines: for each parameter, in order, what an exchange depends on.
    """
    text = "\n".join(f"{name}: {line}" for name, line in lines.items())
    if not (yield from communicator.same(zlib.crc32(text.encode()))):
        everybody = communicator.comm.allgather(dict(lines))
        raise MismatchError("DistributedOptimizer: " + _differences(everybody))


def _differences(everybody: list[dict[str, str]]) -> str:
    """How each rank's parameters differ from those of rank 0."""
    first = everybody[0]
    parts = []
    for rank, lines in enumerate(everybody):
        found = [
            f"{n} is {first[n]} on rank 0 and {lines[n]} on rank {rank}"
            for n in first
            if n in lines and lines[n] != first[n]
        ]
        found += [f"{name} is missing" for name in first if name not in lines]
        found += [f"{name} is not on rank 0" for name in lines if name not in first]
        if not found and list(lines) != list(first):
            found = ["the same parameters in another order"]
        if found:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            parts.append(
                f"rank {rank} ({len(lines)} parameters): " + "; ".join(found[:_SHOWN]) + more
            )
    return (
        f"ranks do not hold the same model as rank 0 ({len(first)} parameters)\n  "
        + "\n  ".join(parts)
        + "\nBuild the same model with the same compression on every rank."
    )
