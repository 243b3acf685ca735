"""Tests that hold at any number of ranks, one included; every rank runs all of them in step."""

from __future__ import annotations

import io
import os
import sys
import zlib

import pytest
import torch
from torch import Tensor

try:
    from mpi4py import MPI
except (ImportError, RuntimeError):  # no mpi4py, or no MPI for it to load
    MPI = None
    collect_ignore_glob = ["*"]

SIZE = MPI.COMM_WORLD.size if MPI else 1
_failed = pytest.StashKey[bool]()
_output = pytest.StashKey[io.StringIO]()


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Only rank 0 reports what it does; another rank keeps its report for the case of a failure.

    All ranks stop at the first failure: a rank that goes on alone meets nobody.
    """
    if SIZE > 1:
        config.option.maxfail = 1
        if MPI.COMM_WORLD.rank > 0:
            config.stash[_output] = io.StringIO()
            reporter = config.pluginmanager.get_plugin("terminalreporter")
            reporter._tw = type(reporter._tw)(config.stash[_output])


def pytest_sessionfinish(session, exitstatus):
    session.config.stash[_failed] = exitstatus != 0


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """Others would wait for ever for a rank that failed: the whole job ends."""
    if SIZE == 1 or not config.stash.get(_failed, False):
        return
    if _output in config.stash:
        sys.__stderr__.write(f"[rank {MPI.COMM_WORLD.rank}]\n{config.stash[_output].getvalue()}\n")
    for stream in (sys.__stdout__, sys.__stderr__):
        stream.flush()
    MPI.COMM_WORLD.Abort(1)


@pytest.fixture(scope="session")
def world():
    """All ranks, joined."""
    import mpicomp.world

    mpicomp.world.init()
    return mpicomp.world.get()


@pytest.fixture(scope="session")
def rank(world):
    return world.communicator.rank


@pytest.fixture(scope="session")
def size(world):
    return world.communicator.size


@pytest.fixture(scope="session")
def run(world):
    """Runs a task to its end and returns its result."""
    import mpicomp.world

    return lambda task: mpicomp.world.wait(task, os.environ["PYTEST_CURRENT_TEST"])


@pytest.fixture
def agree(world):
    """Checks that these tensors have the same bits on all ranks. Collective."""

    def check(*tensors: Tensor) -> None:
        digest = 0
        for tensor in tensors:
            flat = tensor.detach().contiguous().view(-1)
            digest = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), digest)
        digests = world.communicator.comm.allgather(digest)
        assert digests == digests[:1] * len(digests), "ranks have different bits"

    return check
