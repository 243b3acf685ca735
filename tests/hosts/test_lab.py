"""The laboratory itself: what a test over several hosts takes for granted."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SERVE = """
import socket
server = socket.create_server(("", 0))
print(server.getsockname()[1], flush=True)
while True:
    server.accept()
"""


def connect(lab, name, to, port):
    """Why a host cannot reach a port of another one; nothing if it can."""
    code = f"import socket; socket.create_connection(({to!r}, {port}), 2)"
    done = lab.run(name, sys.executable, "-c", code)
    return done.stderr.strip().rpartition("\n")[2]


def ssh_command(lab, ssh, host, *words):
    port = str(lab.ssh_port)
    return [
        "ssh",
        *ssh,
        "-o",
        "ConnectTimeout=3",
        "-o",
        "BatchMode=yes",
        "-p",
        port,
        "-i",
        str(lab.key),
        host,
        *words,
    ]


@pytest.fixture
def server(lab):
    """A port of the first host at which somebody listens."""
    with lab.start(lab.names[0], sys.executable, "-c", SERVE) as process:
        yield int(process.stdout.readline())
        process.kill()


def test_hosts_have_names_and_see_each_other(lab, server):
    first, *others = lab.names
    for name in others:
        assert lab.run(name, "hostname").stdout.strip() == name
        assert connect(lab, name, first, server) == ""
    assert socket.gethostname() not in lab.names


def test_what_is_started_on_a_host_is_where_the_caller_is(lab, tmp_path):
    assert lab.run(lab.names[1], "pwd", cwd=tmp_path).stdout.strip() == str(tmp_path)


def test_what_is_started_on_a_host_gets_its_own_signals(lab):
    with lab.start(lab.names[1], "sleep", "60") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM


def test_the_agent_runs_a_command_line_on_a_host_in_an_environment_of_its_own(lab):
    first, second, _ = lab.names
    words = [str(lab.agent), "-x", "-p", "22", second, "echo", "$(hostname)", "'a  b'", "$SECRET"]
    done = lab.run(first, *words, env={**os.environ, "SECRET": "x"})
    assert done.stdout == f"{second} a  b\n"


@pytest.mark.parametrize("way", ["agent", "ssh"])
def test_a_program_reached_from_another_host_gives_its_status(lab, ssh, way):
    first, second, _ = lab.names
    words = [str(lab.agent), second] if way == "agent" else ssh_command(lab, ssh, second)
    done = lab.run(first, *words, "hostname; exit 7")
    assert (done.stdout.strip(), done.returncode, done.stderr) == (second, 7, "")


def test_ssh_needs_port_and_key(lab, ssh):
    first, second, _ = lab.names
    assert lab.run(first, "ssh", *ssh, "-o", "BatchMode=yes", second, "true").returncode == 255
    words = ssh_command(lab, ssh, second, "true")
    assert lab.run(first, *words).returncode == 0
    words.remove("-i")
    words.remove(str(lab.key))
    assert "Permission denied" in lab.run(first, *words).stderr


def test_a_host_that_is_down_is_reached_in_no_way(lab, ssh, server):
    first, second, third = lab.names
    lab.link(second, "down")
    try:
        assert connect(lab, second, first, server)
        agent = lab.run(first, str(lab.agent), second, "true")
        assert (agent.returncode, second in agent.stderr) == (255, True)
        assert lab.run(first, *ssh_command(lab, ssh, second, "true")).returncode == 255
        assert lab.run(first, str(lab.agent), third, "true").returncode == 0
    finally:
        lab.link(second, "up")
    assert lab.run(first, *ssh_command(lab, ssh, second, "true")).returncode == 0


def test_an_address_without_a_host_is_known_and_not_reached(lab, ssh):
    first = lab.names[0]
    assert lab.run(first, "getent", "hosts", lab.nobody).returncode == 0
    assert lab.run(first, str(lab.agent), lab.nobody, "true").returncode == 255
    assert lab.run(first, *ssh_command(lab, ssh, lab.nobody, "true")).returncode == 255


def test_the_firewall_closes_the_way_back_only(lab, ssh, server):
    first, second, third = lab.names
    lab.close_way_back(second)
    try:
        assert "timed out" in connect(lab, second, first, server)
        assert lab.run(first, *ssh_command(lab, ssh, second, "true")).returncode == 0
        assert connect(lab, third, first, server) == ""
    finally:
        lab.open_way_back(second)


def test_another_file_at_a_path_of_one_host(lab, tmp_path):
    first, second, _ = lab.names
    program, other = tmp_path / "program", tmp_path / "other"
    for path, word in ((program, "one"), (other, "two")):
        path.write_text(f"#!/bin/sh\necho {word}\n")
        path.chmod(0o755)
    lab.replace(second, str(program), str(other))
    try:
        assert lab.run(first, str(program)).stdout == "one\n"
        assert lab.run(first, str(lab.agent), second, str(program)).stdout == "two\n"
    finally:
        lab.restore(second, str(program))
    assert lab.run(second, str(program)).stdout == "one\n"


def test_another_python_at_the_path_of_ours(lab, other_python):
    first, second, _ = lab.names
    show = (sys.executable, "-c", "import sys; print(*sys.version_info[:2])")
    own = lab.run(first, *show).stdout
    lab.replace(second, sys.executable, other_python)
    try:
        assert lab.run(first, *show).stdout == own
        assert lab.run(second, *show).stdout not in (own, "")
    finally:
        lab.restore(second, sys.executable)


LAB = """
import os, sys
import _hosts
lab = _hosts.Lab(2)
lab.start(lab.names[1], "setsid", "sleep", "1000")
lab.start(lab.names[0], sys.executable, "-c", "import os, time; os.fork(); time.sleep(1000)")
while sum(len(lab.processes(name)) for name in lab.names) < 3: pass
networks = [lab.run(name, "stat", "-Lc", "%i", "/proc/self/ns/net") for name in lab.names]
print(lab.folder, *(network.stdout.strip() for network in networks), flush=True)
"""
ENDINGS = {
    "close": "lab.close(); input()",
    "exit": "",
    "exception": "raise RuntimeError",
    "hard exit": "os._exit(3)",
    "kill": "os.kill(os.getpid(), 9)",
    "terminate": "os.kill(os.getpid(), 15)",
    "interrupt": "os.kill(0, 2); import time; time.sleep(60)",
}


def in_network(number):
    """Processes in a network namespace."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.stat(entry / "ns/net").st_ino == number:
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_nothing_is_left_whatever_way_a_lab_ends(lab, environ, ending):
    with subprocess.Popen(
        [sys.executable, "-c", LAB + ending],
        env=environ,
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        folder, *networks = process.stdout.readline().split()
        assert len(networks) == 2
        end = time.monotonic() + 20
        while any(in_network(int(number)) for number in networks) or os.path.exists(folder):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert folder not in Path("/proc/self/mounts").read_text()
        process.stdin.close()
    assert all(lab.run(name, "true").returncode == 0 for name in lab.names)


def test_two_labs_do_not_meet(lab, new_lab, server):
    with new_lab(2) as other:
        assert not set(lab.names) & set(other.names)
        assert connect(lab, lab.names[1], lab.address(lab.names[0]), server) == ""
        assert "refused" in connect(other, other.names[1], other.address(other.names[0]), server)
        agent = lab.run(lab.names[0], str(lab.agent), other.names[1], "true")
        assert agent.returncode == 255
