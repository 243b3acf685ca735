"""ExDyna: as MiCRO, with partitions whose bounds move until all have about equally much to send.

Reference: D. Yoon and S. Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable
Distributed Deep Learning", CCGrid 2024.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .base import Bucket, State
from .registry import register
from .threshold_control import ThresholdSparsifier, even_bounds

NUM_BLOCKS = 1024
BLOCK_MULTIPLE = 32
FULL, SCARCE = 1.05, 0.95238
"""A partition above ``FULL`` times the average gives a block to a neighbour below ``SCARCE``."""


@register("exdyna")
@dataclass(frozen=True)
class ExDyna(ThresholdSparsifier):
    """Of each of ``size`` partitions what passes a threshold on one rank; the partitions adapt.

    A partition is a run of blocks. After each step, neighbours of which one had too many elements
    that passed and the other too few move one block. In step t rank r chooses in partition
    ``(t + r) mod size``.

    State: also slot ``blocks``, per parameter how many blocks each partition of its bucket has,
    equal on all ranks.

    The options are those of `ThresholdSparsifier`.
    """

    def init(self, bucket: Bucket) -> State:
        blocks = torch.tensor(even_blocks(block_layout(bucket.flat.numel())[0], bucket.size))
        return {**super().init(bucket), "blocks": {name: blocks.clone() for name in bucket}}

    def bounds(self, bucket: Bucket, state: State) -> list[int]:
        numel = bucket.flat.numel()
        num_blocks, block_size = block_layout(numel)
        if num_blocks < bucket.size:
            return even_bounds(numel, bucket.size)
        *inner, _ = itertools.accumulate(n * block_size for n in topology(bucket, state))
        return [0, *inner, numel]  # what makes no full block belongs to the last

    def rearrange(
        self, bucket: Bucket, state: State, counts: Sequence[int], skip: frozenset[str]
    ) -> None:
        numel = bucket.flat.numel()
        blocks = moved(topology(bucket, state), counts, block_layout(numel)[1], numel)
        for name, kept in state["blocks"].items():
            if name not in skip and kept.numel() == bucket.size:
                kept.copy_(torch.tensor(blocks))


def block_layout(numel: int) -> tuple[int, int]:
    """How many blocks a bucket has, and how many elements a block has."""
    num_blocks = min(NUM_BLOCKS, numel // BLOCK_MULTIPLE)
    if num_blocks == 0:
        return 0, 0
    return num_blocks, numel // num_blocks // BLOCK_MULTIPLE * BLOCK_MULTIPLE


def even_blocks(num_blocks: int, size: int) -> list[int]:
    """Blocks of each of ``size`` nearly equal partitions, the first ones the larger."""
    small, more = divmod(num_blocks, size)
    return [small + 1] * more + [small] * (size - more)


def topology(bucket: Bucket, state: State) -> list[int]:
    """Blocks of each partition: as remembered by the parameter that has taken the most steps.

    Where that does not fit, because buckets were made anew or other ranks take part, equal
    partitions.
    """
    num_blocks = block_layout(bucket.flat.numel())[0]
    taken = state["step"]
    latest = max(taken, key=lambda name: int(taken[name]), default=None)
    if latest is not None:
        blocks: list[int] = state["blocks"][latest].tolist()
        if len(blocks) == bucket.size and sum(blocks) == num_blocks:
            return blocks
    return even_blocks(num_blocks, bucket.size)


def moved(blocks: Sequence[int], counts: Sequence[int], block_size: int, numel: int) -> list[int]:
    """Blocks of each partition after one pass over all pairs of neighbours, from the left.

    Args:
        blocks: of each partition.
        counts: how many elements passed in each partition.
        block_size: elements of a block.
        numel: elements of the bucket.
    """
    blocks, counts = list(blocks), list(counts)
    total, minimum = sum(counts), sum(blocks) // (4 * len(blocks))
    average, moving = total // len(blocks), block_size * total // max(numel, 1)
    for i in range(len(blocks) - 1 if average else 0):
        left, right = counts[i] / average, counts[i + 1] / average
        if left > FULL and right < SCARCE:
            giver, taker = i, i + 1
        elif right > FULL and left < SCARCE:
            giver, taker = i + 1, i
        else:
            continue
        if blocks[giver] > minimum:
            blocks[giver] -= 1
            blocks[taker] += 1
            counts[giver] -= moving
            counts[taker] += moving
    return blocks
