"""Networks of a chosen rate: what they carry, what runs across them, and what is left of them."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _hosts
import _sweep
import netlab
import pytest

pytest.importorskip("torch")  # what runs across the hosts are ranks of the library

ROOT = Path(__file__).resolve().parents[2]
ALLREDUCE = """
import json, torch, mpicomp
total = mpicomp.allreduce(torch.full((500_000,), mpicomp.rank() + 1.0), op=mpicomp.Sum)
print(json.dumps([mpicomp.rank(), total[-1].item()]), flush=True)
"""
GLOO = """
import json, mpicomp, torch, torch.distributed as dist
from _gloo import start_gloo
mpicomp.init()
start_gloo()
total = torch.full((500_000,), mpicomp.rank() + 1.0)
dist.all_reduce(total)
print(json.dumps([mpicomp.rank(), total[-1].item()]), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module", autouse=True)
def _variables(environ, mpi, new_lab):
    """A net launches in the environment of its own process."""
    patch = pytest.MonkeyPatch()
    for name in [name for name in os.environ if name not in environ]:
        patch.delenv(name)
    for name, text in environ.items():
        patch.setenv(name, text)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def net(_variables):
    with netlab.Net(hosts=2, rate="100mbit") as made:
        yield made


@pytest.fixture
def start():
    """Starts netlab as a program, in a group of its own."""
    started = []

    def start(*words, rate="none", hosts=2):
        process = subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "benchmarks/netlab.py"),
                f"--hosts={hosts}",
                "--rate",
                rate,
                *list(words),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def eventually(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


# What links carry, and what runs across.


def test_the_limit_holds_each_way_and_both_ways_at_once(net):
    assert net.one_way == pytest.approx(1e8, rel=0.1)
    assert net.all_at_once == pytest.approx(1e8, rel=0.1)


@pytest.mark.parametrize("code", [ALLREDUCE, GLOO], ids=["mpicomp", "gloo"])
def test_a_sum_of_two_hosts_passes_over_the_links(net, code):
    done = net.launch([sys.executable, "-c", code], capture=True)
    assert done.returncode == 0, done.stderr
    assert sorted(map(json.loads, done.stdout.splitlines())) == [[0, 3.0], [1, 3.0]]
    assert min(net.moved) > 2_000_000


def test_gloo_finds_the_way_to_other_hosts_itself(net):
    code = f"import os; del os.environ['GLOO_SOCKET_IFNAME']{GLOO}"
    done = net.launch([sys.executable, "-c", code], capture=True)
    assert done.returncode == 0, done.stderr
    assert min(net.moved) > 2_000_000


def test_gloo_needs_an_interface_that_is_there(net):
    env = {"GLOO_SOCKET_IFNAME": "eth7"}
    done = net.launch([sys.executable, "-c", GLOO], env=env, capture=True)
    assert done.returncode == 1
    assert "GLOO_SOCKET_IFNAME must name an interface" in done.stderr
    assert "got eth7" in done.stderr


def test_status_ranks_and_variables(net):
    code = "import os, mpicomp; print(mpicomp.rank(), mpicomp.size(), os.environ['OWN']); exit(7)"
    done = net.launch(
        [sys.executable, "-c", code], ranks_per_host=2, env={"OWN": "x"}, capture=True
    )
    assert done.returncode == 7
    assert sorted(done.stdout.splitlines()) == [f"{rank} 4 x" for rank in range(4)]


# What is refused.


@pytest.mark.parametrize("hosts", [-1, 0, 1, 5])
def test_hosts_are_two_to_four(hosts):
    with pytest.raises(ValueError, match=f"hosts must be 2 to 4, got {hosts}"):
        netlab.Net(hosts=hosts, rate="none")


@pytest.mark.parametrize("rate", ["", "1", "2gbit", "-1gbit", "fast"])
def test_rates_are_those_that_were_measured(rate):
    with pytest.raises(ValueError, match=f"rate must be one of 100mbit, .*, got {rate}$"):
        netlab.Net(hosts=2, rate=rate)


@pytest.mark.parametrize(
    ("words", "text"),
    [(["--ranks-per-host=0", "true"], "must be 1 or more, got 0"), ([], "no command to run")],
)
def test_words_are_checked(start, words, text):
    process = start(*words)
    assert text in process.communicate()[1]
    assert process.returncode == 2


def test_only_root_makes_hosts(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeError, match=r"netlab: .* got: only root can make"):
        netlab.Net(hosts=2, rate="none")


def test_tc_is_needed(monkeypatch):
    monkeypatch.setattr(_hosts.shutil, "which", lambda program: None if program == "tc" else "/")
    with pytest.raises(RuntimeError, match=r"netlab: .* got: tc is not installed"):
        netlab.Net(hosts=2, rate="none")


def test_a_limit_that_did_not_take_effect_is_an_error(monkeypatch):
    made = []

    def lab(hosts, new=_hosts.Lab):
        made.append(new(hosts))
        return made[0]

    monkeypatch.setattr(_hosts, "Lab", lab)
    monkeypatch.setattr(netlab.Net, "_shape", lambda self: None)
    with pytest.raises(RuntimeError, match=r"must be limited to 100mbit, got .* not take effect"):
        netlab.Net(hosts=2, rate="100mbit")
    assert is_gone(made[0].folder)


def test_a_machine_slower_than_the_limit_is_told(net, monkeypatch, capsys):
    monkeypatch.setattr(net, "rate", "1gbit")
    monkeypatch.setattr(net, "one_way", net.one_way)
    monkeypatch.setattr(net, "all_at_once", net.all_at_once)
    net._measure()
    assert "netlab: this machine does not reach 1gbit: its links carry 9" in capsys.readouterr()[1]


def test_messages_that_take_another_way_are_an_error(net, monkeypatch):
    monkeypatch.setattr(netlab, "PROBE", "import mpicomp; mpicomp.init()")
    with pytest.raises(RuntimeError, match=r"MPI must use the links between the hosts, got"):
        net._prove()


# What is left.

HOLD = """
import json, mpicomp, os, subprocess, sys, time
subprocess.Popen(["setsid", "sleep", "1000"])
mounts = open("/proc/self/mountinfo").read()
mpicomp.init()
print(json.dumps([os.getpid(), mounts]), flush=True)
{}
time.sleep(1000)
"""


def held(start, ending="pass"):
    """Netlab with a job that does not end by itself, and the folder of its lab."""
    process = start(sys.executable, "-c", HOLD.format(ending))
    _, mounts = json.loads(process.stdout.readline())
    return process, Path(tempfile.gettempdir()) / folder_in(mounts)


def folder_in(mounts):
    return re.search(rf"/({_sweep.PREFIX}\w+)/{_sweep.MOUNTED} ", mounts).group(1)


def is_gone(folder):
    return not _sweep.processes(folder) and not folder.exists()


def test_nothing_is_left_after_the_end(start):
    process = start(sys.executable, "-c", HOLD.format("sys.exit(0)"))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "netlab: 2 hosts, none: " in err
    folder = Path(tempfile.gettempdir()) / folder_in(json.loads(out.splitlines()[0])[1])
    assert is_gone(folder)


def test_nothing_is_left_after_a_failure_and_its_status_is_ours(start):
    process, folder = held(start, "mpicomp.rank() and sys.exit(9)")
    process.communicate(timeout=60)
    assert process.returncode == 9
    assert is_gone(folder)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_after_a_signal(start, signum):
    process, folder = held(start)
    assert len(_sweep.processes(folder)) >= 7  # three that hold, and ranks with their children
    process.send_signal(signum)
    process.communicate(timeout=60)
    assert process.returncode == (130 if signum == signal.SIGINT else -signum)
    eventually(lambda: is_gone(folder))


def sweeper_of(folder):
    (pid,) = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.exists()
        and path.read_bytes().endswith(f"\0{folder}\0".encode())
        and b"_sweep.py" in path.read_bytes()
    ]
    return pid


def test_what_a_killed_run_left_is_ended_by_the_next(start, capfd, net):
    process, folder = held(start)
    os.kill(sweeper_of(folder), signal.SIGKILL)
    process.kill()
    process.wait()
    assert _sweep.processes(folder)
    netlab.sweep_leftovers()
    assert is_gone(folder)
    told = capfd.readouterr().err
    assert f"netlab: ended what a killed run left in {folder}:" in told
    assert "sleep 1000" in told
    assert net.lab.run(net.lab.names[0], "true").returncode == 0  # a lab in use is not touched
