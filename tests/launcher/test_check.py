"""`--check`: how what is found is judged, on this host and on others."""

import json
import os
import sys
from dataclasses import replace

import pytest

from mpicomp_launch import diagnose
from mpicomp_launch.agent import Agent
from mpicomp_launch.allocation import Allocation
from mpicomp_launch.check import elsewhere, here, jobs, report
from mpicomp_launch.check.findings import FAILURE, OK, WARNING, Finding
from mpicomp_launch.command import UserCommand
from mpicomp_launch.hosts import Host, Placement
from mpicomp_launch.mpis import Mpi
from mpicomp_launch.network import Interface
from mpicomp_launch.options import Options
from mpicomp_launch.plan import Plan
from mpicomp_launch.resolve import Resolved

GOOD = {
    "host": "a",
    "python": "3.11.7",
    "executable": "/v/bin/python",
    "versions": {"torch": "2", "mpi4py": "4", "numpy": "2", "mpicomp": "0.1"},
    "missing": [],
    "shm": {"total": 8 << 30, "free": 8 << 30},
    "limits": {"memlock": -1, "nofile": 65536, "nproc": 65536, "stack": 8 << 20},
    "ptrace": "0",
    "mpi": {"text": "MPICH 5", "path": "/v/lib/libmpi.so", "level": "multiple", "cuda": False},
    "gpu": {"available": True, "names": ["H200"], "pinned": True},
    "cupy": {"version": "13", "devices": 1},
}
COMMAND = UserCommand(sys.executable, (), ("-c", "0"), is_python=True)
PLAN = Plan(2, COMMAND, Mpi("mpich", "5.0.2", "/v/bin/mpiexec"), {}, {}, "/")


def states(found, *, has_rdma=False):
    return {each.what: each for each in here.judge({**GOOD, **found}, has_rdma)}


def test_all_is_well():
    assert {each.state for each in states({}).values()} == {OK}


@pytest.mark.parametrize(
    ("found", "what", "state", "text"),
    [
        ({"versions": {"torch": None}}, "torch", FAILURE, "pip install torch"),
        ({"mpi": {"error": "no libmpi"}}, "MPI library", FAILURE, "MPI4PY_LIBMPI"),
        ({"mpi": GOOD["mpi"] | {"level": "single"}}, "MPI threads", FAILURE, "THREAD_MULTIPLE"),
        ({"gpu": {"error": "broken"}}, "GPU", WARNING, "importable"),
        ({"gpu": GOOD["gpu"] | {"pinned": False}}, "pinned memory", WARNING, "ulimit -l"),
        ({"cupy": None}, "CuPy", WARNING, "mpicomp[cuda12]"),
        ({"cupy": {"error": "x"}}, "CuPy", WARNING, "CuPy of this CUDA"),
        ({"shm": None}, "shared memory", WARNING, "MPICOMP_SHARED_MEMORY_DIR"),
        ({"shm": {"total": 64 << 20, "free": 1}}, "shared memory", WARNING, "--shm-size"),
        ({"limits": GOOD["limits"] | {"nofile": 256}}, "limits", WARNING, "ulimit -n 4096"),
        ({"limits": GOOD["limits"] | {"nproc": 1000}}, "limits", WARNING, "ulimit -u 4096"),
        ({"limits": GOOD["limits"] | {"stack": 1 << 20}}, "limits", WARNING, "ulimit -s 8192"),
        ({"ptrace": "1"}, "copies between processes", WARNING, "ptrace_scope=0"),
    ],
)
def test_what_is_not(found, what, state, text):
    finding = states(found)[what]
    assert finding.state == state
    assert text in finding.advice


def test_locked_memory_matters_with_rdma_only():
    limits = {"limits": GOOD["limits"] | {"memlock": 65536}}
    assert states(limits)["limits"].state == OK
    assert states(limits, has_rdma=True)["limits"].state == WARNING


