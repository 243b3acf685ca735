"""`python -m mpicomp_launch`, the same as the command `mpicomp-launch`."""

import sys

from mpicomp_launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
