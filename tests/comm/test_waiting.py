from __future__ import annotations

import pytest

from mpicomp.comm.waiting import LONGEST_SLEEP_SECONDS, pause, run

# Rank 1 comes 2 s late to each of these; rank 0 must not burn its core meanwhile.
LATE = """
import time, torch, mpicomp
x, p = torch.ones(100_000), torch.nn.Parameter(torch.ones(100_000))
opt = mpicomp.DistributedOptimizer(torch.optim.SGD([p], lr=0.0), [("p", p)])
for call in (lambda: mpicomp.allreduce(x), lambda: p.sum().backward()):
    call()
    mpicomp.barrier()
    if mpicomp.rank() == 1:
        time.sleep(2)
    wall, cpu = time.monotonic(), time.process_time()
    call()
    if mpicomp.rank() == 0:
        print("waited", time.monotonic() - wall, time.process_time() - cpu, flush=True)
"""


def test_a_result():
    def task():
        yield
        yield
        return 3

    assert run(task()) == 3


def test_sleep_is_short_beside_what_was_waited(monkeypatch):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    pause(1e-4, spin_seconds=1e-3)
    assert slept == []
    for waited in (1e-3, 8e-3, 1.0, 1e4):
        pause(waited, spin_seconds=1e-4)
    assert slept == pytest.approx([1e-3 / 8, 1e-3, LONGEST_SLEEP_SECONDS, LONGEST_SLEEP_SECONDS])


@pytest.mark.parametrize("memory", ["0", "1"])
def test_an_idle_wait_leaves_the_processor_alone(memory, launch):
    result = launch(2, "-c", LATE, MPICOMP_SHARED_MEMORY=memory, merged=True)
    assert result.returncode == 0, result.stdout
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("waited")]
    assert len(lines) == 2
    for _, waited, cpu in lines:
        assert float(waited) > 1.5
        assert float(cpu) < 0.2
