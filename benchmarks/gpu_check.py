"""Does everything work on a GPU, and how fast is it reached from the host?

    python benchmarks/gpu_check.py

Runs itself with one rank and with two ranks that share the first device, and prints one table:
every compressor on the device against the same on the CPU, gradients that arrive late on their
stream, bandwidths, and the selection of the largest elements: right, and how fast. Without a device
it says so, and measures nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

import mpicomp
from mpicomp.compress import Simulation, available, parse
from mpicomp.compress.select import gpu, largest
from mpicomp.compress.stochastic import Stochastic

Run = Callable[[str, str], Iterator[dict[str, Tensor]]]  # method, device: means of each step

RANKS = (1, 2)
STEPS = 3
TOLERANCE = 1e-3  # of the norm; a wrong element of top-k, or a stale gradient, is far above
NOISE = 1.2  # between the errors of two draws
TINY = 1e-30  # where nothing is right, nothing is an error of 0
DELAY_CYCLES = 200_000_000  # of the device's clock: about a tenth of a second
PAYLOAD_BYTES = 256 << 20
WIDTHS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DENSITIES = (0.0001, 0.001, 0.01, 0.1)
TARGET = f"results on the device within {TOLERANCE:g} of those on the CPU, late gradients included"


@dataclass(frozen=True)
class Row:
    """One check: ``holds`` is None for a measurement without a target."""

    check: str
    ranks: int
    value: float
    unit: str
    holds: bool | None = None


def error_row(check: str, pairs: list[tuple[Tensor, Tensor]]) -> Row:
    """The largest relative error of (result, expected) pairs, over all ranks."""
    errors = [float((got.cpu() - want).norm() / (want.norm() + TINY)) for got, want in pairs]
    worst = torch.tensor(errors, dtype=torch.float64).max()  # NaN wins
    error = float(mpicomp.allreduce(worst, op=mpicomp.Max))
    return Row(check, mpicomp.size(), error, "relative error", error <= TOLERANCE)


# --------------------------------------------------------------------------------- compressors


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64), nn.Conv2d(8, 16, 3))


def gradients(step: int, size: int) -> list[dict[str, Tensor]]:
    """For each rank the gradients of a step by parameter name, on the CPU."""
    generator = torch.Generator().manual_seed(step)
    shapes = {name: p.shape for name, p in build_model().named_parameters()}
    return [
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for _ in range(size)
    ]


def simulated(method: str, device: str) -> Iterator[dict[str, Tensor]]:
    """The means of each step of two ranks, computed in this process."""
    params = {name: p.detach().to(device) for name, p in build_model().named_parameters()}
    simulation = Simulation(method, params, size=2)
    for step in range(STEPS):
        every = [
            {name: grad.to(device) for name, grad in grads.items()} for grads in gradients(step, 2)
        ]
        means = simulation.step(every).means[0]
        yield {name: mean for name, mean in means.items() if mean is not None}


def trained(method: str, device: str) -> Iterator[dict[str, Tensor]]:
    """What `DistributedOptimizer` leaves in ``grad`` in each step, on the ranks of this job."""
    model = build_model().to(device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = mpicomp.DistributedOptimizer(optimizer, compression=method, model=model)
    for step in range(STEPS):
        mine = gradients(step, mpicomp.size())[mpicomp.rank()]
        optimizer.zero_grad()
        terms = [(p * mine[name].to(device)).sum() for name, p in model.named_parameters()]
        torch.stack(terms).sum().backward()
        yield {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()


def check_means(run: Run, method: str, device: str) -> Row:
    """What ``run`` gives on the device, against the same on the CPU."""
    steps = list(zip(run(method, device), run(method, "cpu"), strict=True))
    check = f"{method}, {run.__name__}"
    if not isinstance(parse(method), Stochastic):
        return error_row(check, [(got[name], want[name]) for got, want in steps for name in want])
    # A device draws other random numbers: errors are to be as large, not the same.
    exact = list(run("none", "cpu"))

    def distance(side: int) -> float:
        pairs = zip(steps, exact, strict=True)
        return sum(
            float((step[side][name].cpu() - mean[name]).norm())
            for step, mean in pairs
            for name in mean
        )

    ratio = torch.tensor((distance(0) + TOLERANCE) / (distance(1) + TOLERANCE))
    worst = float(mpicomp.allreduce(torch.maximum(ratio, 1 / ratio), op=mpicomp.Max))
    return Row(check, mpicomp.size(), worst, "times the error", worst <= NOISE)


# ------------------------------------------------------------------------------------- streams


class Late(nn.Module):
    """A matrix whose gradient is ``factor``, written by a kernel that waits behind a delay."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024, 1024))

    def forward(self, factor: float) -> Tensor:
        def delay(grad: Tensor) -> Tensor:
            torch.cuda._sleep(DELAY_CYCLES)
            return grad * factor

        out = self.weight * 1.0
        out.register_hook(delay)
        return out.sum()


def check_streams(method: str, stream: torch.cuda.Stream) -> Row:
    """Backward on ``stream``: the exchange must wait for the producer, and readers for it.

    All elements are equal, which is a matrix of rank 1: PowerSGD returns it as it is.
    """
    pairs = []
    with torch.cuda.stream(stream):
        model = Late().cuda()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = mpicomp.DistributedOptimizer(optimizer, compression=method, model=model)
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            model(float(step * (mpicomp.rank() + 1))).backward()
            assert model.weight.grad is not None
            want = torch.full((1024, 1024), step * (mpicomp.size() + 1) / 2)
            pairs.append((model.weight.grad.clone(), want))
            optimizer.step()
        stream.synchronize()
    side = "default" if stream == torch.cuda.default_stream() else "side"
    return error_row(f"{method}, late on {side} stream", pairs)


