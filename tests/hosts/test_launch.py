"""Jobs over several hosts: reached by an agent and by ssh, and what is said when that fails."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 8
ODD = " a b\n\"c'd,e=f;$HOME \\ \t%r*{x}:é\udcff"
WHERE = """
import json, os
from mpi4py import MPI
world = MPI.COMM_WORLD
facts = [world.rank, os.uname().nodename, os.getcwd(), os.environ.get("ODD"),
         os.environ.get("OWN"), os.environ["OMP_NUM_THREADS"]]
print(json.dumps(facts))
"""
WAIT = """
import os, subprocess, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
subprocess.Popen(["sleep", "300"])
def tidy(signum, frame):
    os.write(1, b"tidy\\n")
    sys.exit(3)
import signal
for name in ("SIGTERM", "SIGUSR1"):
    signal.signal(getattr(signal, name), tidy)
world.Barrier()
print("up", flush=True)
if world.rank == world.size - 1:
    {}
time.sleep(300)
"""


@pytest.fixture
def start(lab, mpi, environ):
    """Starts the launcher on the first host; hosts are reached by the agent."""
    started = []

    def start(*words, agent=True, **variables):
        reach = ["--rsh-agent", str(lab.agent)] if agent else []
        limit = ["--start-timeout", str(START_SECONDS)]
        job = lab.start(
            lab.names[0],
            *[sys.executable, "-m", "mpicomp_launch", *reach, *limit, *words],
            env={**environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
        )
        started.append(job)
        return job

    yield start
    for job in started:
        job.kill()
        job.communicate()
    wait_until(lambda: not left(lab))


@pytest.fixture
def launch(start):
    """Runs the launcher to its end."""

    def run(*words, **settings):
        job = start(*words, **settings)
        out, err = job.communicate(timeout=90)
        return subprocess.CompletedProcess(words, job.returncode, out, err)

    return run


def left(lab):
    """Processes on all hosts, servers apart."""
    return [words for name in lab.names for words in lab.processes(name).values()]


def wait_until(condition, seconds=15):
    """Whether something comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def all_up(job, ranks):
    """Waits until every rank has said that it is up."""
    seen = [job.stdout.readline() for _ in range(ranks)]
    assert all(line.endswith("up\n") for line in seen), [*seen, job.stderr.read()]