def test_whether_mpi_takes_gpu_memory_and_how_that_is_known():
    texts = [
        states({"mpi": GOOD["mpi"] | {"cuda": cuda}})["MPI and GPU memory"].value
        for cuda in (True, False, None)
    ]
    assert [text.partition(",")[0] for text in texts] == ["yes", "no", "not known"]
    assert all("MPIX_Query_cuda_support" in text for text in texts)


def test_hosts_are_compared():
    other = GOOD | {"python": "3.10.1", "missing": ["/x/train.py"]}
    other |= {"versions": GOOD["versions"] | {"numpy": None}, "mpi": {"text": "Open MPI v5.0"}}
    found = {
        each.what: each for each in elsewhere.compare("b", other, GOOD, ["/v/bin/python"], " ".join)
    }
    assert found["Python"].state == FAILURE
    assert found["Python"].value == "3.10.1, here 3.11.7"
    assert found["Python"].advice.endswith("; /v/bin/python -V")
    assert found["numpy"].value == "absent, here 2"
    assert found["numpy"].advice.endswith("; /v/bin/python -m pip show numpy")
    assert found["same MPI"].state == FAILURE
    assert found["paths"].value == "absent: /x/train.py"
    assert found["paths"].advice.endswith("; ls -d /x/train.py")
    assert found["torch"].state == OK


@pytest.mark.parametrize(
    ("other", "own", "state"),
    [
        ("3.11.7", "3.11.7", OK),
        ("3.11.8", "3.11.7", WARNING),
        ("3.12.7", "3.11.7", FAILURE),
        ("2.13.0+cpu", "2.13.0+cu126", WARNING),
        ("2.1", "2.13.0", FAILURE),
        ("source", "0.1.0", FAILURE),
        (None, "0.1.0", FAILURE),
        ("0.1.0", None, FAILURE),
        (None, None, OK),  # this host has a failure for it already
        ("MPICH Version: 5.0.2", "MPICH Version: 4.0.2", FAILURE),
        ("MPICH Version: 5.0.2", "MPICH Version: 5.0.1", WARNING),
        ("MPICH Version: 5.0.2", "Open MPI v5.0.2", FAILURE),
    ],
)
def test_likeness(other, own, state):
    assert elsewhere.likeness(other, own) == state


@pytest.mark.parametrize(("offset", "state"), [(0.1, OK), (-0.9, OK), (5, WARNING), (-5, WARNING)])
def test_clock(offset, state):
    assert elsewhere.judge_clock("b", offset).state == state


def test_report(capsys):
    findings = [Finding("a", "x", OK, "[bold]"), Finding("b", "y", FAILURE, "bad", "do this")]
    report.show(findings, as_json=False)
    text = capsys.readouterr().out
    assert "[bold]" in text
    assert "failure: b, y: bad. do this\nThe job cannot run.\n" in text
    report.show(findings[:1], as_json=True)
    assert json.loads(capsys.readouterr().out)["runs"]


@pytest.mark.parametrize(
    ("agent", "what", "text"),
    [
        ("echo 'Connection refused' >&2; exit 255", "reached", "Connection refused"),
        ("exit 3", "reached", "status 3"),
        ("exit 0", "Python", "it runs, but does not answer as a Python would"),
        ("case $2 in true) ;; *) echo no python >&2; exit 127;; esac", "Python", "no python"),
        ("case $2 in true) ;; *) kill -9 $$;; esac", "Python", "status -9"),
    ],
)
def test_a_host_that_fails(tmp_path, agent, what, text):
    program = tmp_path / "agent"
    program.write_text(f"#!/bin/sh\n{agent}\n")
    program.chmod(0o755)
    plan = replace(PLAN, agent=Agent((str(program),)))
    *_, last = elsewhere.check_host("b", plan, [sys.executable], [], GOOD)
    assert (last.where, last.what, last.state) == ("b", what, FAILURE)
    assert text in last.value
    assert f"try by hand: {program} b " in last.advice


