"""What there is on a host, judged: Python, MPI, GPUs, memory, limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mpicomp_launch.check.findings import FAILURE, OK, WARNING, Finding

SMALL_SHM_BYTES = 1 << 30
FEW_FILES = 4096
FEW_PROCESSES = 4096  # threads are counted, too
SMALL_STACK_BYTES = 8 << 20
UNLIMITED = -1


def judge(found: Mapping[str, Any], has_rdma: bool) -> Iterator[Finding]:
    """Findings about this host, from what `probe.py` has told."""
    host = found["host"]
    yield Finding(host, "Python", OK, f"{found['python']} ({found['executable']})")
    for package, version in found["versions"].items():
        if version is None:
            yield Finding(host, package, FAILURE, "absent", f"run `pip install {package}` there")
        else:
            yield Finding(host, package, OK, version)
    yield from judge_machine(host, found, has_rdma)


def judge_machine(host: str, found: Mapping[str, Any], has_rdma: bool) -> Iterator[Finding]:
    """What is to be known of every host by itself."""
    yield from judge_mpi(host, found["mpi"])
    yield from judge_gpu(host, found["gpu"], found["cupy"])
    yield from judge_memory(host, found["shm"])
    yield from judge_limits(host, found["limits"], has_rdma)
    if found["ptrace"] not in (None, "0"):
        advice = (
            "Open MPI copies large messages twice; `sysctl kernel.yama.ptrace_scope=0` ends that"
        )
        yield Finding(host, "copies between processes", WARNING, "restricted (yama)", advice)


def judge_mpi(host: str, mpi: Mapping[str, Any]) -> Iterator[Finding]:
    """The library, its threads, and whether it takes addresses of GPU memory."""
    if "error" in mpi:
        advice = "install an MPI (`pip install mpich`), or set MPI4PY_LIBMPI to the one there is"
        yield Finding(host, "MPI library", FAILURE, mpi["error"], advice)
        return
    yield Finding(host, "MPI library", OK, f"{mpi['text']} ({mpi['path']})")
    if mpi["level"] == "multiple":
        yield Finding(host, "MPI threads", OK, "multiple")
    else:
        advice = "use an MPI that was built with MPI_THREAD_MULTIPLE"
        yield Finding(host, "MPI threads", FAILURE, mpi["level"], advice)
    answers = {
        True: "yes, MPIX_Query_cuda_support says; each job tries it before it believes that",
        False: "no, MPIX_Query_cuda_support says; gradients go through pinned host memory",
        None: "not known, no MPIX_Query_cuda_support; gradients go through pinned host memory",
    }
    yield Finding(host, "MPI and GPU memory", OK, answers[mpi["cuda"]])


def judge_gpu(
    host: str, gpu: Mapping[str, Any], cupy: Mapping[str, Any] | None
) -> Iterator[Finding]:
    """GPUs as PyTorch sees them, pinned memory, and CuPy."""
    if "error" in gpu:
        yield Finding(host, "GPU", WARNING, gpu["error"], "PyTorch must be importable there")
        return
    names = ", ".join(gpu["names"])
    yield Finding(host, "GPU", OK, names or "none that PyTorch can use")
    if not gpu["names"]:
        return
    if gpu["pinned"]:
        yield Finding(host, "pinned memory", OK, "works")
    else:
        yield Finding(host, "pinned memory", WARNING, "refused", "raise `ulimit -l`")
    if cupy is None:
        advice = "run `pip install 'mpicomp[cuda12]'` (or cuda13) for selection on the GPU"
        yield Finding(host, "CuPy", WARNING, "absent", advice)
    elif "error" in cupy:
        yield Finding(host, "CuPy", WARNING, cupy["error"], "install the CuPy of this CUDA")
    else:
        yield Finding(host, "CuPy", OK, f"{cupy['version']}, {cupy['devices']} devices")


def judge_memory(host: str, shm: Mapping[str, int] | None) -> Iterator[Finding]:
    """The memory file system that ranks of a host share."""
    what = "shared memory"
    if shm is None:
        advice = "mount a tmpfs there, or set MPICOMP_SHARED_MEMORY_DIR"
        yield Finding(host, what, WARNING, "no /dev/shm", advice)
        return
    value = f"/dev/shm, {shm['free'] / 2**30:.1f} of {shm['total'] / 2**30:.1f} GiB free"
    if shm["free"] < SMALL_SHM_BYTES:
        advice = (
            "in a container: --shm-size=8g; else remount it larger, or delete what is old there"
        )
        yield Finding(host, what, WARNING, value, advice)
    else:
        yield Finding(host, what, OK, value)


def judge_limits(host: str, limits: Mapping[str, int], has_rdma: bool) -> Iterator[Finding]:
    """Limits that end jobs in odd ways."""
    complaints = []
    if has_rdma and limits["memlock"] != UNLIMITED:
        complaints.append("memlock must be unlimited for RDMA: `ulimit -l unlimited`")
    if UNLIMITED < limits["nofile"] < FEW_FILES:
        complaints.append(f"nofile should be {FEW_FILES} or more: `ulimit -n {FEW_FILES}`")
    if UNLIMITED < limits["nproc"] < FEW_PROCESSES:
        complaints.append(f"nproc should be {FEW_PROCESSES} or more: `ulimit -u {FEW_PROCESSES}`")
    if UNLIMITED < limits["stack"] < SMALL_STACK_BYTES:
        complaints.append("stack should be 8 MiB or more: `ulimit -s 8192`")
    shown = ", ".join(
        f"{name} {'unlimited' if value == UNLIMITED else value}" for name, value in limits.items()
    )
    yield Finding(host, "limits", WARNING if complaints else OK, shown, "; ".join(complaints))
