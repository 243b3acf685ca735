"""A rank that does not come is named, and the job ends."""

from __future__ import annotations

import socket
import time

LIMITS = {"MPICOMP_STALL_SECONDS": "1", "MPICOMP_STALL_SHUTDOWN_SECONDS": "3"}
HEAD = """
import time, torch, mpicomp
mpicomp.init()
rank = mpicomp.rank()
"""
# Rank 1 never comes: it sleeps, or it waits in something else that rank 0 never comes to.
ASLEEP = (
    HEAD
    + """
if rank == 1:
    time.sleep(60)
{call}
"""
)
ELSEWHERE = (
    HEAD
    + """
from mpicomp import world
if rank == 1:
    world.wait(world.get().communicator.barrier(), "a place of its own")
mpicomp.allreduce(torch.ones(3), name="loss")
"""
)
BACKWARD = """
p = torch.nn.Parameter(torch.ones(8))
opt = mpicomp.DistributedOptimizer(torch.optim.SGD([p], lr=0.0), [("p", p)])
p.sum().backward()
if rank == 1:
    time.sleep(60)
p.sum().backward()
"""


def stopped(launch, np, source, **variables):
    """The output of a job that must end by itself, soon, and not with success."""
    start = time.monotonic()
    result = launch(np, "-c", source, **{**LIMITS, **variables}, merged=True)
    assert result.returncode != 0, result.stdout
    assert time.monotonic() - start < 25, result.stdout  # most of it is `import torch`
    return result.stdout


def test_a_rank_that_does_not_come(launch):
    call = "mpicomp.allreduce(torch.ones(3), name='loss')"
    output = stopped(launch, 3, ASLEEP.format(call=call))
    lines = [line for line in output.splitlines() if "has waited 1 s" in line]
    assert {line.split(" (pid")[0] for line in lines} == {
        f"mpicomp: rank {rank} on {socket.gethostname()}" for rank in (0, 2)
    }
    for line in lines:
        assert "in allreduce 'loss'; missing (not waiting in any collective): rank 1" in line
    assert "StallError: mpicomp: rank" in output


def test_a_rank_that_waits_elsewhere(launch):
    output = stopped(launch, 2, ELSEWHERE)
    assert "rank 1 waits in a place of its own" in output
    assert "missing" not in output


def test_a_rank_that_does_not_come_to_an_exchange(launch):
    output = stopped(launch, 2, HEAD + BACKWARD)
    assert "missing (not waiting in any collective): rank 1" in output


def test_a_rank_that_is_late_is_reported_and_waited_for(launch):
    source = HEAD + "time.sleep(5 * rank)\nmpicomp.barrier()\nprint('done', flush=True)\n"
    result = launch(2, "-c", source, MPICOMP_STALL_SECONDS="1", merged=True)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("done") == 2
    assert "rank 0" in result.stdout
    assert "missing (not waiting in any collective): rank 1" in result.stdout
