"""Examples and benchmarks run as a user runs them, and print what they promise."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(
    r"step +(?P<step>\d+)/(?P<steps>\d+)   loss (?P<loss>[\d.]+)   "
    r"held-out (?P<measure>.+)   samples/s (?P<speed>[\d,]+)   "
    r"bytes/step (?P<sent>[\d,]+) \((?P<share>[\d.]+)% of dense\)"
)


@cache
def output(ranks: int, script: str, *options: str) -> list[str]:
    """The lines that a script prints, run from a directory that is not the project's."""
    command = [sys.executable, str(ROOT / script), *options]
    if ranks > 1:
        command = [
            sys.executable,
            "-m",
            "mpicomp_launch",
            "-np",
            str(ranks),
            "--tag",
            "none",
            *command,
        ]
    path = [str(ROOT / "launch"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, cwd=ROOT.anchor, env=env, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.splitlines()


def reports(lines: list[str]) -> list[re.Match[str]]:
    return [match for line in lines if (match := LINE.fullmatch(line))]


def result(lines: list[str]) -> dict[str, object]:
    parsed: dict[str, object] = json.loads(lines[-1])
    assert list(parsed) == ["benchmark", "rows", "target", "holds"]
    return parsed


@pytest.mark.parametrize("ranks", [1, 2])
def test_digits_reports_every_epoch(ranks):
    lines = output(ranks, "examples/digits.py", "--steps", "30")
    first, second = reports(lines)
    assert (first["step"], second["step"], second["steps"]) == ("22", "30", "30")
    assert float(second["loss"]) < float(first["loss"])
    assert re.fullmatch(r"accuracy \d+\.\d\d %", second["measure"])
    assert lines[-1] == f"final held-out {second['measure']}"


def test_digits_trains_the_same_model_on_any_number_of_ranks():
    one, two = (reports(output(ranks, "examples/digits.py", "--steps", "30")) for ranks in (1, 2))
    for alone, together in zip(one, two, strict=True):
        assert float(alone["loss"]) == pytest.approx(float(together["loss"]), abs=2e-3)


def test_digits_with_powersgd_sends_less():
    dense = reports(output(2, "examples/digits.py", "--steps", "30"))
    options = ("--steps", "30", "--compression", "powersgd:rank=2")
    compressed = reports(output(2, "examples/digits.py", *options))
    assert float(dense[-1]["share"]) == 100
    assert 0 < float(compressed[-1]["share"]) < 10


@pytest.mark.parametrize("ranks", [1, 2])
def test_language_model_reports_bits_per_byte(ranks):
    options = ("--steps", "4", "--batch", "4", "--context", "32", "--compression", "topk")
    lines = output(ranks, "examples/language_model.py", *options)
    assert re.fullmatch(r"[\d,]+ parameters, [\d,]+ bytes", lines[0])
    assert [match["step"] for match in reports(lines)] == ["1", "2", "3", "4"]
    assert re.fullmatch(r"final held-out bits/byte \d\.\d{3}", lines[-1])


def test_batch_must_fit_the_ranks():
    with pytest.raises(AssertionError, match="--batch must be a multiple of 2 ranks, got 63"):
        output(2, "examples/digits.py", "--batch", "63")


def test_allreduce_benchmark():
    rows = result(output(2, "benchmarks/allreduce.py", "--repeats", "3", "--largest", "1"))["rows"]
    assert [row["bytes"] for row in rows] == [1 << 10, 1 << 16, 1 << 20]
    assert all(row["gloo_ms"] > 0 for row in rows)


@pytest.mark.parametrize(("ranks", "kinds"), [(1, []), (2, ["memory"])])
def test_step_benchmark(ranks, kinds):
    options = ("--size", "1M", "--rounds", "2", "--steps", "1")
    rows = result(output(ranks, "benchmarks/step.py", *options))["rows"]
    assert ["batch" if "batch" in row else "memory" for row in rows] == [*kinds, "batch", "batch"]


def test_time_to_quality_benchmark(tmp_path):
    script, slow, fast = "benchmarks/time_to_quality.py", tmp_path / "slow", tmp_path / "fast"
    options = ("--seeds", "1", "--steps", "8", "--every", "4", "--target", "8", "--network", "slow")
    measured = output(2, script, *options, "--compression", "fp16", "--out", str(slow))
    rows = result(measured)["rows"]
    assert [row["compression"] for row in rows] == ["none", "ddp", "fp16"]
    for row in rows:
        (steps, seconds, bits), *_, last = row["curves"][0]
        assert (steps, seconds) == (0, 0)
        assert last[2] <= 8 < bits
        assert 0 < row["steps"][0] <= last[0] <= 8
        assert 0 < row["seconds"][0] <= last[1]
    assert result(measured)["holds"] == (rows[2]["times_dense"][0] > 1)

    never = [row | {"network": "fast", "seconds": [None], "times_dense": [None]} for row in rows]
    fast.write_text(json.dumps({"rows": never}))
    picture = tmp_path / "picture.svg"
    both = output(1, script, "--merge", str(slow), str(fast), "--plot", str(picture))
    assert result(both)["rows"] == rows + never
    assert not result(both)["holds"]
    assert all(word in picture.read_text() for word in ("slow", "fast", "ddp", "fp16"))


def test_digits_benchmark():
    options = ("--seeds", "1", "--steps", "22", "--compression")  # none of these: only "none"
    (row,) = result(output(1, "benchmarks/accuracy.py", *options))["rows"]
    assert (row["compression"], row["percent_of_dense"]) == ("none", 100)


def test_compressors_benchmark(tmp_path):
    methods = ("none", "topk:density=0.01", "gaussiank:density=0.01")
    options = ("--ranks", "2", "4", "--steps", "2", "--repeats", "1", "--compression", *methods)
    kept = str(tmp_path / "result.json")
    lines = output(1, "benchmarks/compressors.py", *options, "--save", kept)
    plain, sparse, estimated = rows = result(lines)["rows"]
    assert result(lines)["holds"]
    assert plain["error_sum"] < 1e-6 < sparse["error_sum"] < 1
    d, v = 1056768, 8576
    assert plain["bytes_1024"] == pytest.approx(2 * 1023 / 1024 * 4 * (d + v))
    assert sparse["bytes_4"] == 3 * 8 * int(0.01 * d) + 2 * 3 / 4 * 4 * v
    assert estimated["bytes_2"] == estimated["formula_2"] != sparse["bytes_2"]

    again = output(1, "benchmarks/compressors.py", "--load", kept, "--markdown")
    assert result(again)["rows"] == rows
    assert [line.split(" | ")[0] for line in again[2:-1]] == [f"| `{name}`" for name in methods]


def test_gpu_check_says_that_there_is_no_device():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a device, and the check takes it")
    lines = output(1, "benchmarks/gpu_check.py")
    assert lines[0] == "no CUDA device here: nothing was checked"
    assert result(lines)["holds"] is None
