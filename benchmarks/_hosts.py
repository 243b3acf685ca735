"""Several hosts on one machine: network namespaces joined by a bridge of their own.

A host is a process that holds a network, a mount, a UTS and an IPC namespace; what runs "on" it
enters them. Nothing touches the machine's own interfaces or files, and whatever way the process
that made a `Lab` ends, a sweeper takes everything away again. Needs root.

`python benchmarks/_hosts.py 2 WORDS...` runs a command on the first of two hosts.
"""

from __future__ import annotations

import os
import random
import shutil
import string
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _sweep

NETWORK = "10.99.7"  # each lab has a bridge of its own: the same addresses do not meet
NOBODY = 99  # last part of an address that no host has
DOCKER = "172.17.0.1/16"  # what every machine with containers has: the same address on each
NAMESPACES = ("--net", "--mount", "--uts", "--ipc")
# As ssh would: options before the host are skipped, and no variable of ours gets through.
AGENT = """#!/bin/bash
while [[ $1 == -* ]]; do case $1 in -l|-p|-o|-i|-F) shift 2;; *) shift;; esac; done
host=$1; shift
[[ -e {folder}/$host.pid ]] || {{ echo "agent: no route to host $host" >&2; exit 255; }}
enter="nsenter --target $(cat {folder}/$host.pid) {namespaces} --wd=$HOME"
$enter ip -br link show eth0 | grep -q UP || {{ echo "agent: host $host is down" >&2; exit 255; }}
exec env -i HOME="$HOME" PATH=/usr/bin:/bin $enter /bin/sh -c "$*"
"""
SSHD_CONFIG = """Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile {folder}/{host}.sshd
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
"""


def missing(*programs: str) -> str | None:
    """What this machine lacks for hosts of one's own, None if nothing."""
    if os.geteuid():
        return "only root can make network namespaces"
    for program in ("ip", "nsenter", "unshare", *programs):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    trial = ["unshare", *NAMESPACES, "ip", "link", "add", "br0", "type", "bridge"]
    done = subprocess.run(trial, capture_output=True, text=True)
    return f"namespaces cannot be had: {done.stderr.strip()}" if done.returncode else None


