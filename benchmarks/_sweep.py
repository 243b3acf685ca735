"""What hosts of one's own leave behind, taken away: by their sweeper, or by a later run.

All that runs on a host has a file of its lab's folder mounted, which tells it from the rest of the
machine. The process that made a lab and its sweeper hold a lock; where nobody does, both are gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

PREFIX = "mpicomp-hosts-"
MOUNTED = "hosts"  # the file of the folder
KILL_SECONDS = 10


def lock(folder: Path) -> TextIO:
    """Says that a lab is in use, until the last copy of the file is closed."""
    unseen = folder / "lock.new"
    file = unseen.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    unseen.rename(folder / "lock")
    return file


def processes(folder: Path) -> list[int]:
    """All that run on the hosts of a lab, with those that hold them."""
    mounted = re.compile(rf"/{re.escape(folder.name)}/{MOUNTED}(//deleted)? ".encode())
    own = os.stat("/proc/self/ns/mnt").st_ino
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            elsewhere = os.stat(entry / "ns/mnt").st_ino != own  # never the machine itself
            if elsewhere and mounted.search((entry / "mountinfo").read_bytes()):
                found.append(int(entry.name))
    return found


def command_line(pid: int) -> str:
    """The words of a process, empty if it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()


def sweep(folder: Path) -> None:
    """Kills all on the hosts, those that are born meanwhile too; the hosts go with the last."""
    for _ in range(2):  # a host that was being made is found now, or does not find its folder
        end = time.monotonic() + KILL_SECONDS
        while (left := processes(folder)) and time.monotonic() < end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        shutil.rmtree(folder, ignore_errors=True)


def leftovers() -> Iterator[Path]:
    """Folders of labs whose makers and sweepers were killed; each is ours until the next."""
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError), (folder / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder


if __name__ == "__main__":
    # The sweeper of a lab: its input ends when the lab is closed, or its process dies.
    sys.stdin.read()
    sweep(Path(sys.argv[1]))
