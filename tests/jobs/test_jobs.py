"""What a user meets outside the library's functions: failures, workers, traces, the last line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mpicomp_launch import mpis

TRAIN = """
import sys, torch, mpicomp
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
opt = mpicomp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
def step():
    opt.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    opt.step()
step()
"""


def test_import_needs_no_mpi_and_loads_nothing_heavy(environ: dict[str, str]) -> None:
    code = (
        "import sys, mpicomp; assert not {'mpi4py', 'torch', 'numpy'} & set(sys.modules); "
        "sys.modules['mpi4py'] = None; mpicomp.TopK(density=0.1); mpicomp.compress"
    )
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, timeout=60)


def test_one_rank_needs_no_launcher(script: Callable[[str], str], environ: dict[str, str]) -> None:
    path = script(TRAIN + "print(mpicomp.rank(), mpicomp.size(), mpicomp.stats().bytes_sent)")
    run = subprocess.run(
        [sys.executable, path], env=environ, capture_output=True, text=True, timeout=60
    )
    assert run.stdout == "0 1 0\n"


@pytest.mark.parametrize("starter", ["launch", "mpirun"])
def test_an_exception_in_one_rank_ends_the_job(
    starter: str, request: pytest.FixtureRequest, script: Callable[[str], str]
) -> None:
    path = script(TRAIN + "if mpicomp.rank() == 1: raise KeyError('the reason')\nstep()\n")
    begin = time.monotonic()
    run = request.getfixturevalue(starter)(2, path)
    assert time.monotonic() - begin < 40
    assert run.returncode != 0
    if starter == "launch":
        assert run.returncode == 1
    assert "KeyError: 'the reason'" in run.stderr
    assert re.search(r"rank 1 on \S+", run.stderr)


def test_an_exception_in_backward_of_one_rank_ends_the_job(
    mpirun: Callable[..., subprocess.CompletedProcess[str]], script: Callable[[str], str]
) -> None:
    path = script(
        TRAIN
        + "if mpicomp.rank() == 1: model[1].weight.register_hook(lambda g: g / {}['missing'])\n"
        + "step()\n"
    )
    run = mpirun(2, path)
    assert run.returncode != 0
    assert "KeyError: 'missing'" in run.stderr


def test_a_killed_rank_ends_the_job(
    launch: Callable[..., subprocess.CompletedProcess[str]], script: Callable[[str], str]
) -> None:
    path = script(
        TRAIN + "import os, signal\n"
        "if mpicomp.rank() == 1: os.kill(os.getpid(), signal.SIGKILL)\nstep()\n"
    )
    assert launch(2, path, timeout=60).returncode != 0


ALONE = "import mpicomp; mpicomp.init(); print('alive')"


def test_the_wrong_mpirun_is_noticed(environ: dict[str, str]) -> None:
    """Ranks of another MPI's launcher: each believes to be alone, and one says so."""
    size, rank = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", ALONE],
            env=environ | {size: "2", rank: number},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in ("0", "1")
    ]
    ends = [run.communicate(timeout=90) for run in runs]
    assert [run.returncode for run in runs] == [1, 1]
    assert [out for out, _ in ends] == ["", ""]
    assert "(Open MPI's mpirun) started 2 ranks" in ends[0][1]
    assert "Traceback" not in ends[1][1]
    assert ends[1][1].endswith("mpicomp: rank 1 is in a world of 1, not 2, too\n")
    environ = environ | {size: "2", rank: "1", "MPICOMP_EXPECT_SIZE": "1"}
    words = [sys.executable, "-c", ALONE]
    assert subprocess.check_output(words, env=environ, text=True, timeout=60) == "alive\n"


