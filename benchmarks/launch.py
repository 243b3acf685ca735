"""What does the launcher cost at the start of a job, against bare mpirun of the same MPI?

Each row starts a Python program that only initialises MPI and meets a barrier, both ways in turns,
and compares medians. `python benchmarks/launch.py` uses the MPI of the Python that runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from mpicomp_launch import command, dialects, environment, mpis
from mpicomp_launch.options import Options
from mpicomp_launch.plan import Plan

TARGET_SECONDS = 0.3
PROGRAM = "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"


def bare_command(ranks: int) -> tuple[list[str], dict[str, str]]:
    """The MPI's own launcher with the options for one host, and the program itself."""
    environ = environment.without_own(os.environ)
    user = command.parse([sys.executable, "-c", PROGRAM], environ)
    plan = Plan(
        np=ranks,
        command=user,
        mpi=mpis.find(user, None, environ),
        environ=environ,
        exports={},
        cwd=os.getcwd(),
        is_root=os.geteuid() == 0,
    )
    told = dialects.for_plan(plan).command(plan)
    options = [word for option in told.options for word in option]
    return [told.program, *options, sys.executable, "-c", PROGRAM], {**environ, **told.exports}


def seconds(words: list[str], environ: dict[str, str]) -> float:
    """How long a command takes."""
    start = time.perf_counter()
    done = subprocess.run(
        words, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    took = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{words} ended with {done.returncode}: {done.stderr}")
    return took


def measure(ranks: int, rounds: int) -> dict[str, float | int]:
    """A row: medians of both, and of what lies between the two of a round."""
    bare, environ = bare_command(ranks)
    ours = [sys.executable, "-m", "mpicomp_launch", "-np", str(ranks)]
    ours += [sys.executable, "-c", PROGRAM]
    package = str(Path(environment.__file__).parents[1])
    path = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])
    pairs = [
        (seconds(bare, environ), seconds(ours, {**os.environ, "PYTHONPATH": path}))
        for _ in range(rounds + 1)
    ][1:]
    return {
        "ranks": ranks,
        "mpirun_seconds": statistics.median(bare for bare, _ in pairs),
        "launcher_seconds": statistics.median(ours for _, ours in pairs),
        "more_seconds": statistics.median(ours - bare for bare, ours in pairs),
    }


def main() -> None:
    """Prints a line for each number of ranks, and JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    user = command.parse([sys.executable, "-c", PROGRAM], os.environ)
    mpi = mpis.find(user, Options().mpi, os.environ)
    print(f"{mpi.family} {mpi.version}, {options.rounds} rounds in turns, medians")
    rows = []
    for ranks in (2, 4):
        row = measure(ranks, options.rounds)
        rows.append(row)
        print(
            f"{ranks} ranks: mpirun {row['mpirun_seconds']:.3f} s, "
            f"launcher {row['launcher_seconds']:.3f} s, {row['more_seconds']:+.3f} s"
        )
    holds = all(row["more_seconds"] <= TARGET_SECONDS for row in rows)
    target = f"at most {TARGET_SECONDS} s more"
    result = {"benchmark": "launch", "mpi": mpi.family, "rows": rows}
    print(json.dumps({**result, "target": target, "holds": holds}))


if __name__ == "__main__":
    main()
