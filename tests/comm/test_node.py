from __future__ import annotations

import os

import pytest
import torch
from mpi4py import MPI

from mpicomp.comm.node import BLOCK_ELEMENTS, Node, Refused, reduce_rows, share
from mpicomp.comm.waiting import run

TRAINING = """
import logging, sys, torch, mpicomp
logging.basicConfig(format="LOG %(levelname)s %(message)s")
torch.manual_seed(0)
net = torch.nn.Linear(300, 300)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
opt = mpicomp.DistributedOptimizer(opt, net.named_parameters())
for step in range(3):
    opt.zero_grad()
    (net(torch.ones(4, 300)) * (1 + mpicomp.rank())).sum().backward()
    assert torch.equal(net.bias.grad, torch.full((300,), 6.0)), net.bias.grad
    opt.step()
print("trained", flush=True)
"""


def test_memory_for_one_rank(tmp_path):
    (part,) = run(share(MPI.COMM_SELF, 5000, str(tmp_path)))
    assert (part.dtype, len(part)) == (torch.uint8, 5000)
    assert not part.any()
    assert list(tmp_path.iterdir()) == []  # no name is left behind


def test_no_room(small_memory):
    directory = small_memory(1)
    free = os.statvfs(directory).f_bavail
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        refused = run(share(MPI.COMM_SELF, 2 << 20, str(directory)))
        assert isinstance(refused, Refused)
        assert "No space left" in str(refused)
        with pytest.raises(Refused, match="No space left"):
            Node(MPI.COMM_SELF, arena_bytes=4 << 20, directory=str(directory))
    assert list(directory.iterdir()) == []
    assert os.statvfs(directory).f_bavail == free
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not isinstance(run(share(MPI.COMM_SELF, 64 << 10, str(directory))), Refused)


def test_no_directory():
    refused = run(share(MPI.COMM_SELF, 4096, "/nowhere"))
    assert isinstance(refused, Refused)
    assert "/nowhere" in str(refused)


def test_training_goes_on_without_room_for_shared_memory(small_memory, launch):
    result = launch(2, "-c", TRAINING, MPICOMP_SHARED_MEMORY_DIR=str(small_memory(1)), merged=True)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("trained") == 2
    warnings = [line for line in result.stdout.splitlines() if "LOG WARNING" in line]
    assert warnings, result.stdout
    assert all("using MPI" in line and "No space left" in line for line in warnings)


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 7, 1000])
@pytest.mark.parametrize("owners", [1, 2, 3])
def test_segments_cover_everything_once(tmp_path, numel, owners):
    node = Node(MPI.COMM_SELF, arena_bytes=1 << 12, directory=str(tmp_path))
    node.size, node.owners = 3, owners
    segments = node.segments(numel)
    assert len(segments) == 3
    assert [i for segment in segments for i in range(numel)[segment]] == list(range(numel))
    assert all(segment.start == segment.stop for segment in segments[owners:])


@pytest.mark.parametrize("numel", [0, 1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 3])
def test_rows_are_added_in_order_and_rounded_once(numel):
    rows = [torch.full((numel,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    targets = [torch.empty(numel, dtype=torch.bfloat16), rows[1]]
    reduce_rows(rows, targets, torch.add, None)
    for target in targets:
        assert (target == 258).all()  # 256 + 1 is 256 in bfloat16
    reduce_rows(rows[:1], [rows[0]], torch.add, 0.5)
    assert (rows[0] == 128).all()
