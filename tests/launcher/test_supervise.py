"""However a rank ends, its end is told, its output is whole, and no process of it is left."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpicomp_launch import frames, worker

# Notes each process that it makes; two sessions of their own, deaf to what one ends processes with.
DAEMONS = """
import os, signal, sys, time
def note(): open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
note()
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        if os.fork(): os._exit(0)
        note()
        time.sleep(120)
        os._exit(0)
while len(open(sys.argv[1]).readlines()) < 3: time.sleep(0.01)
print("up", flush=True)
"""
# A daemon that is a new process at every moment; its group is what stays.
RUNAWAY = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    open(sys.argv[1], "w").write(f"{os.getpid()}\\n")
    end = time.time() + 60
    while time.time() < end:
        if os.fork(): os._exit(0)
        open(sys.argv[1] + ".now", "w").write(str(os.getpid()))
    os._exit(0)
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read(): time.sleep(0.01)
print("up", flush=True)
"""
WAIT = "time.sleep(120)"


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def exists(group):
    """Whether a group has members. The kernel knows; /proc cannot be read fast enough."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


class Supervised:
    """A worker whose program has said `up`."""

    def __init__(self, environ, note, code, **variables):
        self._note = note
        self.process = subprocess.Popen(
            [sys.executable, worker.__file__, "-c", code, str(note)],
            env={**environ, frames.LISTENED_TO: "1", "MPICOMP_GRACE": "0.5", **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        decoder = frames.Decoder()
        self._decoder = decoder
        self.frames = []
        while not any(frame.payload == b"up" for frame in self.frames):
            assert self._hear(), "it ended before it was up"
        self.guard = int(self.record("s").split(b'"pid": ')[1].split(b",")[0])

    def _hear(self):
        data = os.read(self.process.stderr.fileno(), 1 << 16)
        self.frames += self._decoder.feed(data)
        return data

    def record(self, kind):
        """The payload of the only frame of a kind."""
        (payload,) = [frame.payload for frame in self.frames if frame.kind == kind]
        return payload

    def finish(self):
        """Hears the rest, and returns the exit status."""
        while self._hear():
            pass
        return self.process.wait(30)

    def noted(self):
        return [int(line) for line in self._note.read_text().split()]


@pytest.fixture
def supervised(tmp_path, environ):
    """Starts programs, and kills what they leave."""
    started = []

    def start(code, **variables):
        started.append(Supervised(environ, tmp_path / "pids", code, **variables))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()
        for pid in each.noted():
            assert pid > 1
            for kill in (os.kill, os.killpg):
                with contextlib.suppress(OSError):
                    kill(pid, signal.SIGKILL)


def assert_gone(check, *args):
    """What has been killed takes a moment to end."""
    end = time.monotonic() + 10
    while (left := check(*args)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left


def living(pids):
    return [pid for pid in pids if is_alive(pid)]


@pytest.mark.parametrize(
    ("whom", "signum", "status", "ended"),
    [
        (None, None, 0, b'{"status": 0, "signal": 0, "stopped": false}'),
        ("shim", signal.SIGTERM, 143, b'{"status": 0, "signal": 15, "stopped": true}'),
        ("shim", signal.SIGKILL, -9, b'{"status": 0, "signal": 9, "stopped": true}'),
        ("guard", signal.SIGTERM, 143, b'{"status": 0, "signal": 15, "stopped": true}'),
        ("guard", signal.SIGKILL, 137, None),
        ("rank", signal.SIGKILL, 137, b'{"status": 0, "signal": 9, "stopped": false}'),
        ("rank", signal.SIGSEGV, 139, b'{"status": 0, "signal": 11, "stopped": false}'),
    ],
    ids=str,
)
def test_no_daemon_is_left(supervised, whom, signum, status, ended):
    job = supervised(DAEMONS + (WAIT if whom else ""))
    pids = job.noted()
    assert len(pids) == 3
    if whom:
        target = {"shim": job.process.pid, "guard": job.guard, "rank": pids[0]}[whom]
        os.kill(target, signum)
    assert job.finish() == status
    assert [frame.payload for frame in job.frames if frame.kind == "x"] == [ended] * bool(ended)
    assert_gone(living, pids)


@pytest.mark.parametrize("tail", [WAIT, "while True: print('more', flush=True)"])
def test_no_daemon_is_left_when_nobody_reads(supervised, tail):
    job = supervised(DAEMONS + tail)
    job.process.stderr.close()
    assert job.process.wait(30) == 137
    assert_gone(living, job.noted())


@pytest.mark.parametrize("end", ["", WAIT], ids=["rank ends", "shim is killed"])
def test_no_runaway_is_left(supervised, end):
    job = supervised(RUNAWAY + end)
    (group,) = job.noted()
    if end:
        job.process.kill()
    job.finish()
    assert_gone(exists, group)


def test_a_rank_may_kill_its_group(supervised):
    job = supervised(DAEMONS + "os.killpg(0, signal.SIGKILL)")
    assert job.finish() == 137
    assert job.record("x") == b'{"status": 0, "signal": 9, "stopped": false}'


def test_grace(supervised):
    deaf = "signal.signal(signal.SIGTERM, lambda *a: print('asked', flush=True))\n"
    code = DAEMONS.replace("print(", deaf + "print(") + "while True: time.sleep(1)"
    job = supervised(code)
    job.process.terminate()
    assert job.finish() == 137
    assert b"asked" in [frame.payload for frame in job.frames]


def test_a_rank_may_tidy_up(supervised):
    tidy = "signal.signal(signal.SIGTERM, lambda *a: sys.exit(7))\n"
    job = supervised(DAEMONS.replace("print(", tidy + "print(") + WAIT, MPICOMP_GRACE="60")
    job.process.terminate()
    assert job.finish() == 7
    assert job.record("x") == b'{"status": 7, "signal": 0, "stopped": true}'


@pytest.mark.parametrize(
    ("sent", "caught", "stopped"),
    [
        (signal.SIGUSR1, signal.SIGUSR1, False),
        (signal.SIGUSR2, signal.SIGTERM, True),
        (signal.SIGURG, signal.SIGINT, True),
        (signal.SIGHUP, signal.SIGHUP, True),
    ],
)
def test_what_signals_become(supervised, sent, caught, stopped):
    catch = f"signal.signal({int(caught)}, lambda *a: sys.exit(4))\n"
    job = supervised(DAEMONS.replace("print(", catch + "print(") + WAIT)
    job.process.send_signal(sent)
    assert job.finish() == 4
    assert f'"stopped": {str(stopped).lower()}'.encode() in job.record("x")


def test_interrupt(supervised):
    job = supervised(DAEMONS + WAIT)
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == 130
    assert b"KeyboardInterrupt" in job.record("f")


def test_ignored_hangup_stays_ignored(tmp_path, environ, supervised):
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = supervised(DAEMONS + "time.sleep(1); print('still here')")
    finally:
        signal.signal(signal.SIGHUP, ignored)
    job.process.send_signal(signal.SIGHUP)
    assert job.finish() == 0
    assert job.frames[-2].payload == b"still here"


@pytest.mark.parametrize(
    ("code", "status", "signum"),
    [
        ("import os; os._exit(5)", 5, 0),
        ("import os; os.abort()", 0, 6),
        ("import os; os.execvp('sh', ['sh', '-c', 'exit 9'])", 9, 0),
    ],
)
def test_end_is_told(rank, code, status, signum):
    done = rank("-c", code)
    assert done.ends == [{"status": status, "signal": signum, "stopped": False}]
    assert done.returncode == (128 + signum if signum else status)


def test_a_reader_that_stands_still_holds_no_stopped_rank(supervised):
    job = supervised(DAEMONS + "print('y' * 500_000)\n" + WAIT)
    time.sleep(1)
    job.process.terminate()
    assert job.process.wait(30) == 143
    assert_gone(living, job.noted())