class Lab:
    """Hosts `<prefix>1` to `<prefix>N`, each with an interface `eth0`.

    Attributes:
        names: The hosts; each sees the others by name.
        agent: A program to reach hosts with, in place of ssh; it works between them, not from
            outside.
        nobody: A name with an address that no host has.
        ssh_port, key: Of the ssh servers, once `start_sshd` has been called.
        folder: Private files, seen by all hosts as all others are.
    """

    ssh_port = 2222

    def __init__(self, num_hosts: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=_sweep.PREFIX))
        self._lock = _sweep.lock(self.folder)
        self.agent = self.folder / "agent"
        self.key = self.folder / "user_key"
        prefix = "".join(random.SystemRandom().choices(string.ascii_lowercase, k=6))
        self.names = [f"{prefix}{index}" for index in range(1, num_hosts + 1)]
        self.nobody = f"{prefix}nobody"
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._sweeper = subprocess.Popen(
            [sys.executable, _sweep.__file__, str(self.folder)],
            stdin=subprocess.PIPE,
            pass_fds=[self._lock.fileno()],
            start_new_session=True,  # Ctrl-C is for us, not for it
        )
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything that runs on the hosts; the namespaces go with their last process."""
        self._sweeper.communicate()  # it waits for the end of its input, then sweeps
        for holder in self._holders.values():
            holder.wait()
        self._holders.clear()
        self._lock.close()

    def address(self, name: str) -> str:
        """The address of a host."""
        return f"{NETWORK}.{self.names.index(name) + 1}"

    def command(self, name: str, words: Sequence[str]) -> list[str]:
        """The argument list that runs a program on a host, in the caller's working directory.

        The process that is started becomes the program: its pid and its signals are the program's.
        """
        return ["nsenter", f"--target={self._holders[name].pid}", *NAMESPACES, "--wd=.", *words]

    def run(self, name: str, *words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
        """Runs a program on a host to its end."""
        settings = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL} | settings
        return subprocess.run(self.command(name, words), **settings)

    def must(self, name: str, *words: str) -> None:
        """Runs a program on a host, or on the "switch" between them; it must succeed."""
        done = self.run(name, *words)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} on {name}: {done.stderr.strip()}")

    def start(self, name: str, *words: str, **settings: Any) -> subprocess.Popen[str]:
        """Starts a program on a host, with pipes behind both of its outputs."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(self.command(name, words), **{**pipes, "text": True, **settings})

    def processes(self, name: str) -> dict[int, str]:
        """What runs on a host, sshd apart: command lines by pid, for a look at what was left."""
        found = {}
        for pid in inside(self._holders[name].pid):
            line = _sweep.command_line(pid)
            if line and not line.startswith("sshd:") and f"{name}.sshd_config" not in line:
                found[pid] = line
        return found

    def link(self, name: str, state: str) -> None:
        """Takes a host from the network ("down"), or gives it back ("up")."""
        self.must(name, "ip", "link", "set", "eth0", state)

    def close_way_back(self, name: str) -> None:
        """A firewall on a host: nothing new goes from it to the first host."""
        first = self.address(self.names[0])
        rule = ["OUTPUT", "-d", first, "-p", "tcp", "--syn", "-j", "DROP"]
        self.must(name, "iptables", "-A", *rule)

    def open_way_back(self, name: str) -> None:
        """Takes the firewall away."""
        self.must(name, "iptables", "-F", "OUTPUT")

    def add_docker(self, name: str) -> None:
        """Gives a host the interface docker0 with the address it has on every machine."""
        self.must(name, "ip", "link", "add", "docker0", "type", "bridge")
        self.must(name, "ip", "addr", "add", DOCKER, "dev", "docker0")
        self.must(name, "ip", "link", "set", "docker0", "up")

    def replace(self, name: str, path: str, by: str) -> None:
        """Another file stands at a path of one host."""
        self.must(name, "mount", "--bind", by, os.path.realpath(path))

    def restore(self, name: str, path: str) -> None:
        """Undoes `replace`."""
        self.must(name, "umount", os.path.realpath(path))

    def start_sshd(self) -> list[str]:
        """An ssh server on every host; returns the options for ssh besides port and key.

        Neither the user's own configuration nor an ssh agent of theirs takes part.
        """
        for key in (self.folder / "host_key", self.key):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
            subprocess.run(words, check=True)
        kind, public = (self.folder / "host_key.pub").read_text().split()[:2]
        known = self.folder / "known_hosts"
        known.write_text("".join(f"[{n}]:{self.ssh_port} {kind} {public}\n" for n in self.names))
        for name in self.names:
            config = self.folder / f"{name}.sshd_config"
            config.write_text(SSHD_CONFIG.format(port=self.ssh_port, folder=self.folder, host=name))
            log = str(self.folder / f"{name}.sshd_log")
            self.must(name, "mkdir", "-p", "/run/sshd")
            self.must(name, "/usr/sbin/sshd", "-f", str(config), "-E", log)
        settings = ("IdentityAgent=none", "IdentitiesOnly=yes", f"UserKnownHostsFile={known}")
        return ["-F", "none", *(word for each in settings for word in ("-o", each))]

    def _build(self) -> None:
        table = "".join(f"{self.address(name)} {name}\n" for name in self.names)
        hosts = self.folder / _sweep.MOUNTED
        hosts.write_text(f"127.0.0.1 localhost\n{table}{NETWORK}.{NOBODY} {self.nobody}\n")
        self.agent.write_text(AGENT.format(folder=self.folder, namespaces=" ".join(NAMESPACES)))
        self.agent.chmod(0o755)
        self._hold("switch")
        self.must("switch", "ip", "link", "add", "br0", "type", "bridge")
        self.must("switch", "ip", "link", "set", "br0", "up")
        for index, name in enumerate(self.names, 1):
            holder = self._hold(name)
            (self.folder / f"{name}.pid").write_text(str(holder))
            plug = ["link", "add", f"v{index}", "type", "veth"]
            self.must("switch", "ip", *plug, "peer", "name", "eth0", "netns", str(holder))
            self.must("switch", "ip", "link", "set", f"v{index}", "master", "br0", "up")
            self._furnish(name)

    def _furnish(self, name: str) -> None:
        """What is a host's own: name, address, shared memory, /run, /sys."""
        self.must(name, "hostname", name)
        self.must(name, "mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
        self.must(name, "mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
        self.must(name, "mount", "-t", "sysfs", "sysfs", "/sys")
        self.must(name, "ip", "link", "set", "lo", "up")
        self.must(name, "ip", "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        self.must(name, "ip", "link", "set", "eth0", "up")

    def _hold(self, name: str) -> int:
        """Starts the process that holds a host's namespaces; its pid.

        The table of hosts is in place first: by it the sweeper finds all that runs on a host.
        """
        hold = 'mount --bind "$0" /etc/hosts && echo && exec sleep infinity'
        holder = subprocess.Popen(
            ["unshare", *NAMESPACES, "sh", "-c", hold, str(self.folder / _sweep.MOUNTED)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._holders[name] = holder
        assert holder.stdout is not None
        with holder.stdout as ready:
            if not ready.readline():
                raise RuntimeError(f"the namespaces of {name} did not come up")
        return holder.pid


def inside(holder: int) -> list[int]:
    """Processes in the network namespace of a host, less the one that holds it."""
    try:
        namespace = os.stat(f"/proc/{holder}/ns/net").st_ino
    except OSError:  # it has ended, and all with it
        return []
    found = []
    if namespace == os.stat("/proc/self/ns/net").st_ino:  # never our own: it had not begun
        return []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            same = os.stat(entry / "ns/net").st_ino == namespace
        except OSError:  # ended meanwhile
            continue
        if same and int(entry.name) != holder:
            found.append(int(entry.name))
    return found


def main() -> None:
    """`python _hosts.py N WORDS...`: a command on the first of N hosts.

    Of the words, `@1` to `@N` become the names of the hosts, and `@AGENT` the way to reach them.
    """
    with Lab(int(sys.argv[1])) as lab:
        names = {"@AGENT": str(lab.agent)} | {f"@{i}": name for i, name in enumerate(lab.names, 1)}
        words = sys.argv[2:]
        for short, name in names.items():
            words = [word.replace(short, name) for word in words]
        status = subprocess.run(lab.command(lab.names[0], words)).returncode
    sys.exit(status)


if __name__ == "__main__":
    main()
