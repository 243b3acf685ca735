"""Where does each method stop scaling? Predicted steps from 2 to 4096 ranks.

    python benchmarks/netlab.py --hosts 2 --rate 1gbit python -m mpicomp.bench network --out n.json
    python benchmarks/scaling.py --network n.json --plot docs/scaling.svg

The model behind `python -m mpicomp.advise`, fed with what was measured: the alpha and beta of the
collectives, the backward pass of the model, and each compressor on its gradients, played among as
many ranks. One rank a host. What is gathered grows with the number of ranks, what is reduced does
not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _models import MODELS, loss_of, sample
from _sides import make_side

from mpicomp.advise.forecast import Forecast, record_workload
from mpicomp.bench import report
from mpicomp.bench.workload import Workload
from mpicomp.predict.choose import DENSE
from mpicomp.predict.network import Network, load

SPECS = (
    DENSE,
    "bf16",
    "powersgd:rank=2",
    "topk:density=0.001",
    "topk:density=0.01",
    "gtopk:density=0.01",
    "oktopk:density=0.01",
    "deft:density=0.01",
    "sketch:density=0.01",
    "onebit",
)
RANKS = tuple(1 << shift for shift in range(1, 13))
FEW, MANY = 8, 512
GATHERED, REDUCED = "topk:density=0.001", "powersgd:rank=2"
GROWTH, STAYS = 10.0, 2.0
BUCKET_BYTES = 25 * 2**20
TARGET = (
    f"time on the wire from {FEW} to {MANY} ranks: at least {GROWTH:g} times as long for "
    f"{GATHERED}, at most {STAYS:g} times for {REDUCED}"
)
Row = dict[str, Any]


def predict(args: argparse.Namespace, network: Network) -> list[Row]:
    side = make_side("alone", args.model)
    data = sample(args.model, args.batch, rank=0)
    workload = Workload(side.model, [data], loss_of, side.optimizer)
    timeline, grads = record_workload(workload, args.steps)
    params = list(side.model.named_parameters())
    forecast = Forecast(timeline, grads, params, BUCKET_BYTES, contention=0.0)
    rows = []
    for spec in SPECS:
        for ranks in RANKS:
            cluster = network.with_ranks(ranks)
            step = forecast.step(spec, cluster)
            rows.append(
                {
                    "compression": spec,
                    "ranks": ranks,
                    "step_ms": 1e3 * step.seconds,
                    "wire_ms": 1e3 * step.communicate_seconds,
                    "speedup": forecast.speedup(spec, cluster),
                }
            )
    return rows


def of(rows: Sequence[Row], spec: str) -> list[Row]:
    return [row for row in rows if row["compression"] == spec]


def growth(rows: Sequence[Row], spec: str) -> float:
    """How many times as long ``spec`` is on the wire with many ranks as with few."""
    wire = {row["ranks"]: row["wire_ms"] for row in of(rows, spec)}
    return float(wire[MANY] / wire[FEW])


def draw(rows: Sequence[Row], path: str) -> None:
    plots = report.pyplot()
    figure, (left, right) = plots.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for spec in SPECS:
        own = of(rows, spec)
        style = {"color": "black", "linewidth": 2.5} if spec == DENSE else {}
        ranks = [row["ranks"] for row in own]
        left.plot(ranks, [row["wire_ms"] for row in own], label=spec, **style)
        right.plot(ranks, [row["step_ms"] for row in own], label=spec, **style)
    for axes, name in ((left, "on the wire"), (right, "a step")):
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel=f"{name}, ms (predicted)")
        axes.grid(which="major", color="#dddddd", linewidth=0.6)
    right.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    report.save(figure, path)
    plots.close(figure)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--network", required=True, help="what mpicomp.bench network has written")
    parser.add_argument("--model", choices=MODELS, default="25M")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5, help="training steps to measure")
    parser.add_argument("--out", metavar="FILE", help="write the JSON here as well")
    parser.add_argument("--plot", metavar="FILE", help="write a picture (needs matplotlib)")
    return parser.parse_args()


def main() -> None:
    args = options()
    torch.set_num_threads(1)
    network = load(args.network).network
    rows = predict(args, network)
    print(f"{'ranks':>22}" + "".join(f"{ranks:>9}" for ranks in RANKS))
    for spec in SPECS:
        for name in ("step_ms", "wire_ms"):
            cells = "".join(f"{row[name]:9.0f}" for row in of(rows, spec))
            print(f"{spec if name == 'step_ms' else '  on the wire':>22}{cells}")
    if args.plot:
        draw(rows, args.plot)
    holds = growth(rows, GATHERED) >= GROWTH and growth(rows, REDUCED) <= STAYS
    links = {kind: (link.alpha, link.beta) for kind, link in network.across.items()}
    about = {"model": args.model, "batch": args.batch, "links": links}
    result = {"benchmark": "scaling", **about, "rows": rows, "target": TARGET, "holds": holds}
    print(json.dumps(result))
    if args.out:
        Path(args.out).write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