def test_uneven_hosts_and_what_ranks_get(lab, launch):
    a, b, c = lab.names
    config = lab.folder / "cluster.toml"
    config.write_text(f'[host.{b}]\nenv = ["OWN=of b"]\n')
    words = ["--hosts", f"{a}:2,{b}:1,{c}:1", "--config", str(config), "--env", "ODD", "--tag=none"]
    done = launch(*words, sys.executable, "-c", WHERE, ODD=ODD)
    assert done.returncode == 0, done.stderr
    rows = sorted(map(json.loads, done.stdout.splitlines()))
    assert [row[:2] for row in rows] == [[0, a], [1, a], [2, b], [3, c]]
    assert {row[2] for row in rows} == {os.getcwd()}
    assert {row[3] for row in rows} == {ODD}
    assert [row[4] for row in rows] == [None, None, "of b", None]
    cores = len(os.sched_getaffinity(0))
    assert [row[5] for row in rows] == [str(max(1, cores // n)) for n in (2, 2, 1, 1)]


def test_secrets_are_in_no_argument_list(lab, start):
    a, b, _ = lab.names
    job = start("--hosts", f"{a},{b}", "--env", "ODD", sys.executable, "-c", WAIT.format("pass"),
                ODD="hunter2")  # fmt: skip
    all_up(job, 2)
    lists = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [words for words in lists if b"hunter2" in words]


def test_output_of_hosts(lab, launch, tmp_path):
    a, b, _ = lab.names
    code = "import sys; print('out'); sys.stderr.write('err\\n')"
    words = ["--hosts", f"{a},{b}", "--tag", "host:rank", "--output-dir", str(tmp_path / "logs")]
    done = launch(*words, "--timestamps", sys.executable, "-c", code)
    lines = sorted(done.stdout.splitlines())
    tags = [re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} (.*)", line).group(1) for line in lines]
    assert sorted(tags) == [f"[{a}:0] out", f"[{b}:1] out"]
    assert sorted(done.stderr.splitlines())[0].endswith("err")
    for rank in (0, 1):
        log = tmp_path / "logs" / f"rank-{rank}.log"
        assert sorted(log.read_text().splitlines()) == ["err", "out"]
        assert log.stat().st_mode & 0o77 == 0


def test_by_ssh_with_key_and_port(lab, ssh, launch):
    a, b, c = lab.names
    words = ["--hosts", f"{a}:1,{b}:1,{c}:2", "--ssh-port", str(lab.ssh_port)]
    words += ["--ssh-identity", str(lab.key), f"--ssh-args={' '.join(ssh)}", "--env", "ODD"]
    done = launch(*words, "--tag=none", sys.executable, "-c", WHERE, agent=False, ODD=ODD)
    assert done.returncode == 0, done.stderr
    rows = sorted(map(json.loads, done.stdout.splitlines()))
    assert [row[:2] for row in rows] == [[0, a], [1, b], [2, c], [3, c]]
    assert {row[3] for row in rows} == {ODD}


def test_wrong_key_is_named(lab, ssh, launch):
    a, b, _ = lab.names
    words = ["--hosts", f"{a},{b}", "--ssh-port", str(lab.ssh_port), f"--ssh-args={' '.join(ssh)}"]
    done = launch(*words, sys.executable, "-c", "0", agent=False, HOME="/nonexistent")
    assert done.returncode == 125
    assert re.search(rf"{b}: it cannot be reached: .*denied.*; try by hand: ssh ", done.stderr)


def test_the_example_trains_across_hosts(lab, launch):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    a, b, c = lab.names
    script = str(ROOT / "examples/digits.py")
    words = ["--hosts", f"{a},{b},{c}", "--compression", "powersgd", "--start-timeout", "60"]
    done = launch(*words, "--tag=none", sys.executable, script, "--steps", "60", "--batch", "63")
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout


# What goes wrong at the start.


def test_unreachable_host_is_named(lab, launch):
    done = launch("--hosts", f"{lab.names[0]},{lab.nobody}", sys.executable, "-c", "0")
    assert done.returncode == 125
    assert f"mpicomp-launch: {lab.nobody}: it cannot be reached: agent: no route" in done.stderr
    assert f"mpicomp-launch: {lab.names[0]}:" not in done.stderr


def test_unreachable_host_is_named_by_ssh(lab, ssh, launch):
    words = ["--hosts", f"{lab.names[0]},{lab.nobody}", f"--ssh-args={' '.join(ssh)}"]
    done = launch(*words, "--ssh-args=-o ConnectTimeout=2", sys.executable, "-c", "0", agent=False)
    assert done.returncode == 125
    assert f"mpicomp-launch: {lab.nobody}: it cannot be reached: ssh: " in done.stderr


def test_host_that_is_down_is_named(lab, launch):
    a, b, c = lab.names
    lab.link(c, "down")
    try:
        done = launch("--hosts", f"{a},{b},{c}", sys.executable, "-c", "0")
    finally:
        lab.link(c, "up")
    assert done.returncode == 125
    assert f"mpicomp-launch: {c}: it cannot be reached: agent: host {c} is down" in done.stderr
    assert f"mpicomp-launch: {b}:" not in done.stderr


def test_firewall_on_the_way_back_is_named(lab, launch):
    a, b, c = lab.names
    lab.close_way_back(c)
    try:
        done = launch("--hosts", f"{a},{b},{c}", sys.executable, "-c", WHERE)
    finally:
        lab.open_way_back(c)
    assert done.returncode == 125
    assert f"mpicomp-launch: {c}: it cannot connect back to {lab.address(a)}, port" in done.stderr
    assert f"mpicomp-launch: {b}:" not in done.stderr


def test_other_python_is_named(lab, launch, other_python):
    a, b, c = lab.names
    lab.replace(c, sys.executable, other_python)
    try:
        done = launch("--hosts", f"{a},{b},{c}", sys.executable, "-c", WHERE)
    finally:
        lab.restore(c, sys.executable)
    assert done.returncode == 125, done.stderr
    own = ".".join(map(str, sys.version_info[:3]))
    named = rf"rank 2 on {c} runs Python 3\.\d+\.\d+, and rank 0 on {a} {own}"
    assert re.search(named, done.stderr) or f"{c}: it has another Python" in done.stderr


def test_missing_directory_is_named(lab, launch):
    a, b, _ = lab.names
    done = launch(
        "--hosts", f"{a},{b}", "--cwd", str(lab.folder / "none"), sys.executable, "-c", "0"
    )
    assert done.returncode != 0
    assert "none" in done.stderr


def test_lost_in_an_interface_that_leads_nowhere(lab, launch):
    """A bridge with one address on every host, as containers bring it."""
    a, b, _ = lab.names
    for name in (a, b):
        lab.add_docker(name)
    done = launch("--hosts", f"{a},{b}", "--tag=none", sys.executable, "-c", WHERE)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2


# How jobs end.


@pytest.mark.parametrize(
    ("failure", "status", "text"),
    [
        ("raise KeyError('the reason')", 1, "KeyError: 'the reason'"),
        ("sys.exit(4)", 4, "failed with status 4"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by signal 9 (SIGKILL)"),
        ("os.kill(os.getpid(), 11)", 139, "was killed by signal 11 (SIGSEGV)"),
    ],
)
def test_a_rank_elsewhere_fails(lab, launch, failure, status, text):
    a, b, c = lab.names
    done = launch("--hosts", f"{a},{b},{c}", sys.executable, "-c", WAIT.format(failure))
    assert done.returncode == status, done.stderr
    last = done.stderr[done.stderr.index("mpicomp-launch: rank 2 on") :]
    assert last.startswith(f"mpicomp-launch: rank 2 on {c} ")
    assert text in last
    assert wait_until(lambda: not left(lab)), left(lab)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_ranks_on_all_hosts(lab, start, signum):
    job = start("--hosts", ",".join(lab.names), sys.executable, "-c", WAIT.format("pass"))
    all_up(job, 3)
    job.send_signal(signum)
    out, err = job.communicate(timeout=30)
    assert job.returncode == (143 if signum == signal.SIGTERM else 3), err
    assert out.count("tidy") == 3
    assert wait_until(lambda: not left(lab)), left(lab)


def test_interrupt_once_lets_ranks_tidy_up(lab, start):
    code = WAIT.format("pass").replace("SIGTERM", "SIGINT")
    job = start("--hosts", ",".join(lab.names), sys.executable, "-c", code)
    all_up(job, 3)
    job.send_signal(signal.SIGINT)
    out, err = job.communicate(timeout=30)
    assert job.returncode == 130, err
    assert out.count("tidy") == 3
    assert wait_until(lambda: not left(lab)), left(lab)


def test_interrupt_twice_kills(lab, start):
    code = (
        WAIT.format("pass").replace("sys.exit(3)", "time.sleep(300)").replace("SIGTERM", "SIGINT")
    )
    job = start("--hosts", ",".join(lab.names), "--grace=100", sys.executable, "-c", code)
    all_up(job, 3)
    job.send_signal(signal.SIGINT)
    assert [job.stdout.readline()[-5:] for _ in range(3)] == ["tidy\n"] * 3
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=30)
    assert job.returncode == 130
    assert wait_until(lambda: not left(lab)), left(lab)


@pytest.mark.parametrize("victim", ["launcher", "mpirun"])
def test_nobody_is_left_when_the_head_is_killed(lab, start, victim):
    job = start("--hosts", ",".join(lab.names), sys.executable, "-c", WAIT.format("pass"))
    all_up(job, 3)
    if victim == "launcher":
        job.kill()
    else:
        for child in children(job.pid):
            os.kill(child, signal.SIGKILL)
    job.communicate(timeout=30)
    assert job.returncode != 0
    assert wait_until(lambda: not left(lab), 30), left(lab)


def children(pid):
    """Processes whose parent it is."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = stat.read_text(errors="replace").rpartition(")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == pid:
            found.append(int(stat.parent.name))
    return found


def test_timeout(lab, launch):
    words = ["--hosts", ",".join(lab.names), "--timeout", "4"]
    done = launch(*words, sys.executable, "-c", WAIT.format("pass"))
    assert done.returncode == 124, done.stderr
    assert "the job was ended after 4 s (--timeout)" in done.stderr
    assert wait_until(lambda: not left(lab)), left(lab)


def test_two_launches_at_once(lab, start):
    hosts = ",".join(lab.names)
    jobs = [start("--hosts", hosts, "--tag=none", sys.executable, "-c", WHERE) for _ in range(2)]
    jobs.append(start("--hosts", hosts, sys.executable, "-c", WAIT.format("sys.exit(6)")))
    ends = [job.communicate(timeout=60) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 6], ends
    for out, _ in ends[:2]:
        assert [json.loads(line)[0] for line in sorted(out.splitlines())] == [0, 1, 2]


# --check


def test_check_says_what_works(lab, launch):
    a, b, _ = lab.names
    done = launch("--check", "--json", "--hosts", f"{a},{b}")
    found = {(each["where"], each["what"]): each for each in json.loads(done.stdout)["findings"]}
    for what in ("reached", "Python", "mpi4py", "paths", "clock", "interface", "way back"):
        assert found[b, what]["state"] == "ok", found[b, what]
    for what in ("2 ranks here", f"2 ranks, here and {b}"):
        assert "all-reduce" in found[a, what]["value"], found[a, what]


def test_check_names_what_does_not(lab, launch, other_python):
    a, b, c = lab.names
    lab.close_way_back(b)
    lab.replace(c, sys.executable, other_python)
    try:
        done = launch("--check", "--json", "--hosts", f"{a},{b},{c},{lab.nobody}")
    finally:
        lab.open_way_back(b)
        lab.restore(c, sys.executable)
    assert done.returncode == 1
    found = {(each["where"], each["what"]): each for each in json.loads(done.stdout)["findings"]}
    assert found[b, "way back"]["state"] == "failure"
    assert found[c, "Python"]["state"] == "failure"
    assert found[lab.nobody, "reached"]["state"] == "failure"
    assert found[lab.nobody, "reached"]["advice"].startswith(f"try by hand: {lab.agent}")


def test_check_by_ssh_of_hosts_that_are_all_others(lab, launch, ssh):
    a, b, c = lab.names
    words = ["--hosts", f"{b},{c}", "--ssh-port", str(lab.ssh_port)]
    words += ["--ssh-identity", str(lab.key), f"--ssh-args={' '.join(ssh)}"]
    done = launch("--check", "--json", *words, agent=False)
    assert not done.stderr
    found = {(each["where"], each["what"]): each for each in json.loads(done.stdout)["findings"]}
    for host in (b, c):
        for what in ("reached", "MPI threads", "limits", "shared memory", "way back"):
            assert found[host, what]["state"] in ("ok", "warning"), found[host, what]
        assert (host, "ssh back") in found
    for what in (f"2 ranks on {b}", f"2 ranks, {b} and {c}"):
        assert "all-reduce" in found[a, what]["value"], found[a, what]
    assert not [what for _, what in found if "here" in what]
