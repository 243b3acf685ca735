"""How much does each way to exchange gradients add to a training step?

    mpicomp-launch -np 2 --tag none python benchmarks/overhead.py

Overhead is a step minus the same step without communication (``alone``). The peers are
DistributedDataParallel over Gloo (``ddp``), bare or with PyTorch's own hooks (``ddp+fp16``,
``ddp+powersgd``), and one blocking call of MPI after backward (``mpi``); mpicomp takes part once
for each ``--compression``. One thread a rank. The sides take turns, a block of steps each, and a
block counts on the rank that takes longest; overhead is compared within a round. A side whose
steps are slow takes part in fewer rounds, at least three.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _ddp import powersgd_trial
from _gloo import start_gloo
from _models import MODELS, RESNET, Side, sample
from _sides import PEERS, close, make_side
from _turns import Turns, differences, median, take_turns, time_block

import mpicomp

THEIRS = [name for name in PEERS if name != "alone"]
OURS = "none", "fp16", "powersgd:rank=2", "acpsgd:rank=2", "topk:density=0.001"
OF_DDP_ON_ONE_HOST, OF_DDP, BEST_OF_HOOK, POWERSGD_OF_HOOK = 0.5, 1.0, 0.3, 0.6
TARGET = (
    f"overhead: none at most {OF_DDP_ON_ONE_HOST:g} of DDP's on one host and {OF_DDP:g} across "
    f"hosts; across hosts the best compressor at most {BEST_OF_HOOK:g} and powersgd:rank=2 at most "
    f"{POWERSGD_OF_HOOK:g} of that of DDP with the PowerSGD hook"
)

TRIALS = 3

Row = dict[str, Any]

# ----------------------------------------------------------------------------------- measuring


def measure(sides: dict[str, Side], model: str, batch: int, args: argparse.Namespace) -> list[Row]:
    """A row for each side."""
    data = sample(model, batch, mpicomp.rank())
    steps = {name: partial(side.step, *data) for name, side in sides.items()}
    turns, num_bytes = {}, {}
    for name, side in sides.items():
        first = partial(time_block, steps[name], 1)
        first()  # buckets are rebuilt after the first step, the hook compresses after the second
        num_bytes[name] = side.bytes_of(first, 2)
        seconds = time_block(steps[name], 1)
        turns[name] = Turns(args.rounds, args.steps).within(seconds, args.seconds_per_side)
    turns["alone"] = Turns(args.rounds, args.steps)  # the others are compared with it
    blocks = take_turns(steps, turns)
    where = {"model": model, "batch": batch, "hosts": num_hosts(), "ranks": mpicomp.size()}
    rows = []
    for name in sides:
        more = differences(blocks[name], blocks["alone"])
        quartiles = statistics.quantiles(more, n=4, method="inclusive")
        low, middle, high = (round(q, 3) for q in quartiles)
        row: Row = {**where, "side": name, "step_ms": round(median(blocks[name]), 3)}
        row |= {"overhead_ms": middle, "quartiles_ms": [low, high]}
        row |= {"bytes_sent": num_bytes[name], "rounds": len(more), "steps": turns[name].steps}
        rows.append(row)
    return rows


def num_hosts() -> int:
    firsts = mpicomp.allreduce(torch.tensor(int(mpicomp.local_rank() == 0)), op=mpicomp.Sum)
    return int(firsts)


# ------------------------------------------------------------------------------------- judging


def compare(rows: list[Row]) -> list[Row]:
    """What the target says of the sides of one model and batch that took part."""
    overhead = {row["side"]: row["overhead_ms"] for row in rows}
    across = rows[0]["hosts"] > 1
    compressed = [name for name in overhead if name not in (*PEERS, "none")]
    pairs = [("none", "ddp", OF_DDP if across else OF_DDP_ON_ONE_HOST)]
    if across and compressed:
        best = min(compressed, key=overhead.__getitem__)
        pairs.append((best, "ddp+powersgd", BEST_OF_HOOK))
        pairs.append(("powersgd:rank=2", "ddp+powersgd", POWERSGD_OF_HOOK))
    return [
        {
            **{key: rows[0][key] for key in ("model", "batch", "hosts", "ranks")},
            **{"side": mine, "peer": peer, "limit": limit},
            "ratio": overhead[mine] / overhead[peer],
            "holds": overhead[mine] <= limit * overhead[peer],
        }
        for mine, peer, limit in pairs
        if mine in overhead and peer in overhead
    ]


def show(rows: list[Row], comparisons: list[Row]) -> None:
    where = "model {model}, batch {batch}, {ranks} ranks on {hosts} host(s)"
    print(where.format(**rows[0]))
    print(
        f"{'side':<28}{'step':>9}{'overhead':>10}{'quartiles':>20}{'bytes sent':>14}{'rounds':>8}"
    )
    for row in rows:
        quartiles = " to ".join(f"{value:.1f}" for value in row["quartiles_ms"])
        print(
            f"{row['side']:<28}{row['step_ms']:>9.1f}{row['overhead_ms']:>10.1f}{quartiles:>20}"
            f"{row['bytes_sent']:>14,}{row['rounds']:>8}"
        )
    for row in comparisons:
        verdict = "holds" if row["holds"] else "does not hold"
        print("{side} / {peer}: {ratio:.2f}, at most {limit:g}: ".format(**row) + verdict)
    print(flush=True)


# ---------------------------------------------------------------------------------------- main


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", choices=MODELS, nargs="*", default=["25M", RESNET])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4], help="samples a rank")
    parser.add_argument("--rounds", type=int, default=15, help="blocks for each side, at most")
    parser.add_argument("--steps", type=int, default=3, help="steps in a block, at most")
    parser.add_argument("--seconds-per-side", type=float, default=20, help="for its blocks, about")
    parser.add_argument("--sides", choices=THEIRS, nargs="*", default=THEIRS, help="peers")
    parser.add_argument("--compression", metavar="SPEC", nargs="*", default=OURS, help="ours")
    parser.add_argument(
        "--powersgd-buckets",
        type=int,
        default=0,
        metavar="N",
        help=f"try the PowerSGD hook with N buckets too, {TRIALS} times in processes of their own, "
        "and record how they end; 0: not",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the last line here too")
    return parser.parse_args()


def main() -> None:
    args = options()
    torch.set_num_threads(1)
    mpicomp.init()
    start_gloo()
    rows: list[Row] = []
    comparisons: list[Row] = []
    trials: list[Row] = []
    for model in args.model:
        sides = {name: make_side(name, model) for name in ("alone", *args.sides, *args.compression)}
        for batch in args.batch:
            new = measure(sides, model, batch, args)
            rows += new
            comparisons += compare(new)
            if mpicomp.rank() == 0:
                show(new, compare(new))
            for _ in range(TRIALS if args.powersgd_buckets else 0):
                trials.append(powersgd_trial(model, batch, args.powersgd_buckets))
                if mpicomp.rank() == 0:
                    print(json.dumps(trials[-1]), flush=True)
        for side in sides.values():
            close(side)
    if mpicomp.rank() == 0:
        good = all(row["holds"] for row in comparisons)
        result = {"rows": rows, "powersgd_trials": trials, "comparisons": comparisons}
        line = json.dumps({"benchmark": "overhead", **result, "target": TARGET, "holds": good})
        if args.out:
            args.out.write_text(line + "\n")
        print(line)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
