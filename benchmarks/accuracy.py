"""What does compression cost in accuracy, and save in bytes, on handwritten digits?

    python benchmarks/accuracy.py

Runs ``mpicomp-launch -np 2 python examples/digits.py`` for each method and seed, with an equal
number of steps, and reads what it prints.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "digits.py"
METHODS = ["none", "fp16", "bf16", "topk:density=0.01", "powersgd:rank=2"]
POINTS = 1.0
TARGET = f"mean held-out accuracy within {POINTS:g} point of none, with an equal number of steps"


def train(method: str, seed: int, args: argparse.Namespace) -> tuple[float, float, float]:
    """Held-out accuracy in percent, bytes a step, and those as a percentage of dense."""
    launch = [sys.executable, "-m", "mpicomp_launch", "-np", str(args.ranks), sys.executable]
    options = ["--compression", method, "--seed", str(seed), "--steps", str(args.steps)]
    run = subprocess.run([*launch, EXAMPLE, *options], stdout=subprocess.PIPE, text=True)
    if run.returncode != 0:
        raise SystemExit(f"{method}, seed {seed}: exit status {run.returncode}\n{run.stdout}")
    traffic = re.findall(r"bytes/step ([\d,]+) \(([\d.]+)% of dense\)", run.stdout)
    num_bytes = statistics.mean(float(sent.replace(",", "")) for sent, _ in traffic)
    share = statistics.mean(float(percent) for _, percent in traffic)
    return float(re.findall(r"final held-out accuracy ([\d.]+) %", run.stdout)[0]), num_bytes, share


def measure(method: str, args: argparse.Namespace) -> dict[str, str | float]:
    runs = [train(method, seed, args) for seed in range(args.seeds)]
    accuracy = [accuracy for accuracy, _, _ in runs]
    return {
        "compression": method,
        "accuracy_mean": statistics.mean(accuracy),
        "accuracy_min": min(accuracy),
        "accuracy_max": max(accuracy),
        "bytes_per_step": statistics.mean(num_bytes for _, num_bytes, _ in runs),
        "percent_of_dense": statistics.mean(share for _, _, share in runs),
    }


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--compression", nargs="*", default=METHODS[1:], help="beside none")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=660)
    return parser.parse_args()


def main() -> None:
    args = options()
    print(f"{'compression':20}{'accuracy':>10}{'min':>8}{'max':>8}{'bytes/step':>12}{'dense':>10}")
    rows = []
    for method in [METHODS[0], *args.compression]:
        row = measure(method, args)
        rows.append(row)
        print(
            f"{method:20}{row['accuracy_mean']:>8.2f} %{row['accuracy_min']:>8.2f}"
            f"{row['accuracy_max']:>8.2f}{row['bytes_per_step']:>12,.0f}"
            f"{row['percent_of_dense']:>8.2f} %",
            flush=True,
        )
    plain = float(rows[0]["accuracy_mean"])
    holds = all(float(row["accuracy_mean"]) >= plain - POINTS for row in rows)
    print(json.dumps({"benchmark": "accuracy", "rows": rows, "target": TARGET, "holds": holds}))


if __name__ == "__main__":
    main()
