"""`python -m mpicomp.bench network | compressors | model`, under any launcher."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

import mpicomp
from mpicomp.bench import model as phases
from mpicomp.bench import report
from mpicomp.bench.numbers import count, megabytes
from mpicomp.compress import available
from mpicomp.compress.rules import assign
from mpicomp.errors import MpicompError
from mpicomp.fusion import plan
from mpicomp.predict import measure as network
from mpicomp.predict import methods

KB, MB = 1 << 10, 1 << 20
SIZES = [KB << shift for shift in range(0, 19, 2)]  # 1 KB to 256 MB
ROWS = 1024  # of the matrix that compressors are given


def device_of(name: str | None) -> torch.device:
    """What ``--device`` says, or the GPU of this rank's number on its host, or the CPU."""
    if name is None and torch.cuda.is_available():
        name = f"cuda:{mpicomp.local_rank() % torch.cuda.device_count()}"
    try:
        return torch.empty(0, device=name or "cpu").device
    except (RuntimeError, AssertionError) as error:  # unknown, or not in this torch or machine
        raise MpicompError(
            f"bench: --device must be one that torch has here, got {name!r}: {error}"
        ) from None


def run_network(args: argparse.Namespace) -> None:
    """Latency and bandwidth of collectives, and the alpha and beta that fit them."""
    sizes = [size for size in SIZES if size <= max(KB, args.most_mb * MB)]
    profile = network.measure(sizes, device=device_of(args.device))
    if mpicomp.rank():
        return
    rows = [
        [
            f"{sample.collective} {level}",
            str(sample.ranks),
            f"{sample.num_bytes:,}",
            f"{1e6 * sample.seconds:,.1f}",
            f"{sample.num_bytes / sample.seconds / 1e6:,.1f}",
        ]
        for level, samples in profile.samples.items()
        for sample in samples
    ]
    report.table("Collectives", ["", "ranks", "bytes", "us", "MB/s"], rows)
    fitted = [
        [f"{kind} {level}", f"{1e6 * link.alpha:,.1f}", f"{link.gigabits:,.2f}"]
        for level in profile.samples
        for kind, link in getattr(profile.network, level).items()
    ]
    report.table("Fit", ["", "alpha, us", "1 / beta, Gb/s"], fitted)
    if not fitted:
        print("one rank: there is nothing to measure; start several, on hosts if you have them")
    if args.out:
        report.write_json(args.out, profile.as_json())
    if args.plot:
        report.draw_network(profile, args.plot)