def test_launchers_of_other_mpis_do_not_train_copies(environ: dict[str, str]) -> None:
    library = mpis.probe([sys.executable], environ)
    found = {mpis.identify(path, environ) for path in mpis.candidates(None, Path("/"), environ)}
    kin = {"mpich", "intel", "mvapich"}  # whose launchers start each other's ranks
    own = kin if library.family in kin else {library.family}
    others = [mpi for mpi in found if mpi and mpi.family not in own]
    if not others:
        pytest.skip("there is no mpirun of another MPI on PATH")
    extra = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    for mpi in others:
        run = subprocess.run(
            [mpi.launcher, "-n", "2", sys.executable, "-c", ALONE],
            env=environ | extra,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert run.returncode != 0
        assert run.stdout == ""
        if "unsupported PMI" not in run.stderr:  # else MPICH noticed before we could
            assert run.stderr.count("started 2 ranks") == 1, run.stderr


def test_after_shutdown_ranks_train_by_themselves(
    launch: Callable[..., subprocess.CompletedProcess[str]], script: Callable[[str], str]
) -> None:
    path = script(
        TRAIN
        + "with opt.no_sync(): model(torch.ones(8, 64)).square().mean().backward()\n"
        + "mpicomp.shutdown()\n"
        + "opt.step()\nstep()\n"
        + "sys.stdout.write(f'{model[0].weight.grad is not None}\\n')\n"
    )
    run = launch(2, path, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("True") == 2


WORKERS = """
import sys, torch, mpicomp
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, i):
        return torch.tensor(float(i * i))

def refuse(index):
    try:
        mpicomp.init()
    except mpicomp.MpicompError as error:
        assert "child process" in str(error)
    else:
        raise AssertionError("a worker became a rank")

def main():
    mpicomp.init()
    how = sys.argv[1]
    loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=how,
                        persistent_workers=True,
                        worker_init_fn=None if how == "fork" else refuse)
    weight = torch.nn.Parameter(torch.ones(1))
    opt = mpicomp.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0))
    for epoch in range(2):
        total = 0.0
        for batch in loader:
            opt.zero_grad()
            (weight * batch.sum() * (mpicomp.rank() + 1)).sum().backward()
            total += weight.grad.item()
    sys.stdout.write(f"total {total}\\n")  # in one piece: ranks write at the same time

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("starter", ["launch", "mpirun"])
def test_data_loader_workers(
    starter: str, how: str, request: pytest.FixtureRequest, script: Callable[[str], str]
) -> None:
    run = request.getfixturevalue(starter)(2, script(WORKERS), how)
    assert run.returncode == 0, run.stderr
    expected = sum(i * i for i in range(12)) * 1.5
    assert run.stdout.count(f"total {expected}") == 2


OVERLAP = """
import torch, mpicomp
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
opt = mpicomp.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), model=model, fusion_mb=2)
for step in range(6):
    opt.zero_grad()
    model(torch.randn(256, 512)).square().mean().backward()
    opt.step()
"""


def test_the_trace_shows_collectives_while_backward_computes(
    launch: Callable[..., subprocess.CompletedProcess[str]],
    script: Callable[[str], str],
    tmp_path: Path,
) -> None:
    trace = tmp_path / "trace.json"
    run = launch(2, script(OVERLAP), MPICOMP_TRACE=str(trace), MPICOMP_STATS="1")
    assert run.returncode == 0, run.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    overlapped = 0
    for rank in (0, 1):
        own = [event for event in events if event["pid"] == rank]
        means = [e for e in own if e["ph"] == "X" and e["name"].startswith("Mean bucket 0 ")]
        ends = sorted(e["ts"] for e in own if e["name"] == "backward is over")
        fills = sorted(e["ts"] for e in own if e["name"].endswith("is full"))
        assert len(means) == len(ends) == 6
        assert {e["tid"] for e in means}.isdisjoint(
            {e["tid"] for e in own if e["name"] == "backward is over"}
        )
        for mean in means:
            end = min(ts for ts in ends if ts > mean["ts"])
            # finished while later gradients were still being computed and put into buckets
            finished = mean["ts"] + mean["dur"]
            overlapped += finished < end and any(finished < ts < end for ts in fills)
    assert overlapped >= 6  # of 12: other programs may delay some
    last = run.stderr.strip().splitlines()[-1]
    assert re.match(r"mpicomp: 6 steps \(0 bad\), 12,607,488 bytes sent per step", last)


WATCHED = (
    """
