"""`python -m mpicomp.bench` and `python -m mpicomp.advise` as a user runs them."""

import json
import subprocess
import sys

import pytest

FACTORY = """
import os, torch, mpicomp
from mpicomp.bench.workload import Workload

def small():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
    batches = [torch.randn(4, 64) for _ in range(3)]
    return Workload(model, batches, lambda model, x: model(x).square().mean())

def fails_on_rank_1():
    if mpicomp.rank() == 1:
        raise RuntimeError("no such data set")
    return small()

def other():
    return 3

def begun_twice():
    workload = small()
    workload.batches = iter(workload.batches)
    return workload

def without_graph():
    workload = small()
    workload.loss = lambda model, x: torch.tensor(1.0)
    return workload

def leaves():
    raise SystemExit(3)
"""
PHASES = ["data", "forward", "backward", "accumulate", "encode", "values", "indices", "decode"]


@pytest.fixture
def factory(tmp_path):
    (tmp_path / "mine.py").write_text(FACTORY)
    return tmp_path


@pytest.fixture
def alone(environ, factory):
    """Runs ``python -m mpicomp.MODULE WORDS...`` on one rank, in the directory of the factory."""

    def run(module, *words):
        pytest.importorskip("mpi4py")
        return subprocess.run(
            [sys.executable, "-m", f"mpicomp.{module}", *words],
            env=environ,
            cwd=factory,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_network(launch, factory):
    pytest.importorskip("matplotlib")
    out, plot = factory / "network.json", factory / "network.png"
    files = ["--out", str(out), "--plot", str(plot)]
    done = launch(3, "-m", "mpicomp.bench", "network", "--most-mb", "0.1", *files)
    assert done.returncode == 0, done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "all-to-all within" in done.stdout
    record = json.loads(out.read_text())
    assert record["date"]
    samples = record["samples"]["within"]
    assert {s["collective"] for s in samples} == {
        "all-reduce", "all-gather", "all-to-all", "broadcast",
    }  # fmt: skip
    assert all(s["ranks"] == 3 and s["seconds"] > 0 for s in samples)
    assert min(s["num_bytes"] for s in samples) <= 1024
    assert record["network"]["ranks_per_host"] == 3


def test_network_of_one_rank(alone):
    done = alone("bench", "network")
    assert done.returncode == 0, done.stderr
    assert "there is nothing to measure" in done.stdout


def test_compressors(alone, factory):
    pytest.importorskip("matplotlib")
    words = ["--megabytes", "0.3", "--repeats", "1", "--out", "c.json", "--plot", "c.svg"]
    done = alone("bench", "compressors", *words)
    assert done.returncode == 0, done.stderr
    assert "<svg" in (factory / "c.svg").read_text()
    rows = json.loads((factory / "c.json").read_text())["rows"]
    assert len(rows) == 28
    by_name = {row["compression"]: row for row in rows}
    assert by_name["none"]["ratio"] == 1
    assert by_name["bf16"]["ratio"] == 2
    assert by_name["topk"]["ratio"] == pytest.approx(50, rel=0.01)


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_no_such_device(alone, device):
    done = alone("bench", "compressors", "--device", device)
    assert done.returncode == 1
    assert f"--device must be one that torch has here, got '{device}'" in done.stderr
    assert "Traceback" not in done.stderr


def test_model(launch, factory):
    pytest.importorskip("matplotlib")
    words = ["--model", f"{factory}/mine.py:small", "--compression", "none", "topk:density=0.1"]
    files = ["--out", str(factory / "m.json"), "--plot", str(factory / "m.svg")]
    count = ["--rounds", "2", "--steps", "2"]
    done = launch(2, "-m", "mpicomp.bench", "model", *words, *count, *files)
    assert done.returncode == 0, done.stderr
    rows = json.loads((factory / "m.json").read_text())["rows"]
    assert [row["compression"] for row in rows] == ["none", "topk:density=0.1"]
    for row in rows:
        assert list(row["phases_ms"])[:8] == PHASES
        total = sum(row["phases_ms"].values())
        assert total > 0
        assert row["in_a_row_ms"] > 0
        assert 0 <= row["hidden"] <= 1
    dense, topk = rows
    assert dense["phases_ms"]["indices"] == 0
    assert topk["phases_ms"]["indices"] > 0
    assert topk["bytes_sent"] < dense["bytes_sent"] / 3
    assert "<svg" in (factory / "m.svg").read_text()


def test_a_factory_that_fails_on_one_rank(launch, factory):
    done = launch(
        2, "-m", "mpicomp.bench", "model", "--model", f"{factory}/mine.py:fails_on_rank_1"
    )
    assert done.returncode != 0
    assert "which fails on rank 1: RuntimeError: no such data set" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("begun_twice", "batches must be such that one can begin anew"),
        ("without_graph", "loss must be a tensor of one element to call backward on"),
        ("leaves", "rank 0: SystemExit: 3"),
    ],
)
def test_steps_that_cannot_be_taken(alone, name, message):
    done = alone("bench", "model", "--model", f"mine:{name}")
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["model", "--model", "mine:small", "--rounds", "0"],
        ["model", "--model", "mine:small", "--steps", "-1"],
        ["compressors", "--ranks", "0"],
        ["compressors", "--repeats", "0"],
        ["compressors", "--megabytes", "inf"],
        ["network", "--most-mb", "0"],
    ],
)
def test_numbers_that_measure_nothing(alone, words):
    done = alone("bench", *words)
    assert done.returncode == 2
    assert f"argument {words[-2]}: must be" in done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine:other", "rank 0: TypeError: it returned 3"),
        ("mine:none", "has no attribute 'none'"),
        ("theirs:small", "No module named 'theirs'"),
        ("theirs.py:small", "no such file: theirs.py"),
        ("mine", "it has no ':'"),
    ],
)
def test_names_that_lead_nowhere(alone, name, message):
    done = alone("bench", "model", "--model", name)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_advise(alone, factory):
    pytest.importorskip("matplotlib")
    words = ["--model", "mine:small", "--bandwidth", "0.01", "--ranks", "2,64"]
    specs = ["--compression", "bf16", "topk:density=0.01"]
    files = ["--out", "a.json", "--plot", "a.svg"]
    done = alone("advise", *words, *specs, *files)
    assert done.returncode == 0, done.stderr
    assert "2 ranks: use topk:density=0.01" in done.stdout
    rows = json.loads((factory / "a.json").read_text())["rows"]
    assert {(row["ranks"], row["compression"]) for row in rows} == {
        (ranks, spec) for ranks in (2, 64) for spec in ("none", "bf16", "topk:density=0.01")
    }
    assert all(row["speedup"] == 1 for row in rows if row["compression"] == "none")
    assert "<svg" in (factory / "a.svg").read_text()


