"""Fixtures: the launcher as a subprocess, and the MPI of the Python which runs the tests."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mpicomp_launch
from mpicomp_launch import command, frames, mpis, worker

LAUNCHERS = {name for family in mpis.FAMILIES.values() for name in family.programs}


@pytest.fixture(scope="session")
def environ():
    """The environment, with the launcher importable and nothing of our own options in it."""
    root = str(Path(mpicomp_launch.__file__).parents[1])
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MPICOMP_", "OMP_"))}
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="session")
def mpi(environ):
    """The MPI under test. A library without its launcher, or the reverse, is an error."""
    beside = os.pathsep.join([os.path.join(sys.prefix, "bin"), environ["PATH"]])
    has_launcher = any(shutil.which(name, path=beside) for name in LAUNCHERS)
    has_library = not subprocess.run(
        [sys.executable, "-c", "from mpi4py import MPI"], capture_output=True
    ).returncode
    if not has_launcher and not has_library:
        pytest.skip("no MPI is installed: neither a library for mpi4py nor an mpirun")
    return mpis.find(command.parse([sys.executable, "-c", "0"], environ), None, environ)


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
