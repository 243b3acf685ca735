"""Processes below this one: none may outlive a job."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Makes this process get a signal when its parent ends, however that happens."""
    _prctl(PR_SET_PDEATHSIG, signum)


def adopt_orphans() -> None:
    """Processes below us whose parent dies become our children, not those of process 1."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def descendants() -> list[int]:
    """Living processes below this one, from /proc; none where that does not exist."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
        except OSError:  # ended meanwhile
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = list(children.get(os.getpid(), []))
    for pid in found:
        found += children.get(pid, [])
    return found


def kill_descendants() -> None:
    """SIGKILL for every process below this one, those included which are started meanwhile."""
    for _ in range(10):
        found = descendants()
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):  # ended meanwhile, or somebody else's
                os.kill(pid, signal.SIGKILL)
