"""The MPI layer on one rank, and small jobs of two or three that go wrong on purpose."""

from __future__ import annotations

import subprocess

import pytest

try:
    from mpi4py import MPI
except (ImportError, RuntimeError):  # no mpi4py, or no MPI for it to load
    MPI = None
    collect_ignore_glob = ["*"]


@pytest.fixture
def small_memory(tmp_path):
    """Mounts a memory file system of so many MB, and takes it away again."""
    mounted = []

    def mount(megabytes):
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(tmp_path)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a file system is not permitted")
        mounted.append(tmp_path)
        return tmp_path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", path], check=True)
