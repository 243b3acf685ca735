"""Processes below this one: none may outlive a job."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from typing import NamedTuple

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_SECONDS = 2.0  # for the kernel to end what was killed


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Sends this process a signal when its parent ends, however that happens."""
    _prctl(PR_SET_PDEATHSIG, signum)


def adopt_orphans() -> None:
    """Processes below us whose parent dies become our children, not those of process 1."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


class Process(NamedTuple):
    """One process below this one, dead ones included until their parent has heard of it."""

    pid: int
    group: int
    session: int
    is_alive: bool


def descendants() -> list[int]:
    """Living processes below this one, from /proc; none where that does not exist."""
    return [process.pid for process in _family() if process.is_alive]


def kill_descendants() -> None:
    """SIGKILL for every process below this one, until none is left.

    By groups, too: a daemon whose every process forks the next and exits is faster than /proc can
    be read, but stays in its group, and its dead, which fall to us, tell which that is. A group is
    ours if its session is: that was made below us, or by us.
    """
    own_group, own_session = os.getpgrp(), os.getsid(0)
    is_leader = own_session == os.getpid()
    end = time.monotonic() + KILL_SECONDS
    while time.monotonic() < end:
        family = _family()
        living = [process.pid for process in family if process.is_alive]
        groups = {each.group for each in family if is_leader or each.session != own_session}
        for target in [-group for group in groups - {own_group}] + living:
            with contextlib.suppress(OSError):  # ended meanwhile, or somebody else's
                os.kill(target, signal.SIGKILL)
        if not living:
            return
        time.sleep(0.001)


def _family() -> list[Process]:
    children: dict[int, list[Process]] = {}
    names = os.listdir("/proc") if os.path.isdir("/proc") else []
    for name in filter(str.isdecimal, names):
        try:
            with open(f"/proc/{name}/stat", errors="replace") as file:
                text = file.read()
        except OSError:  # ended meanwhile
            continue
        state, parent, group, session = text.rpartition(")")[2].split()[:4]
        if int(group) > 1:
            process = Process(int(name), int(group), int(session), state not in "ZX")
            children.setdefault(int(parent), []).append(process)
    found = list(children.get(os.getpid(), []))
    for process in found:
        found += children.get(process.pid, [])
    return found
