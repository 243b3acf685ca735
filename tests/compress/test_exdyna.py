from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress import ExDyna, GatherV, Simulation, bucket_of
from mpicomp.compress.exdyna import block_layout, even_blocks, moved, topology
from mpicomp.compress.threshold_control import even_bounds


@pytest.mark.parametrize(
    ("numel", "blocks", "block_size", "rest"),
    [
        (11_173_962, 1024, 10_912, 74),
        (14_728_266, 1024, 14_368, 15_434),
        (28_949_319, 1024, 28_256, 15_175),
        (100_000, 1024, 96, 1_696),
        (32_768, 1024, 32, 0),
        (32_767, 1023, 32, 31),
        (33, 1, 32, 1),
        (31, 0, 0, 31),
        (0, 0, 0, 0),
    ],
)
def test_layout(numel, blocks, block_size, rest):
    assert block_layout(numel) == (blocks, block_size)
    assert numel - blocks * block_size == rest


def test_even_blocks():
    assert even_blocks(1024, 8) == [128] * 8
    assert even_blocks(1024, 16) == [64] * 16
    assert even_blocks(1024, 3) == [342, 341, 341]
    assert even_blocks(2, 3) == [1, 1, 0]


@pytest.mark.parametrize(
    ("blocks", "counts", "expected"),
    [
        ([5, 5, 5, 5], [200, 50, 100, 50], [4, 6, 5, 5]),
        ([5, 5, 5, 5], [50, 200, 50, 100], [6, 3, 6, 5]),
        # 20 elements move with the first block, so the second is no longer short of them
        ([5, 5, 5, 5], [110, 94, 106, 90], [4, 6, 4, 6]),
        ([5, 5, 5, 5], [105, 95, 104, 96], [5, 5, 5, 5]),  # within the band
        ([1, 9, 5, 5], [200, 50, 100, 50], [1, 9, 5, 5]),  # a partition keeps 20 // (4 * 4)
        ([5, 5, 5, 5], [3, 0, 0, 0], [5, 5, 5, 5]),  # fewer elements than partitions
        ([20], [400], [20]),
    ],
)
def test_blocks_move_between_neighbours(blocks, counts, expected):
    assert moved(blocks, counts, 500, 10_000) == expected


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_moves_keep_all_blocks_and_the_minimum(size, seed):
    generator = torch.Generator().manual_seed(seed)
    blocks = even_blocks(1024, size)
    for _ in range(20):
        counts = torch.randint(0, 100, (size,), generator=generator).tolist()
        blocks = moved(blocks, counts, 96, 100_000)
        assert sum(blocks) == 1024
        assert min(blocks) >= 1024 // (4 * size)


def bucket_and_state(numel, size):
    bucket = bucket_of({"a": torch.empty(numel - 10), "b": torch.empty(10)}, torch.float32,
                       rank=0, size=size)  # fmt: skip
    return bucket, ExDyna().init(bucket)


@pytest.mark.parametrize(("numel", "size"), [(100_000, 4), (33_000, 7), (500, 3), (64, 2)])
def test_partitions_tile_the_bucket_and_the_last_has_the_rest(numel, size):
    bucket, state = bucket_and_state(numel, size)
    bounds = ExDyna().bounds(bucket, state)
    blocks, block_size = block_layout(numel)
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    assert sum(lengths) == numel
    assert all(length % block_size == 0 for length in lengths[:-1])
    assert lengths[-1] == block_size * (blocks // size) + numel - blocks * block_size


@pytest.mark.parametrize(("numel", "size"), [(31, 2), (100, 4), (12, 5)])
def test_fewer_blocks_than_ranks(numel, size):
    bucket, state = bucket_and_state(numel, size)
    assert ExDyna().bounds(bucket, state) == even_bounds(numel, size)


def test_what_does_not_fit_is_forgotten():
    bucket, state = bucket_and_state(100_000, 4)
    for name in bucket:
        state["blocks"][name].copy_(torch.tensor([100, 300, 312, 312]))
    assert topology(bucket, state) == [100, 300, 312, 312]
    state["step"]["b"] += 1  # b was used in a step in which a was not
    state["blocks"]["b"].copy_(torch.tensor([101, 299, 312, 312]))
    assert topology(bucket, state) == [101, 299, 312, 312]
    state["blocks"]["b"][0] += 1  # from a bucket with other blocks
    assert topology(bucket, state) == [256] * 4
    bucket.size = 3  # one rank has no data any more
    assert topology(bucket, state) == [342, 341, 341]
    ExDyna().rearrange(bucket, state, [900, 10, 90], frozenset())
    assert state["blocks"]["b"].tolist() == [102, 299, 312, 312]


def test_skipped_parameters_keep_their_blocks():
    bucket, state = bucket_and_state(100_000, 2)
    ExDyna().rearrange(bucket, state, [900, 100], frozenset({"b"}))
    assert state["blocks"]["a"].tolist() == [511, 513]
    assert state["blocks"]["b"].tolist() == [512, 512]


@pytest.mark.parametrize("feedback", ["true", "false"])
def test_imbalance_decreases(feedback):
    """It does not vanish: neighbours on the same side of the average move nothing."""
    size, shape = 4, (256, 128)
    profile = torch.tensor([1.2, 1.0, 1.2, 1.0]).repeat_interleave(64)[:, None]
    counts = []

    def tap(rank, message):
        if isinstance(message, GatherV):
            counts.append(message.tensors[0].numel())

    spec = f"exdyna:density=0.05,error_feedback={feedback}"
    simulation = Simulation(spec, {"w": torch.empty(shape)}, size=size, tap=tap)
    generator = torch.Generator().manual_seed(0)
    for _ in range(110):
        draws = torch.randn(size, *shape, generator=generator) * profile
        simulation.step([{"w": draw} for draw in draws])
    rows = torch.tensor(counts).view(-1, size).double()
    imbalance = rows.amax(1) / rows.mean(1) - 1
    assert imbalance[-10:].mean() < 0.5 * imbalance[5:15].mean()
    blocks = simulation.groups[0].states[0]["blocks"]["w"].tolist()
    assert sum(blocks) == 1024
    assert blocks[0] < 256 < blocks[1]
