"""What the launcher runs as a rank: `python worker.py train.py --lr 1`.

It is run by its path, in a Python that need not have the launcher installed. The user's program
runs in a process of its own, below a guard (`supervise.py`) that passes its output on, says how it
ended, and leaves no process behind. A rank that just exits would leave all others waiting in MPI
for ever; so an uncaught exception, or a status other than 0, is reported and ends the job.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Runs `sys.argv[1:]`: a script, `-m module`, `-c code`, or `--exec program`, and arguments."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from mpicomp_launch import rank, supervise

    del sys.path[0]
    supervise.supervise(rank.run)


if __name__ == "__main__":
    main()
