"""Fixtures: the launcher, one of its ranks, and scripts that call `run`, as subprocesses."""

import json
import subprocess
import sys

import pytest

from mpicomp_launch import frames, worker


@pytest.fixture(scope="session")
def environ(bare_environ):
    """The launcher decides on threads itself."""
    return bare_environ


@pytest.fixture
def script(tmp_path):
    """Writes a Python file and returns its path."""

    def write(source, name="train.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        return str(path)

    return write


class Rank:
    """What one rank has said: `out` and `err`, records by kind, and lines that are no frames."""

    def __init__(self, stderr, returncode):
        decoder = frames.Decoder()
        items = [*decoder.feed(stderr), *decoder.flush()]
        found = [item for item in items if isinstance(item, frames.Frame)]
        self.returncode = returncode
        self.plain = [item for item in items if isinstance(item, bytes)]
        self.out, self.err = (
            b"".join(
                frame.payload + (b"\n" if frame.kind == stream else b"")
                for frame in found
                if frame.kind.lower() == stream
            )
            for stream in "oe"
        )
        self.order = "".join(frame.kind for frame in found)
        self.failures = self._records(found, "f")
        self.ends = self._records(found, "x")

    @staticmethod
    def _records(found, kind):
        text = b"".join(
            frame.payload + (b"\n" if frame.kind == kind else b"")
            for frame in found
            if frame.kind.lower() == kind
        )
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def rank(environ):
    """Runs the worker as one rank, without MPI; keyword arguments are variables."""

    def run(*words, options=(), cwd=None, stdout=subprocess.DEVNULL, **variables):
        done = subprocess.run(
            [sys.executable, *options, worker.__file__, *words],
            env={**environ, frames.LISTENED_TO: "1", **variables},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            timeout=60,
        )
        return Rank(done.stderr, done.returncode)

    return run


@pytest.fixture
def launch(environ):
    """Runs `mpicomp-launch WORDS...`; keyword arguments are variables."""

    def run(*words, cwd=None, **variables):
        return subprocess.run(
            [sys.executable, "-m", "mpicomp_launch", *words],
            env={**environ, **variables},
            cwd=cwd,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=50,
        )

    return run


@pytest.fixture
def launch_python(launch, mpi):
    """Runs a Python program on two ranks."""

    def run(*words, **settings):
        return launch("-np", "2", "--tag", "none", sys.executable, *words, **settings)

    return run


HEAD = """
import os, sys, time
from mpicomp_launch import LaunchError, RankError, run
def ranks():
    from mpi4py import MPI
    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
"""


@pytest.fixture(scope="session")
def head():
    """The first lines of a script that calls `run`."""
    return HEAD


@pytest.fixture
def caller(environ, mpi, script, tmp_path):
    """Runs a script that calls `run`, with its own directory for temporary files."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def call(source, *words, head=HEAD, **settings):
        path = script(head + source)
        done = subprocess.run(
            [sys.executable, *(words or [path])],
            env={**environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            **settings,
        )
        assert not list(temporary.glob("mpicomp-*"))
        return done

    return call