def run_compressors(args: argparse.Namespace) -> None:
    """Encoding and decoding of one matrix, as one rank of ``--ranks``."""
    device = device_of(args.device)
    generator = torch.Generator().manual_seed(0)
    columns = max(1, int(args.megabytes * MB) // 4 // ROWS)
    matrix = torch.randn(ROWS, columns, generator=generator).to(device)
    record: list[dict[str, Any]] = []
    for spec in args.compression or available():
        chosen = assign(spec, [("matrix", tuple(matrix.shape), matrix.dtype)])
        (bucket,) = plan([("matrix", matrix)], chosen, float("inf"))
        cost = methods.measure(bucket, {"matrix": matrix}, args.ranks, repeats=args.repeats)
        record.append(
            {
                "compression": spec,
                "accumulate_ms": 1e3 * cost.accumulate_seconds,
                "encode_ms": 1e3 * cost.encode_seconds,
                "decode_ms": 1e3 * cost.decode_seconds,
                "bytes_sent": cost.num_bytes,
                "ratio": 4 * matrix.numel() / cost.num_bytes,
            }
        )
    if mpicomp.rank():
        return
    title = f"{4 * matrix.numel() / MB:.1f} MB of float32 on {device}, {args.ranks} ranks"
    names = ["compression", "accumulate ms", "encode ms", "decode ms", "bytes sent", "ratio"]
    rows = [[str(r["compression"]), *(f"{v:,.2f}" for v in list(r.values())[1:])] for r in record]
    report.table(title, names, rows)
    if args.out:
        report.write_json(args.out, {"bench": "compressors", "title": title, "rows": record})
    if args.plot:
        specs = [str(row["compression"]) for row in record]
        timed = ("accumulate", "encode", "decode")
        parts = {name: [row[f"{name}_ms"] for row in record] for name in timed}
        report.draw_bars(specs, parts, args.plot, label="milliseconds")


def run_model(args: argparse.Namespace) -> None:
    """The phases of training steps."""
    rows = phases.measure(args.model, args.compression, rounds=args.rounds, steps=args.steps)
    if mpicomp.rank():
        return
    cells = [
        [
            row["compression"],
            *(f"{row['phases_ms'][phase]:.1f}" for phase in phases.PHASES),
            f"{row['in_a_row_ms']:.1f}",
            f"{row['step_ms']:.1f} ({row['quartiles_ms'][0]:.1f} to {row['quartiles_ms'][1]:.1f})",
            f"{100 * row['hidden']:.0f} %",
        ]
        for row in rows
    ]
    columns = ["compression", *phases.PHASES, "in a row", "overlapped (quartiles)", "hidden"]
    synchronised = (
        "; the device is synchronised at their borders" if torch.cuda.is_available() else ""
    )
    report.table(f"Milliseconds a step, phases in a row{synchronised}", columns, cells)
    if args.out:
        record = {"bench": "model", "model": args.model, "ranks": mpicomp.size(), "rows": rows}
        report.write_json(args.out, record)
    if args.plot:
        report.draw_bars(
            [row["compression"] for row in rows],
            {phase: [row["phases_ms"][phase] for row in rows] for phase in phases.PHASES},
            args.plot,
            label="milliseconds a step, phases in a row",
            marks={"step, overlapped": [row["step_ms"] for row in rows]},
        )


def options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mpicomp.bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    out = argparse.ArgumentParser(add_help=False)
    out.add_argument("--out", metavar="FILE", help="write JSON")
    out.add_argument("--plot", metavar="FILE", help="write a picture (needs matplotlib)")

    added = commands.add_parser("network", parents=[out], help=run_network.__doc__)
    added.add_argument("--device", help="whose memory is sent; by default a GPU, if there is one")
    added.add_argument("--most-mb", type=megabytes, default=256.0, help="largest size, in MB")
    added.set_defaults(run=run_network)

    added = commands.add_parser("compressors", parents=[out], help=run_compressors.__doc__)
    added.add_argument("--compression", nargs="+", metavar="SPEC", help="by default all methods")
    added.add_argument(
        "--megabytes", type=megabytes, default=25.0, help="size of the matrix, in MB"
    )
    added.add_argument("--ranks", type=count, default=8, help="ranks to exchange with")
    added.add_argument(
        "--repeats", type=count, default=5, help="exchanges of which to take medians"
    )
    added.add_argument("--device", help="by default a GPU, if there is one")
    added.set_defaults(run=run_compressors)

    added = commands.add_parser("model", parents=[out], help=run_model.__doc__)
    added.add_argument(
        "--model",
        required=True,
        metavar="MODULE:FACTORY",
        help="or FILE.py:FACTORY: a function that returns a mpicomp.bench.workload.Workload",
    )
    specs = ["none", "powersgd:rank=2", "topk:density=0.01"]
    added.add_argument(
        "--compression",
        nargs="+",
        metavar="SPEC",
        default=specs,
        help="by default " + ", ".join(specs),
    )
    added.add_argument("--rounds", type=count, default=5, help="turns of each compressor")
    added.add_argument("--steps", type=count, default=3, help="steps of each kind in a turn")
    added.set_defaults(run=run_model)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    args = options(words)
    try:
        mpicomp.init()
        report.check_writable(args.out, args.plot)
        args.run(args)
    except (MpicompError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
