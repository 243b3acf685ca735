"""Hosts of one's own: network namespaces on this machine, where they can be had."""

import os
import subprocess
import sys
from pathlib import Path

import _hosts
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def new_lab():
    """Makes a lab, or the test is skipped with the reason why none can be had."""
    reason = _hosts.missing("iptables")
    if reason:
        pytest.skip(reason)
    return _hosts.Lab


@pytest.fixture(scope="module")
def lab(new_lab):
    """Three hosts for a whole file. A test that changes one changes it back."""
    with new_lab(3) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def ssh(lab):
    """The options by which ssh reaches the hosts, besides port and key."""
    if not Path("/usr/sbin/sshd").exists():
        pytest.skip("no ssh server is installed")
    return lab.start_sshd()


@pytest.fixture(scope="session")
def environ(bare_environ):
    """The launcher decides on threads itself, and programs may make hosts of their own."""
    paths = [str(ROOT / "benchmarks"), bare_environ["PYTHONPATH"]]
    return {**bare_environ, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="session")
def other_python():
    """A Python of another version than the one that runs the tests, on PATH or beside ours."""
    directories = [*os.get_exec_path(), *Path(sys.base_prefix).parent.glob("*/bin")]
    for minor in set(range(8, 20)) - {sys.version_info.minor}:
        for directory in directories:
            path = os.path.join(directory, f"python3.{minor}")
            if os.access(path, os.X_OK) and not subprocess.call(
                [path, "-c", ""], stderr=subprocess.DEVNULL
            ):
                return path
    pytest.skip("only one version of Python is installed")
