"""Sides of a comparison that take turns within one run, so that a noisy machine is fair to all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

import mpicomp

Step = Callable[[], object]  # one training step
Blocks = list[float | None]  # milliseconds of a step in each round; None where a side sat out


@dataclass(frozen=True)
class Turns:
    """How often a side has its turn, and how many steps it takes then."""

    rounds: int
    steps: int

    def within(self, step_seconds: float, seconds: float) -> Turns:
        """As many of these turns as fit into ``seconds``, but no fewer than three of one step."""
        affordable = max(int(seconds / step_seconds), 6)
        steps = max(1, min(self.steps, affordable // self.rounds - 1))  # one more warms the caches
        return Turns(max(3, min(self.rounds, affordable // (steps + 1))), steps)

    def has_turn(self, number: int, rounds: int) -> bool:
        """Whether it is this side's turn in a round, of which it takes part in some, evenly."""
        return (number + 1) * self.rounds // rounds > number * self.rounds // rounds


def time_block(step: Step, steps: int) -> float:
    """Seconds a step on the rank that takes longest, after one step to warm the caches."""
    step()
    mpicomp.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    own = torch.tensor((time.perf_counter() - started) / steps, dtype=torch.float64)
    return float(mpicomp.allreduce(own, op=mpicomp.Max))


def take_turns(sides: Mapping[str, Step], turns: Mapping[str, Turns]) -> dict[str, Blocks]:
    """Time blocks of all sides; every round begins with another one."""
    names = list(sides)
    rounds = max(turns[name].rounds for name in names)
    blocks: dict[str, Blocks] = {name: [None] * rounds for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if turns[name].has_turn(number, rounds):
                blocks[name][number] = 1e3 * time_block(sides[name], turns[name].steps)
    return blocks


def median(blocks: Blocks) -> float:
    return statistics.median(block for block in blocks if block is not None)


def differences(blocks: Blocks, reference: Blocks) -> list[float]:
    """What a side took more than another one in the same round."""
    pairs = zip(blocks, reference, strict=True)
    return [mine - its for mine, its in pairs if mine is not None and its is not None]
