"""`python -m mpicomp.advise --model MODULE:FACTORY`: does compression pay here, and which?

Measures this model's backward pass, the compressors on its gradients and, where several ranks were
started, the network; then predicts training steps with as many ranks as you like. It speaks of
time only: what a compressor does to accuracy depends on the model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

import mpicomp
from mpicomp import settings
from mpicomp import world as _world
from mpicomp.advise.forecast import WIDEST, Forecast, record_workload
from mpicomp.advise.picture import draw
from mpicomp.bench import report
from mpicomp.bench.numbers import count, quantity
from mpicomp.bench.workload import load
from mpicomp.compress.rules import resolve
from mpicomp.errors import MpicompError
from mpicomp.predict import measure
from mpicomp.predict.choose import DENSE, LEAST_GAIN
from mpicomp.predict.network import Network, Profile
from mpicomp.predict.network import load as load_profile

SPECS = ("bf16", "int8", "powersgd:rank=2", "topk:density=0.01", "sketch:density=0.01", "onebit")
PROBES = [1 << shift for shift in (10, 13, 16, 18, 20, 22, 24)]  # bytes
MICROSECOND = 1e-6


def network_of(args: argparse.Namespace, device: torch.device) -> Network:
    """Loaded, measured, or what ``--bandwidth`` and ``--latency`` say."""
    profile: Profile | None = None
    if args.network:
        profile = load_profile(args.network)
        if not args.foreign_network:
            profile.check_machine(measure.machine(device))
    elif mpicomp.size() > 1:
        profile = measure.measure(PROBES, device=device)
    network = profile.network if profile else Network(1, 1, {}, {})
    if args.bandwidth is not None:
        if not args.bandwidth > 0:
            raise ValueError(f"advise: --bandwidth must be above 0, got {args.bandwidth}")
        network = network.with_link(gigabits=args.bandwidth, alpha=args.latency * MICROSECOND)
    if not network.across and not network.within:
        raise MpicompError(
            "advise: the network must be known, got a single rank; start several ranks, give a "
            "profile by --network, or say --bandwidth and --latency"
        )
    return network


def row_of(
    forecast: Forecast, compression: str, network: Network, *, local: bool
) -> dict[str, Any]:
    """What the tables and the JSON tell of one compressor."""
    step = forecast.step(compression, network)
    return {
        "ranks": network.ranks,
        "compression": compression,
        "step_ms": 1e3 * step.seconds,
        "overhead_ms": 1e3 * step.overhead_seconds,
        "encode_ms": 1e3 * step.encode_seconds,
        "communicate_ms": 1e3 * step.communicate_seconds,
        "decode_ms": 1e3 * step.decode_seconds,
        "speedup": forecast.speedup(compression, network),
        "break_even_gbps": None if local else forecast.break_even(compression, network),
    }


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence: which to use with so many ranks, if any."""
    dense = next(row for row in rows if row["compression"] == DENSE)
    best = min(rows, key=lambda row: row["step_ms"])
    head = f"{best['ranks']} ranks: "
    gain = 1 - best["step_ms"] / dense["step_ms"]
    others = [row for row in rows if row is not dense]
    if not others:
        return f"{head}no compression makes {dense['step_ms']:.1f} ms a step."
    if gain < LEAST_GAIN:
        nearest = min(others, key=lambda row: row["step_ms"])
        return (
            f"{head}use no compression; none pays. The nearest, {nearest['compression']}, makes "
            f"{nearest['step_ms']:.1f} ms of {dense['step_ms']:.1f} ms a step."
        )
    return (
        f"{head}use {best['compression']}: {best['step_ms']:.1f} ms a step, not "
        f"{dense['step_ms']:.1f} ms ({best['speedup']:.2f} times as fast)."
    )


def bandwidth_text(row: dict[str, Any], *, local: bool) -> str:
    gigabits = row["break_even_gbps"]
    if local or row["compression"] == DENSE:
        return ""
    if gigabits is None:
        return "never pays"
    return "always pays" if gigabits == WIDEST else f"{gigabits:.2f}"


def show(rows: Sequence[dict[str, Any]], *, local: bool) -> None:
    columns = ["compression", "step ms", "overhead", "encode", "on the wire", "decode", "speed-up"]
    cells = [
        [
            row["compression"],
            *(f"{row[f'{name}_ms']:.1f}" for name in ("step", "overhead", "encode")),
            *(f"{row[f'{name}_ms']:.1f}" for name in ("communicate", "decode")),
            f"{row['speedup']:.2f}",
            bandwidth_text(row, local=local),
        ]
        for row in rows
    ]
    report.table(f"{rows[0]['ranks']} ranks", [*columns, "pays below, Gb/s"], cells)


def advise(args: argparse.Namespace) -> None:
    for spec in args.compression:
        resolve(spec)  # a mistake shows before anything is measured
    workload = load(args.model)
    network = network_of(args, workload.device)
    clusters = [network.with_ranks(n) for n in args.ranks or [max(mpicomp.size(), 2)]]
    timeline, grads = record_workload(workload, args.steps)
    params = [(n, p) for n, p in workload.model.named_parameters() if p.requires_grad]
    bucket_bytes = settings.read().fusion_mb * 2**20
    forecast = Forecast(timeline, grads, params, bucket_bytes, measure.contention())
    specs = [DENSE, *(spec for spec in args.compression if spec != DENSE)]
    tables = []
    for cluster in clusters:
        local = cluster.hosts == 1
        tables.append([row_of(forecast, spec, cluster, local=local) for spec in specs])
        _world.wait(_world.get().communicator.barrier(), "the end of a forecast")
        if mpicomp.rank() == 0:
            show(tables[-1], local=local)
    if mpicomp.rank() == 0:
        for rows in tables:
            print(verdict(rows))
        print("Times only: what a compressor does to accuracy depends on the model.")
        if args.out:
            record = {"advise": args.model, "compute_ms": 1e3 * timeline.step_seconds}
            every = [row for rows in tables for row in rows]
            report.write_json(args.out, {**record, "rows": every})
        if args.plot:
            draw(forecast, specs, clusters[0], args.plot)


def ranks_list(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def options(words: Sequence[str] | None) -> argparse.Namespace:
    _, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(prog="python -m mpicomp.advise", description=rest)
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODULE:FACTORY",
        help="or FILE.py:FACTORY: a function that returns a mpicomp.bench.workload.Workload",
    )
    parser.add_argument("--ranks", type=ranks_list, metavar="N,N", help="by default those at hand")
    parser.add_argument(
        "--compression",
        nargs="+",
        metavar="SPEC",
        default=list(SPECS),
        help="by default " + ", ".join(SPECS),
    )
    parser.add_argument("--network", metavar="FILE", help="what mpicomp.bench network has written")
    parser.add_argument(
        "--foreign-network", action="store_true", help="the profile may be of another machine"
    )
    parser.add_argument("--bandwidth", type=float, metavar="GBPS", help="between hosts, in Gb/s")
    parser.add_argument(
        "--latency",
        type=quantity,
        metavar="US",
        default=20.0,
        help="with --bandwidth; microseconds",
    )
    parser.add_argument("--steps", type=count, default=5, help="training steps to measure")
    parser.add_argument("--out", metavar="FILE", help="write JSON")
    parser.add_argument("--plot", metavar="FILE", help="write a picture (needs matplotlib)")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    args = options(words)
    try:
        mpicomp.init()
        report.check_writable(args.out, args.plot)
        advise(args)
    except (MpicompError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
