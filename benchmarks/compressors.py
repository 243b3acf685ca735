r"""What does each method cost in time and in bytes, and how far from the mean does it land?

    python benchmarks/compressors.py
    python benchmarks/compressors.py --save docs/results/compressors.json
    python benchmarks/compressors.py --load docs/results/compressors.json --markdown --plot \
        docs/compressors.svg

Every method gets gradients of the language model of the examples, of random batches, while the
model stays as it is. The ranks are simulated in this process.

Time: what the slower of two ranks spends until its last message leaves (``encode``, with the
gradient loaded into the bucket), and from the answer to it on (``decode``, with the memory brought
up to date and the mean written out), on one thread. All matrices are in one bucket. Methods and
copies of that bucket take turns within one run; medians, also as multiples of the copy.

Bytes: what a rank receives in a step, on average over ranks, counted from the messages. Formulas of
the settings have to agree with the counts, and tell the bytes of more ranks than can be simulated.
For a few methods the data decide how many elements are sent: their formulas take the number from
the count of two ranks. See ``_traffic``.

Error: of the mean gradient of 8 ranks after one step, and of the sum of all means after many, as
the norm of the difference over the norm of what is right. The sum shows what feedback makes up for.
Methods that apply momentum run without it, so that their sums are sums of gradients.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from _gradients import build_model, gradients
from _methods import SPECS, check_complete, has_momentum
from _traffic import Grads, count_bytes, predict_bytes
from language_model import load_text
from torch import Tensor

from mpicomp.compress import Bucket, Compressor, Exchange, Exchanged, Simulation, State, simulate
from mpicomp.compress.rules import resolve
from mpicomp.compress.simulate import bucket_of
from mpicomp.compress.wrapper import Wrapper

SIZE = "1M"
BATCH = 8
POOL = 64  # gradients, or as many as there are ranks
MANY = 1024  # ranks, for the formulas
RANKS = 8  # for the errors
COLD = 2  # steps before times count
AGREEMENT = 0.1

Row = dict[str, float | str | bool]

# ----------------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class Clock:
    """Seconds that each rank has spent in the current step."""

    encode: list[float] = field(default_factory=lambda: [0.0, 0.0])
    decode: list[float] = field(default_factory=lambda: [0.0, 0.0])


@dataclass(frozen=True)
class Timed(Wrapper):
    """Tells a clock how long the exchange of each rank takes, without the others."""

    inner: Compressor
    clock: Clock

    spec_options: ClassVar = {}

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        run, reply = self.inner.exchange(bucket, state), None
        while True:
            started = time.perf_counter()
            try:
                message = run.send(reply)
            except StopIteration as stop:
                self.clock.decode[bucket.rank] += time.perf_counter() - started
                outcome: Exchanged = stop.value
                return outcome
            self.clock.encode[bucket.rank] += time.perf_counter() - started
            reply = yield message


class Pair:
    """Two ranks with a bucket of all that the method compresses."""

    def __init__(self, spec: str, params: Grads) -> None:
        ((_, self.compressor),) = resolve(spec)
        helped = {n: p for n, p in params.items() if self.compressor.helps(tuple(p.shape))}
        dtype = self.compressor.bucket_dtype(torch.float32)
        self.buckets = [bucket_of(helped, dtype, rank=rank, size=2) for rank in range(2)]
        self.states = [self.compressor.init(bucket) for bucket in self.buckets]

    def step(self, grads: Sequence[Grads]) -> tuple[float, float]:
        """Seconds of the slower rank: to encode, and to decode."""
        clock = Clock()
        for bucket, state, own in zip(self.buckets, self.states, grads, strict=True):
            started = time.perf_counter()
            for name in bucket:
                self.compressor.load_(bucket, state, name, own[name])
            clock.encode[bucket.rank] += time.perf_counter() - started
        outcomes = simulate(Timed(self.compressor, clock), self.buckets, self.states)
        for bucket, outcome in zip(self.buckets, outcomes, strict=True):
            started = time.perf_counter()
            outcome.commit(frozenset())
            outcome.mean.store_(bucket)
            clock.decode[bucket.rank] += time.perf_counter() - started
        return max(clock.encode), max(clock.decode)

    def copy(self, target: Tensor) -> float:
        """Seconds that a copy of the bucket takes; the slower of two, as above."""
        seconds = []
        for bucket in self.buckets:
            started = time.perf_counter()
            target[: bucket.flat.numel()].copy_(bucket.flat)
            seconds.append(time.perf_counter() - started)
        return max(seconds)


def measure(specs: Sequence[str], pool: Sequence[Grads], repeats: int) -> dict[str, Row]:
    """Times of each method, in turns."""
    pairs = {spec: Pair(spec, pool[0]) for spec in specs}
    target = torch.empty(sum(grad.numel() for grad in pool[0].values()))
    grads = [{name: grad.clone() for name, grad in pool[rank].items()} for rank in range(2)]
    samples: dict[str, list[tuple[float, float, float]]] = {spec: [] for spec in specs}
    for step in range(COLD + repeats):
        for spec, pair in pairs.items():
            for rank, own in enumerate(grads):  # fresh in the cache, as after a backward pass
                for name, grad in pool[(2 * step + rank) % len(pool)].items():
                    own[name].copy_(grad)
            times = *pair.step(grads), pair.copy(target)
            if step >= COLD:
                samples[spec].append(times)
    copy = statistics.median(times[2] for taken in samples.values() for times in taken)
    rows: dict[str, Row] = {}
    for spec, taken in samples.items():
        encode, decode, _ = (statistics.median(column) for column in zip(*taken, strict=True))
        rows[spec] = {
            "encode_ms": 1e3 * encode,
            "decode_ms": 1e3 * decode,
            "memcpy_ms": 1e3 * copy,
            "encode_memcpys": encode / copy,
            "decode_memcpys": decode / copy,
        }
    return rows


# ---------------------------------------------------------------------------------- bytes, error


def traffic(spec: str, pool: Sequence[Grads], sizes: Sequence[int]) -> Row:
    """Bytes counted and by formula, and whether they agree."""
    counted = {size: count_bytes(spec, pool, size=size) for size in {2, *sizes}}
    formula = {s: predict_bytes(spec, pool[0], counted[2], size=s) for s in (*sizes, MANY)}
    row: Row = {f"bytes_{size}": counted[size] for size in sizes}
    row[f"bytes_{MANY}"] = formula[MANY]
    row |= {f"formula_{size}": formula[size] for size in sizes}
    row["holds"] = all(abs(formula[s] - counted[s]) <= AGREEMENT * counted[s] for s in sizes)
    return row


def errors(spec: str, pool: Sequence[Grads], steps: int) -> Row:
    """Relative errors of the first mean, and of the sum of all."""
    if has_momentum(spec):
        spec += ",momentum=0" if ":" in spec else ":momentum=0"
    draw = torch.Generator().manual_seed(0)
    simulation = Simulation(spec, pool[0], size=RANKS)
    drawn = [0] * len(pool)  # how often each gradient took part
    total, first = torch.zeros(()), math.nan
    for step in range(steps):
        chosen = torch.randint(len(pool), (RANKS,), generator=draw).tolist()
        mean = simulation.step([pool[i] for i in chosen]).means[0]
        total = total + flat({name: mean[name] for name in pool[0]})  # in their order
        for i in chosen:
            drawn[i] += 1
        if step == 0:
            first = relative_error(total, pool, drawn)
    return {"error_1": first, "error_sum": relative_error(total, pool, drawn), "steps": steps}


def relative_error(total: Tensor, pool: Sequence[Grads], drawn: Sequence[int]) -> float:
    """Of a sum of means, where each gradient of the pool was drawn so often by any rank."""
    right = torch.zeros_like(total)
    for grads, times in zip(pool, drawn, strict=True):
        if times:
            right.add_(flat(grads), alpha=times / RANKS)
    return float((total - right).norm() / right.norm())


def flat(grads: Mapping[str, Tensor | None]) -> Tensor:
    """All elements, in fp64."""
    return torch.cat([grad.flatten().double() for grad in grads.values() if grad is not None])


# --------------------------------------------------------------------------------------- output


def human(num_bytes: float) -> str:
    unit = 1e6 if num_bytes >= 1e6 else 1e3
    return f"{num_bytes / unit:.3g} {'MB' if unit == 1e6 else 'kB'}"


def cells(row: Row) -> list[str]:
    """Spec, bytes, times and errors, for people."""
    traffic = [human(float(value)) for key, value in row.items() if key.startswith("bytes_")]
    times = [f"{float(row[f'{key}_memcpys']):.1f}" for key in ("encode", "decode")]
    return [str(row["compression"]), *traffic, *times] + [
        f"{float(row[key]):.2g}" for key in ("error_1", "error_sum")
    ]


def headings(row: Row) -> list[str]:
    ranks = [f"{key[6:]} ranks" for key in row if key.startswith("bytes_")]
    return ["compression", *ranks, "encode", "decode", "error: 1 step", f"{row['steps']} steps"]


def print_table(rows: Sequence[Row], *, markdown: bool) -> None:
    lines = [headings(rows[0]), *(cells(row) for row in rows)]
    if not markdown:
        for first, *rest in lines:
            print(f"{first:24}" + "".join(f"{cell:>14}" for cell in rest))
        return
    lines.insert(1, ["---"] + ["---:"] * (len(lines[0]) - 1))
    for number, (first, *rest) in enumerate(lines):
        print("| " + " | ".join([f"`{first}`" if number > 1 else first, *rest]) + " |")


def rounded(value: float | str | bool) -> float | str | bool:
    return float(f"{value:.8g}") if isinstance(value, float) else value


def save(result: dict[str, object], rows: Sequence[Row], path: Path) -> None:
    """JSON with a row in each line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    parts = [
        f'"{k}": ' + (f"[\n{lines}\n ]" if v is rows else json.dumps(v)) for k, v in result.items()
    ]
    path.write_text("{\n " + ",\n ".join(parts) + "\n}\n")