import os, sys, urllib.request
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
for name in ("MPICOMP_TRACE", "MPICOMP_PROMETHEUS"):
    if rank > 0:
        os.environ.pop(name, None)
import mpicomp
mpicomp.init()
"""
    + TRAIN
    + """
step()
endpoint = mpicomp.world.get().endpoint
assert (endpoint is None) == (rank > 0)
def totals():
    url = f"http://127.0.0.1:{endpoint.server.server_port}/metrics"
    return urllib.request.urlopen(url, timeout=10).read().decode()
if rank == 0:
    assert "mpicomp_steps_total 2.0" in totals(), totals()
mpicomp.shutdown()
if rank == 0:
    try:
        totals()
    except OSError:
        print("closed")
"""
)


def test_what_rank_0_was_told_is_watched(
    launch: Callable[..., subprocess.CompletedProcess[str]],
    script: Callable[[str], str],
    tmp_path: Path,
) -> None:
    pytest.importorskip("prometheus_client")
    trace = tmp_path / "trace.json"
    run = launch(2, script(WATCHED), MPICOMP_TRACE=str(trace), MPICOMP_PROMETHEUS="0")
    assert run.returncode == 0, run.stderr
    assert run.stdout == "closed\n"
    assert "Prometheus is answered at http://127.0.0.1:" in run.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    threads = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert threads == {(r, name) for r in (0, 1) for name in ("training", "communication")}


@pytest.mark.parametrize(
    ("variable", "value"),
    [("MPICOMP_TRACE", "/no/such/directory/t.json"), ("MPICOMP_PROMETHEUS", "192.0.2.1:80")],
)
def test_what_rank_0_cannot_watch_ends_the_job(
    variable: str,
    value: str,
    mpirun: Callable[..., subprocess.CompletedProcess[str]],
    script: Callable[[str], str],
) -> None:
    if variable == "MPICOMP_PROMETHEUS":
        pytest.importorskip("prometheus_client")
    run = mpirun(2, script(TRAIN), **{variable: value})
    assert run.returncode != 0
    assert f"environment: {variable} must be" in run.stderr


@pytest.mark.parametrize("variable", ["MPICOMP_SHARED_MEMORY", "MPICOMP_FUSION_MB"])
def test_settings_from_the_environment(
    variable: str,
    launch: Callable[..., subprocess.CompletedProcess[str]],
    script: Callable[[str], str],
) -> None:
    value = {"MPICOMP_SHARED_MEMORY": "0", "MPICOMP_FUSION_MB": "0.01"}[variable]
    run = launch(2, script(TRAIN + "step(); print('done')"), **{variable: value})
    assert run.stdout.count("done") == 2, run.stderr
    run = launch(2, script(TRAIN), MPICOMP_FUSION_MBB="1")
    assert run.returncode != 0
    assert "did you mean MPICOMP_FUSION_MB" in run.stderr


def test_a_full_memory_file_system_costs_one_line(
    launch: Callable[..., subprocess.CompletedProcess[str]],
    script: Callable[[str], str],
    tmp_path: Path,
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", small])
    if mounted.returncode:
        pytest.skip("mounting a file system is not permitted")
    big = TRAIN.replace(
        "nn.Linear(64, 64) for _ in range(4)", "nn.Linear(1024, 1024) for _ in range(5)"
    )
    big = big.replace("randn(8, 64)", "randn(8, 1024)")
    try:
        run = launch(2, script(big + "step(); print('done')"), MPICOMP_SHARED_MEMORY_DIR=str(small))
        assert run.returncode == 0, run.stderr
        assert run.stdout.count("done") == 2
        assert run.stderr.count("shared memory is too small") == 1
        assert not list(small.iterdir())
        none = launch(2, script(TRAIN + "print('done')"), MPICOMP_SHARED_MEMORY_DIR="/nonexistent")
        assert none.stdout.count("done") == 2
        assert none.stderr.count("no shared memory between ranks of a host") == 1
    finally:
        subprocess.run(["umount", small], check=True)