def test_nothing_pays_on_a_network_without_limits(alone):
    done = alone("advise", "--model", "mine:small", "--bandwidth", "1e9", "--latency", "0")
    assert done.returncode == 0, done.stderr
    assert "2 ranks: use no compression; none pays" in done.stdout


def test_advise_by_a_profile(launch, alone, factory):
    path = str(factory / "network.json")
    made = launch(2, "-m", "mpicomp.bench", "network", "--most-mb", "0.1", "--out", path)
    assert made.returncode == 0, made.stderr
    words = ["--model", "mine:small", "--network", "network.json", "--compression", "bf16"]
    done = alone("advise", *words, "--ranks", "2")
    assert done.returncode == 0, done.stderr
    more = alone("advise", *words, "--ranks", "4")
    assert more.returncode == 1
    assert "4 ranks need more than the one host that was measured" in more.stderr
    record = json.loads((factory / "network.json").read_text())
    record["machine"]["processor"] = "Z80"
    (factory / "network.json").write_text(json.dumps(record))
    foreign = alone("advise", *words, "--ranks", "2")
    assert foreign.returncode == 1
    assert "whose processor is 'Z80'" in foreign.stderr
    assert alone("advise", *words, "--ranks", "2", "--foreign-network").returncode == 0


def test_advise_without_a_network(alone):
    done = alone("advise", "--model", "mine:small")
    assert done.returncode == 1
    assert "--bandwidth and --latency" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "2,x"], "argument --ranks"),
        (["--ranks", "0"], "ranks must be at least 1"),
        (["--steps", "0"], "argument --steps: must be a whole number above 0"),
        (["--latency", "nan"], "argument --latency: must be a finite number"),
        (["--bandwidth", "0"], "--bandwidth must be above 0"),
        (["--compression", "topq"], "topq"),
        (["--plot", "no/such/directory/a.svg"], "must be files to write, got no/such"),
        (["--out", "no/such/directory/a.json"], "must be files to write, got no/such"),
        (["--plot", "a.xyz"], "--plot must be a picture that can be written"),
    ],
)
def test_bad_options(alone, words, message):
    done = alone("advise", "--model", "mine:small", "--bandwidth", "1", *words)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_no_measuring_for_a_picture_that_nothing_draws(alone, factory):
    (factory / "matplotlib.py").write_text("raise ImportError")
    for words in (["bench", "compressors"], ["advise", "--model", "mine:small"]):
        done = alone(*words, "--plot", "a.svg")
        assert done.returncode == 1
        assert "--plot needs matplotlib" in done.stderr
        assert not done.stdout


def test_all_numbers_of_ranks_are_looked_at_first(alone):
    done = alone("advise", "--model", "mine:small", "--bandwidth", "1", "--ranks", "2,0")
    assert done.returncode == 1
    assert "ranks must be at least 1, got 0" in done.stderr
    assert not done.stdout