# ----------------------------------------------------------------------------------------- main


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--compression", nargs="*", help="specs, or all methods")
    parser.add_argument("--steps", type=int, default=100, help="for the error of the sum")
    parser.add_argument("--repeats", type=int, default=20, help="samples of each time")
    parser.add_argument(
        "--ranks", type=int, nargs="*", default=[2, 8, 64], help="to count bytes of"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--plot", type=Path, help="a picture to write; needs Matplotlib")
    parser.add_argument("--save", type=Path, help="JSON to write")
    parser.add_argument("--load", type=Path, help="JSON to take in place of measuring anew")
    return parser.parse_args()


def run(args: argparse.Namespace) -> list[Row]:
    torch.set_num_threads(1)
    if not args.compression:
        check_complete()
    specs = args.compression or SPECS
    text, _ = load_text()
    count = max(min(POOL, RANKS * args.steps), *args.ranks)
    pool = list(gradients(build_model(SIZE), text, batch=BATCH, count=count, seed=1))
    times = measure(specs, pool, args.repeats)
    rows = []
    for number, spec in enumerate(specs):
        row: Row = {"compression": spec, **traffic(spec, pool, args.ranks), **times[spec]}
        rows.append(row | errors(spec, pool, args.steps))
        print(f"{number + 1}/{len(specs)} {spec}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    args = options()
    rows: list[Row] = json.loads(args.load.read_text())["rows"] if args.load else run(args)
    rows = [{key: rounded(value) for key, value in row.items()} for row in rows]
    print_table(rows, markdown=args.markdown)
    result = {
        "benchmark": "compressors",
        "rows": rows,
        "target": f"bytes by formula within {AGREEMENT:.0%} of those counted",
        "holds": all(bool(row["holds"]) for row in rows),
    }
    if args.save:
        save(result, rows, args.save)
    if args.plot:
        from _chart import draw

        draw(rows, args.plot)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
