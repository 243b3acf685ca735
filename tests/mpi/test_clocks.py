"""Clocks that are set wrong on purpose: what is found is checked against what was set."""

from __future__ import annotations

import json
import time

import pytest
from mpi4py import MPI

from mpicomp.comm.clocks import compare, on_rank0
from mpicomp.observe import trace
from mpicomp.profile import Profile

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
AHEAD = 7_000_000_000 * RANK * (-1) ** RANK  # ns: -7 s, 14 s, -21 s
DRIFT = 0.01 * RANK
REAL = time.perf_counter_ns
START = MPI.COMM_WORLD.bcast(REAL())


def shown(real):
    """What this rank's clock shows at ``real`` ns; rank 0's is right."""
    return START + round((real - START) * (1.0 + DRIFT)) + AHEAD


@pytest.fixture(autouse=True)
def wrong(monkeypatch):
    monkeypatch.setattr(time, "perf_counter_ns", lambda: shown(REAL()))


@pytest.fixture
def comm(world):
    if world.communicator.hosts > 1:
        pytest.skip("ranks must share a true clock")
    return world.communicator.comm


def test_offset_and_drift_are_found_within_the_error_that_is_claimed(comm, run):
    start = run(compare(comm))
    time.sleep(0.1)
    end = run(compare(comm))
    assert start.at < end.at < time.perf_counter_ns()
    for reading in (start, end):
        real = START + (reading.at - AHEAD - START) / (1.0 + DRIFT)
        assert abs(reading.ahead - (reading.at - real)) <= reading.error + 2
        assert (reading.error == 0) == (RANK == 0)
    error = max(start.error, end.error)
    before, after = (round(START + (r.at - AHEAD - START) / (1.0 + DRIFT)) for r in (start, end))
    for real in range(before, after, (after - before) // 10):
        assert abs(on_rank0(shown(real), start, end) - real) <= error + 2


def test_a_trace_of_ranks_with_wrong_clocks_keeps_causes_before_effects(world, comm, run, tmp_path):
    path = comm.bcast(str(tmp_path / "trace.json"))
    profile = Profile(rank=RANK, tracing=True)
    start = run(compare(comm))
    for turn in range(5):
        with profile.span("barrier", turn=turn):
            run(world.communicator.barrier())
    profile.mark("done")
    trace.write(path, profile, world.communicator, start)
    if RANK > 0:
        return
    with open(path) as file:
        document = json.load(file)
    events = document["traceEvents"]
    errors = document["otherData"]["clock_error_us"]
    assert len(errors) == SIZE
    assert errors[0] == 0
    names = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"]
    assert names == [(rank, f"rank {rank}") for rank in range(SIZE)]
    threads = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert threads == [(rank, "training") for rank in range(SIZE)]
    assert min(e["ts"] for e in events if e["ph"] != "M") == 0
    for turn in range(5):
        spans = [e for e in events if e["ph"] == "X" and e["args"]["turn"] == turn]
        assert [e["pid"] for e in spans] == list(range(SIZE))
        latest_entry = max(e["ts"] for e in spans)
        for e in spans:  # nobody leaves a barrier before the last has come
            assert e["ts"] + e["dur"] >= latest_entry - 2 * sum(errors) - 0.01
