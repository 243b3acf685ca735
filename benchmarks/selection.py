"""How fast are the k elements of largest magnitude found, on one thread?

    python benchmarks/selection.py

Four sides take turns within one run: mpicomp's exact selection (``select``), ``torch.topk`` and
``numpy.argpartition`` (``argpart``) on the magnitudes, which they have to make first, and a copy of
the same bytes (``memcpy``), which is what a pass over memory costs. A sample of the fast sides is
the mean of a few calls back to back; the table has medians. The result of ``select`` is compared
with that of ``torch.topk`` in every row.

The numbers are Gaussian, heavy-tailed (cubes of Laplace), or the gradients of a few training steps
of the transformer in ``examples/language_model.py``, one step after another until there are enough.

A second table is about what the last step could tell, a threshold a tenth below the right one, and
about error feedback, where a gradient is added to a residual before the selection, into a third
vector. ``hinted`` selects with that threshold and no sample. ``then`` adds and selects afterwards,
as the library does; ``told`` does so with the threshold; ``during`` collects what is above it while
it adds, chunk by chunk. ``add`` is the addition alone, and ``add_`` that in place.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import Tensor

from mpicomp.compress.select import host, largest, search

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from language_model import SIZES, Transformer, load_text, loss_of, windows

MILLION = 1_000_000
REPEATS = {1 * MILLION: 15, 25 * MILLION: 5, 100 * MILLION: 3}  # elements -> samples for each side
DENSITIES = (0.0001, 0.001, 0.01, 0.1)
CALLS = {"select": 3, "memcpy": 3}  # in a sample; one for the others
AT, DENSITY = 25 * MILLION, 0.001  # where the target counts
TIMES_TOPK, MEMCPYS, MEMCPYS_HINTED, ADDITIONS = 15.0, 2.2, 1.5, 1.8
TARGET = (
    f"{AT // MILLION}M elements, density {DENSITY:g}: select at least {TIMES_TOPK:g} times as fast "
    f"as torch.topk and at most {MEMCPYS:g} times a memcpy; hinted at most {MEMCPYS_HINTED:g} "
    f"times a memcpy; during at most {ADDITIONS:g} times add_"
)

Side = Callable[[], object]
Row = dict[str, float | int | str | bool]

# ---------------------------------------------------------------------------------------- data


def gaussian(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0))


def heavy_tailed(numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    laplace = torch.empty(numel).exponential_(generator=generator)
    return laplace.pow_(3).mul_(torch.randint(0, 2, (numel,), generator=generator).mul_(2).sub_(1))


def gradients(numel: int) -> Tensor:
    """Of the matrices of the transformer, over as many steps as it takes."""
    torch.manual_seed(0)
    model = Transformer(SIZES["1M" if numel <= MILLION else "25M"], context=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text, _ = load_text()
    parts: list[Tensor] = []
    while sum(part.numel() for part in parts) < numel:
        starts = torch.randint(len(text) - 64, (4,))
        optimizer.zero_grad()
        loss_of(model, *windows(text, starts, 64)).backward()
        parts += [p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return torch.cat(parts)[:numel].contiguous()


DATA = {"gaussian": gaussian, "heavy-tailed": heavy_tailed, "gradients": gradients}

# ---------------------------------------------------------------------------------- first table


def make_sides(flat: Tensor, k: int) -> dict[str, Side]:
    array, copy = flat.numpy(), torch.empty_like(flat)
    return {
        "select": lambda: largest(flat, k),
        "topk": lambda: torch.topk(flat.abs(), k, sorted=False).indices,
        "argpart": lambda: np.argpartition(np.abs(array), flat.numel() - k)[-k:],
        "memcpy": lambda: copy.copy_(flat),
    }


def check(flat: Tensor, k: int) -> None:
    """Raise unless k different elements are chosen, none smaller than the k-th largest."""
    indices = largest(flat, k)
    chosen = torch.zeros(flat.numel(), dtype=torch.bool)
    chosen[indices] = True
    smallest = torch.topk(flat.abs(), k, sorted=False).values.min()
    if int(chosen.sum()) != k or bool(flat[indices].abs().min() < smallest):
        raise RuntimeError(f"select: the {k} largest of {flat.numel()} are others than those found")


def measure(sides: dict[str, Side], repeats: int) -> dict[str, float]:
    """Median milliseconds of each side, in turns that begin with another side each time."""
    names = list(sides)
    samples: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(repeats):
        first = turn % len(names)
        for side in names[first:] + names[:first]:
            calls = CALLS.get(side, 1)
            started = time.perf_counter()
            for _ in range(calls):
                sides[side]()
            samples[side].append(1e3 * (time.perf_counter() - started) / calls)
    return {side: statistics.median(own) for side, own in samples.items()}


def select_row(data: str, flat: Tensor, density: float, repeats: int) -> Row:
    k = max(1, int(flat.numel() * density))
    check(flat, k)
    ms = measure(make_sides(flat, k), repeats)
    row: Row = {"elements": flat.numel(), "data": data, "density": density}
    row |= {f"{side}_ms": value for side, value in ms.items()}
    row["times_topk"] = ms["topk"] / ms["select"]
    row["times_argpart"] = ms["argpart"] / ms["select"]
    row["memcpys"] = ms["select"] / ms["memcpy"]
    if (flat.numel(), density) == (AT, DENSITY):
        fast_enough = ms["topk"] >= TIMES_TOPK * ms["select"]
        row["holds"] = fast_enough and ms["select"] <= MEMCPYS * ms["memcpy"]
    return row


# --------------------------------------------------------------------------------- second table


def add_and_collect(out: Tensor, residual: Tensor, grad: Tensor, floor: np.int32) -> object:
    """Add by chunks, and collect what is above ``floor`` of each while it is in the cache."""
    numel, step = out.numel(), host.CHUNK_BYTES // out.element_size()
    found = []
    for start in range(0, numel, step):
        chunk = out[start : start + step]
        torch.add(residual[start : start + step], grad[start : start + step], out=chunk)
        part = host.above(chunk.view(torch.int32).numpy(), floor, limit=numel)
        assert part is not None
        found.append(part + start)
    return np.concatenate(found)


def feedback_row(data: str, grad: Tensor, repeats: int) -> Row:
    numel = grad.numel()
    k = int(numel * DENSITY)
    residual, in_place = grad.roll(numel // 2), grad.clone()
    out = residual + grad
    bits = out.view(torch.int32).numpy()
    smallest = 0.9 * out.abs()[largest(out, k)].min()
    floor = np.int32(smallest.view(torch.int32).item())

    def add() -> Tensor:
        return torch.add(residual, grad, out=out)

    def best(found: search.Array) -> object:
        return found[search.top(search.magnitudes(bits[found], np), k, np)]

    copy = torch.empty_like(out)
    sides: dict[str, Side] = {
        "hinted": lambda: best(host.above(bits, floor, limit=numel)),
        "memcpy": lambda: copy.copy_(out),
        "then": lambda: largest(add(), k),
        "told": lambda: best((add(), host.above(bits, floor, limit=numel))[1]),
        "during": lambda: best(add_and_collect(out, residual, grad, floor)),
        "add": add,
        "add_": lambda: in_place.add_(residual),
    }
    ms = measure(sides, repeats)
    hinted, additions = ms["hinted"] / ms["memcpy"], ms["during"] / ms["add_"]
    return {
        "elements": numel,
        "data": data,
        "density": DENSITY,
        **{f"{side}_ms": value for side, value in ms.items()},
        "during_per_then": ms["during"] / ms["then"],
        "hinted_memcpys": hinted,
        "during_per_add_": additions,
        "holds": hinted <= MEMCPYS_HINTED and additions <= ADDITIONS,
    }


# ----------------------------------------------------------------------------------------- main


def show(*cells: object) -> None:
    texts = [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells]
    print("".join(f"{text:>16}" for text in texts), flush=True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--sizes", default="1,25,100", help="millions of elements, by comma")
    parser.add_argument("--data", default=",".join(DATA), help="kinds of numbers, by comma")
    parser.add_argument("--repeats", type=float, default=1.0, help="times the usual samples")
    return parser.parse_args()


def main() -> None:
    args = options()
    torch.set_num_threads(1)
    sizes = [MILLION * int(size) for size in args.sizes.split(",")]
    rows: list[Row] = []
    extra: list[Row] = []
    for numel in sizes:
        repeats = max(1, round(args.repeats * REPEATS[numel]))
        for data in args.data.split(","):
            flat = DATA[data](numel)
            for density in DENSITIES:
                rows.append(select_row(data, flat, density, repeats))
                if len(rows) == 1:
                    show(*rows[0])
                show(*rows[-1].values())
            if numel == AT:
                extra.append(feedback_row(data, flat, 3 * repeats))
    for number, row in enumerate(extra):
        if not number:
            show(*row)
        show(*row.values())
    verdicts = [bool(row["holds"]) for row in rows + extra if "holds" in row]
    holds = all(verdicts) if verdicts else None
    result = {"benchmark": "select", "rows": rows + extra, "target": TARGET, "holds": holds}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