# ----------------------------------------------------------------------------------- selection


def wrong_selections(flat: Tensor, k: int) -> int:
    """How many of the k chosen on the device are chosen twice, or are not as by sorting."""
    chosen = flat[largest(flat.cuda(), k).cpu().unique()].abs().double()
    expected = flat.abs().double().sort(descending=True).values[:k]
    if len(chosen) < k:
        return k - len(chosen)
    got = chosen.sort(descending=True).values
    return int((got.nan_to_num(-1.0) != expected.nan_to_num(-1.0)).sum())


def selections() -> list[Row]:
    """The elements that are largest, of many kinds of numbers, against sorting on the CPU."""
    normal = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    rare = torch.where(normal.abs() > 3.5, normal, 0.0)
    odd = normal.clone()
    odd[::1000] = float("inf")
    odd[::1500] = float("nan")
    kinds = {f"{dtype}".removeprefix("torch."): normal.to(dtype) for dtype in WIDTHS}
    kinds |= {"rounded": normal.round(), "constant": normal * 0 - 1, "zero": normal * 0}
    kinds |= {"rarely not zero": rare, "not finite": odd, "strided": normal.repeat(3)[::3]}
    rows = [Row("CuPy is used for selection", 1, float(gpu.available()), "yes or no")]
    for name, flat in kinds.items():
        wrong = sum(wrong_selections(flat, int(flat.numel() * density)) for density in DENSITIES)
        rows.append(Row(f"selection, {name}", 1, float(wrong), "wrong elements", wrong == 0))
    return rows


def selection_is_in_order(stream: torch.cuda.Stream) -> Row:
    """The values are written on ``stream`` by a kernel that waits behind a delay."""
    flat = torch.zeros(1_000_000, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        flat[100:200] = 1.0
        wrong = 100 - int(flat[largest(flat, 100)].sum())
    side = "default" if stream == torch.cuda.default_stream() else "side"
    return Row(f"selection, late on {side} stream", 1, float(wrong), "wrong elements", wrong == 0)


# ----------------------------------------------------------------------------------- bandwidth


def bandwidth_row(check: str, work: Callable[[], object]) -> Row:
    """Gigabytes a second of ``work``, which moves the payload once; best of five."""
    seconds = []
    for _ in range(5):
        mpicomp.barrier()
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    longest = mpicomp.allreduce(torch.tensor(min(seconds), dtype=torch.float64), op=mpicomp.Max)
    return Row(check, mpicomp.size(), PAYLOAD_BYTES / float(longest) / 1e9, "GB/s")


def bandwidths() -> list[Row]:
    device = torch.ones(PAYLOAD_BYTES // 4, device="cuda")
    host = torch.ones(PAYLOAD_BYTES // 4).pin_memory()
    return [
        bandwidth_row("pinned host to device", lambda: device.copy_(host, non_blocking=True)),
        bandwidth_row("device to pinned host", lambda: host.copy_(device, non_blocking=True)),
        bandwidth_row("allreduce_ on the device", lambda: mpicomp.allreduce_(device)),
    ]


def selection_speeds() -> list[Row]:
    flat = torch.randn(PAYLOAD_BYTES // 4, device="cuda")
    copy = torch.empty_like(flat)
    rows = [bandwidth_row("copy on the device", lambda: copy.copy_(flat))]
    for density in DENSITIES:
        for side, select in {"largest": largest, "topk": torch_topk}.items():
            work = functools.partial(select, flat, int(flat.numel() * density))
            rows.append(bandwidth_row(f"{side}, density {density:g}", work))
    return rows


def torch_topk(flat: Tensor, k: int) -> Tensor:
    return torch.topk(flat.abs(), k, sorted=False).indices


# ----------------------------------------------------------------------------------------- main


def run_checks() -> list[Row]:
    """All checks of one job; every rank calls this."""
    mpicomp.init()
    runs = (simulated, trained) if mpicomp.size() == 1 else (trained,)
    rows = [check_means(run, method, "cuda") for run in runs for method in available()]
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        rows += [check_streams(method, stream) for method in ("none", "powersgd:rank=1")]
    if mpicomp.size() == 1:
        rows += selections() + selection_speeds()
        rows += [
            selection_is_in_order(s) for s in (torch.cuda.default_stream(), torch.cuda.Stream())
        ]
    return rows + bandwidths()


def launch(ranks: int) -> list[Row]:
    """Run the checks as a job of its own; its first rank prints the rows as its last line."""
    job = [sys.executable, "-m", "mpicomp_launch", "-np", str(ranks), "--tag", "none"]
    job += [sys.executable, __file__, "--checks"]
    run = subprocess.run(job, stdout=subprocess.PIPE, text=True)
    if run.returncode != 0:
        return [Row(f"job ended with status {run.returncode}", ranks, 0.0, "", holds=False)]
    return [Row(**row) for row in json.loads(run.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checks", action="store_true", help="be one rank of the checks")
    if parser.parse_args().checks:
        rows = run_checks()
        if mpicomp.rank() == 0:
            print(json.dumps([asdict(row) for row in rows]))
        return
    rows, holds = [], None
    if torch.cuda.is_available():
        print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
        rows = [row for ranks in RANKS for row in launch(ranks)]
        holds = all(row.holds is not False for row in rows)
    else:
        print("no CUDA device here: nothing was checked")
    for row in rows:
        verdict = {True: "holds", False: "FAILS", None: ""}[row.holds]
        print(f"{row.check:36}{row.ranks:>3}{row.value:>12.3g} {row.unit:16}{verdict}")
    listed = [asdict(row) for row in rows]
    print(json.dumps({"benchmark": "gpu_check", "rows": listed, "target": TARGET, "holds": holds}))


if __name__ == "__main__":
    main()
