"""Whether MPI can be given addresses of GPU memory: the library is asked, then tested."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import torch
from mpi4py import MPI

_LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL")
_TEST_SECONDS = 60

# A library that was built for it can still crash, so the test runs in a process of its own.
_SELF_TEST = """
import torch
from mpi4py import MPI
def memory(t): return [MPI.buffer.fromaddress(t.data_ptr(), t.numel()), MPI.BYTE]
sent = torch.arange(64, dtype=torch.uint8, device="cuda")
received = torch.zeros_like(sent)
torch.cuda.synchronize()
MPI.COMM_WORLD.Sendrecv(memory(sent), 0, recvbuf=memory(received), source=0)
MPI.COMM_WORLD.Allgather(memory(sent), memory(received))
assert torch.equal(sent, received)
"""


def reads_device_memory(comm: MPI.Comm) -> bool:
    """Collective: whether MPI moves GPU memory by address, on every rank of ``comm``.

    Reductions are staged through the host all the same: MPI too would carry them out there.
    """
    mine = torch.cuda.is_available() and _claims_to() and (comm.rank != 0 or _passes_test())
    return bool(comm.allreduce(mine, op=MPI.LAND))


def _claims_to() -> bool:
    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return bool(query is not None and query())


def _passes_test() -> bool:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_PREFIXES)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _SELF_TEST],
            env=environment,
            capture_output=True,
            timeout=_TEST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
