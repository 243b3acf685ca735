"""Tells about one host, to the launcher: run by the Python of the job, as `python - < probe.py`.

It uses the standard library only and is given to other hosts through standard input, so that
nothing must be installed there. What could crash or hang is tried in processes of its own. The
argument is JSON: paths that should exist, and variables that say which libraries the job loads. It
prints a line of JSON, among whatever others print.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from typing import Any

MPI = """
import ctypes, json, re, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled"}
levels |= {MPI.THREAD_SERIALIZED: "serialized", MPI.THREAD_MULTIPLE: "multiple"}
maps = open("/proc/self/maps").read()
path = re.search(r"/.*/libmpi(?:ch|_cray|_abi|_ibm)?\\.so.*", maps)
path = path.group() if path else ""
text = " ".join(MPI.Get_library_version().split("\\0")[0].splitlines()[0].split())
said = {"text": text, "path": path}
said["level"] = levels[MPI.Init_thread(MPI.THREAD_MULTIPLE)]
try:
    said["cuda"] = bool(ctypes.CDLL(path).MPIX_Query_cuda_support())
except (OSError, AttributeError):
    said["cuda"] = None
MPI.Finalize()
print()
print(json.dumps(said))
"""
GPU = """
import json, torch
found = {"available": torch.cuda.is_available(), "names": [], "pinned": None}
if found["available"]:
    count = torch.cuda.device_count()
    found["names"] = [torch.cuda.get_device_name(i) for i in range(count)]
    found["pinned"] = torch.empty(1 << 20, pin_memory=True).is_pinned()
print()
print(json.dumps(found))
"""
CUPY = """
import json, cupy
print()
print(json.dumps({"version": cupy.__version__, "devices": cupy.cuda.runtime.getDeviceCount()}))
"""
PACKAGES = ("torch", "mpi4py", "numpy", "mpicomp")
LIMITS = {"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE}
LIMITS |= {"nproc": resource.RLIMIT_NPROC, "stack": resource.RLIMIT_STACK}
TRY_SECONDS = 60


def attempt(code: str, loads: dict[str, str]) -> Any:
    """What a piece of code prints, or its last words as `error`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_COMM", "SLURM_"))}
    kept.update(loads)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TRY_SECONDS,
            env=kept,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {TRY_SECONDS} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        return {"error": lines[-1]}
    said = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    return json.loads(said[-1]) if said else {"error": "it ended well without an answer"}


def version(package: str) -> str | None:
    """Its version; "source" if it is on the path without being installed; None if it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "source" if importlib.util.find_spec(package) else None


def read(path: str) -> str | None:
    """A file's text, None if it cannot be read."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return None


def main() -> None:
    """Prints what there is."""
    wanted = json.loads(sys.argv[1])
    start = time.monotonic()
    loads = wanted["loads"]
    sys.path[1:1] = filter(None, loads.get("PYTHONPATH", "").split(os.pathsep))
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    found: dict[str, Any] = {
        "time": time.time(),
        "host": os.uname().nodename,
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "versions": {name: version(name) for name in PACKAGES},
        "missing": [path for path in wanted["paths"] if not os.path.exists(path)],
        "cores": len(os.sched_getaffinity(0)),
        "shm": shm and {"total": shm.total, "free": shm.free},
        "limits": {name: resource.getrlimit(limit)[0] for name, limit in LIMITS.items()},
        "ptrace": read("/proc/sys/kernel/yama/ptrace_scope"),
        "mpi": attempt(MPI, loads),
        "cupy": attempt(CUPY, loads) if importlib.util.find_spec("cupy") else None,
    }
    found["gpu"] = attempt(GPU, loads) if found["versions"]["torch"] else {"error": "no torch"}
    found["took"] = time.monotonic() - start
    print()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
