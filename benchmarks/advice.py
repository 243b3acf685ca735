"""Is the advice right? Predicted steps against measured ones, and "auto" against every choice.

    mpicomp-launch -np 2 --tag none python benchmarks/advice.py
    python benchmarks/netlab.py --hosts 3 --rate 1gbit python benchmarks/advice.py

First what `mpicomp.advise` would do here: the network, a backward pass and the compressors are
measured, and the step is predicted for each. Then each trains for real, in turns with all others,
and so does ``compression="auto"`` once it has made its choice. All sides have the same candidates.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _models import MODELS, Side, loss_of, sample
from _sides import make_side
from _turns import Turns, differences, median, take_turns, time_block
from torch import Tensor

import mpicomp
from mpicomp.advise.__main__ import PROBES
from mpicomp.advise.forecast import Forecast, record_workload
from mpicomp.auto import CANDIDATES, MOST_TRIALS, SETTLING_STEPS, TIMED_STEPS
from mpicomp.bench.workload import Workload
from mpicomp.predict import measure
from mpicomp.predict.choose import DENSE

MEDIAN_ERROR, WORSE_THAN_DENSE, WORSE_THAN_BEST = 0.15, 0.03, 0.10
TARGET = (
    f"median error of predicted steps under {MEDIAN_ERROR:.0%}; auto at most "
    f"{WORSE_THAN_DENSE:.0%} slower than no compression and {WORSE_THAN_BEST:.0%} slower than the "
    "best fixed choice"
)
Row = dict[str, Any]


def predictions(model_name: str, data: tuple[Tensor, Tensor]) -> tuple[dict[str, float], Row]:
    """Milliseconds of a step with each compressor, and the network that they are for."""
    side = make_side("alone", model_name)
    workload = Workload(side.model, [data], loss_of, side.optimizer)
    mpicomp.barrier()
    timeline, grads = record_workload(workload, 5)
    params = list(side.model.named_parameters())
    forecast = Forecast(timeline, grads, params, 25 * 2**20, measure.contention())
    network = measure.measure(PROBES).network
    steps = {}
    for spec in (DENSE, *CANDIDATES):
        mpicomp.barrier()
        steps[spec] = 1e3 * forecast.step(spec, network).seconds
    links = {kind: (link.alpha, link.beta) for kind, link in network.across.items()}
    about = {
        "compute_ms": 1e3 * timeline.step_seconds,
        "contention": forecast.contention,
        "across": links,
    }
    return steps, about


def settle(side: Side, data: tuple[Tensor, Tensor]) -> None:
    """Train until "auto" stays with its choice."""
    for _ in range((SETTLING_STEPS + TIMED_STEPS) * (1 + MOST_TRIALS) + 1):
        side.step(*data)


def measure_sides(args: argparse.Namespace, data: tuple[Tensor, Tensor]) -> dict[str, Any]:
    sides = {name: make_side(name, args.model) for name in (DENSE, *CANDIDATES, "auto")}
    settle(sides["auto"], data)
    steps = {name: partial(side.step, *data) for name, side in sides.items()}
    turns = {}
    for name in sides:
        time_block(steps[name], 1)
        seconds = time_block(steps[name], 1)
        turns[name] = Turns(args.rounds, args.steps).within(seconds, args.seconds_per_side)
    return take_turns(steps, turns)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="25M")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9, help="blocks for each side, at most")
    parser.add_argument("--steps", type=int, default=2, help="steps in a block, at most")
    parser.add_argument("--seconds-per-side", type=float, default=30.0)
    parser.add_argument("--rate", default="", help="of the links, for the record")
    parser.add_argument("--out", metavar="FILE", help="write the JSON here as well")
    return parser.parse_args()


def main() -> None:
    args = options()
    torch.set_num_threads(1)
    mpicomp.init()
    data = sample(args.model, args.batch, mpicomp.rank())
    predicted, about = predictions(args.model, data)
    blocks = measure_sides(args, data)
    if mpicomp.rank():
        return
    measured = {name: median(block) for name, block in blocks.items()}
    rows: list[Row] = []
    for name, value in measured.items():
        row: Row = {"compression": name, "measured_ms": value}
        present = [block for block in blocks[name] if block is not None]
        row["quartiles_ms"] = statistics.quantiles(present, n=4, method="inclusive")[::2]
        if name in predicted:
            row |= {"predicted_ms": predicted[name], "error": predicted[name] / value - 1}
        rows.append(row)
        print(
            "   ".join(f"{k} {v:.2f}" if type(v) is float else f"{k} {v}" for k, v in row.items())
        )
    error = statistics.median(abs(row["error"]) for row in rows if "error" in row)
    best = min((name for name in measured if name != "auto"), key=measured.__getitem__)
    over_dense, over_best = (
        statistics.median(differences(blocks["auto"], blocks[name])) / measured[name]
        for name in (DENSE, best)
    )
    holds = error < MEDIAN_ERROR and over_dense <= WORSE_THAN_DENSE and over_best <= WORSE_THAN_BEST
    where = {"model": args.model, "batch": args.batch, "rate": args.rate, "ranks": mpicomp.size()}
    verdict = {"median_error": error, "best": best}
    verdict |= {"auto_over_dense": over_dense, "auto_over_best": over_best}
    record = {"benchmark": "advice", **where, **about, "rows": rows, **verdict}
    text = json.dumps({**record, "target": TARGET, "holds": holds})
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