def test_a_host_without_an_answer(tmp_path, monkeypatch):
    program = tmp_path / "agent"
    program.write_text("#!/bin/sh\nexec sleep 100\n")
    program.chmod(0o755)
    monkeypatch.setattr(diagnose, "ASK_SECONDS", 0.5)
    plan = replace(PLAN, agent=Agent((str(program),)))
    (found,) = elsewhere.check_host("b", plan, [sys.executable], [], GOOD)
    assert (found.state, found.value) == (FAILURE, "no answer within 0.5 s")


def test_clocks_are_compared_without_the_time_that_the_probe_takes(tmp_path, monkeypatch):
    program = tmp_path / "agent"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys, time\n"
        f"if sys.argv[2] == 'true': sys.exit()\n"
        f"found = {{**{GOOD!r}, 'time': time.time(), 'took': 3}}\n"
        "time.sleep(3)\nprint(json.dumps(found))\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(elsewhere, "check_way_back", lambda *_: [])
    plan = replace(PLAN, agent=Agent((str(program),)))
    findings = elsewhere.check_host("b", plan, [sys.executable], [], GOOD)
    found = {each.what: each for each in findings}
    assert found["clock"].state == OK, found["clock"]
    assert found["limits"].where == "b"


@pytest.mark.parametrize(
    ("interface", "tcp", "text"),
    [
        (None, True, "eth0, 10.0.0.1 in 10.0.0.0/24: the route to b goes through it; TCP and"),
        (None, False, "the route to b goes through it; what MPI finds best"),
        ("ib0", True, "ib0, as --interface says; TCP and shared memory only"),
    ],
)
def test_the_interface_and_why(interface, tcp, text):
    way = Interface("eth0", "10.0.0.1", "10.0.0.0/24")
    plan = replace(PLAN, interface=interface, tcp=tcp)
    assert text in elsewhere.describe_way("b", way, plan)


HERE, AWAY = os.uname().nodename, "203.0.113.9"  # kept for documentation: nobody's


@pytest.mark.parametrize(
    ("hosts", "broken", "expected"),
    [
        ([], [], [("2 ranks here", f"{HERE}:2")]),
        (
            [HERE, AWAY],
            [],
            [("2 ranks here", f"{HERE}:2"), (f"2 ranks, here and {AWAY}", f"{HERE}:1,{AWAY}:1")],
        ),
        ([HERE, AWAY], [AWAY], [("2 ranks here", f"{HERE}:2")]),
        (
            ["::7", AWAY],
            [],
            [("2 ranks on ::7", "[::7]:2"), (f"2 ranks, ::7 and {AWAY}", f"[::7]:1,{AWAY}:1")],
        ),
        (["::7", AWAY], ["::7"], [(f"2 ranks on {AWAY}", f"{AWAY}:2")]),
        ([AWAY], [AWAY], []),
    ],
)
def test_jobs_run_on_the_hosts_of_the_job(monkeypatch, hosts, broken, expected):
    run = []
    monkeypatch.setattr(jobs, "add_up", lambda what, *rest: run.append((what, rest[-1])))
    plan = replace(PLAN, placement=tuple(Placement(host, 1) for host in hosts))
    list(jobs.try_jobs(plan, Resolved(Options(), {}), ["python"], {}, broken))
    assert run == expected


def test_a_scheduler_places_the_ranks_of_one_job(monkeypatch):
    run = []
    monkeypatch.setattr(jobs, "add_up", lambda what, *rest: run.append((what, *rest[-2:])))
    granted = Allocation("slurm", (Host("a", 2), Host("b", 2)), "SLURM_X")
    plan = replace(PLAN, np=4, allocation=granted)
    list(jobs.try_jobs(plan, Resolved(Options(), {}), ["python"], {}, []))
    assert run == [("4 ranks, by SLURM_X", 4, None)]
