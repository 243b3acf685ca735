"""What does each method cost in accuracy, and save in bytes, when it trains a network?

    python benchmarks/accuracy.py                           # handwritten digits
    python benchmarks/accuracy.py --task language_model     # bytes of source text

Runs ``mpicomp-launch -np 2 python examples/TASK.py`` for each method and seed, with an equal
number of steps and the settings of the example, and reads what it prints.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from _methods import SPECS, check_complete, has_momentum

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@dataclass(frozen=True)
class Task:
    """One example: how it is run, what it prints, and how far behind is behind."""

    options: tuple[str, ...]
    metric: str  # what stands before the number in the last line
    better: int  # 1: higher is better, -1: lower is
    margin: float
    own_momentum: tuple[str, ...]  # options for a method that applies momentum itself
    no_momentum: str  # option of such a method, where the example's optimizer has its own


TASKS = {
    "digits": Task(
        options=("--steps", "330"),
        metric="held-out accuracy",
        better=1,
        margin=2.0,
        own_momentum=("--momentum", "0"),
        no_momentum="",
    ),
    "language_model": Task(
        options=("--size", "130k", "--steps", "300", "--context", "64", "--lr", "3e-3"),
        metric="held-out bits/byte",
        better=-1,
        margin=0.1,
        own_momentum=(),
        no_momentum="momentum=0",
    ),
}


def train(spec: str, seed: int, args: argparse.Namespace) -> tuple[float, float, float]:
    """The metric, bytes a step, and those as a percentage of dense."""
    how = TASKS[args.task]
    options = [*how.options, "--seed", str(seed)]
    if args.steps is not None:
        options += ["--steps", str(args.steps)]
    if has_momentum(spec):
        options += how.own_momentum
        if how.no_momentum:
            spec += ("," if ":" in spec else ":") + how.no_momentum
    launch = [sys.executable, "-m", "mpicomp_launch", "-np", str(args.ranks)]
    launch += ["--tag", "none", sys.executable]
    command = [*launch, str(EXAMPLES / f"{args.task}.py"), "--compression", spec, *options]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if run.returncode != 0:
        raise SystemExit(f"{spec}, seed {seed}: exit status {run.returncode}\n{run.stdout}")
    traffic = re.findall(r"bytes/step ([\d,]+) \(([\d.]+)% of dense\)", run.stdout)
    num_bytes = statistics.mean(float(sent.replace(",", "")) for sent, _ in traffic)
    share = statistics.mean(float(percent) for _, percent in traffic)
    return float(re.findall(rf"final {how.metric} (\S+)", run.stdout)[0]), num_bytes, share


def measure(spec: str, args: argparse.Namespace) -> dict[str, str | float]:
    runs = [train(spec, seed, args) for seed in range(args.seeds)]
    metric = [metric for metric, _, _ in runs]
    return {
        "compression": spec,
        "mean": statistics.mean(metric),
        "min": min(metric),
        "max": max(metric),
        "bytes_per_step": statistics.mean(num_bytes for _, num_bytes, _ in runs),
        "percent_of_dense": statistics.mean(share for _, _, share in runs),
    }


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--compression", nargs="*", default=SPECS[1:], help="beside none")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="None: those of the task")
    return parser.parse_args()


def main() -> None:
    args = options()
    check_complete()
    task = TASKS[args.task]
    print(f"{'compression':24}{task.metric:>20}{'min':>8}{'max':>8}{'bytes/step':>12}{'dense':>10}")
    rows: list[dict[str, str | float]] = []
    for spec in [SPECS[0], *args.compression]:
        row = measure(spec, args)
        plain = (rows or [row])[0]
        row["behind"] = task.better * (float(plain["mean"]) - float(row["mean"]))
        rows.append(row)
        print(
            f"{spec:24}{row['mean']:>20.3f}{row['min']:>8.3f}{row['max']:>8.3f}"
            f"{row['bytes_per_step']:>12,.0f}{row['percent_of_dense']:>8.2f} %",
            flush=True,
        )
    target = f"mean {task.metric} within {task.margin:g} of none, with an equal number of steps"
    holds = all(float(row["behind"]) <= task.margin for row in rows)
    print(
        json.dumps(
            {
                "benchmark": f"accuracy, {args.task}",
                "rows": rows,
                "target": target,
                "holds": holds,
            }
        )
    )


if __name__ == "__main__":
    main()
