"""Several hosts on one machine: network namespaces joined by a bridge of their own.

A host is a process that holds a network, a mount and a UTS namespace; what runs "on" it enters them.
Nothing touches the machine's own interfaces, and `close` takes everything away again. Needs root.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NETWORK = "10.99"
NOBODY = 99  # last part of an address that no host has
SSHD = "/usr/sbin/sshd"
# As ssh would: options before the host are skipped, and no variable of ours gets through.
AGENT = """#!/bin/bash
while [[ $1 == -* ]]; do case $1 in -l|-p|-o|-i) shift 2;; *) shift;; esac; done
host=$1; shift
[[ -e {folder}/$host.pid ]] || {{ echo "agent: no route to host $host" >&2; exit 255; }}
enter="nsenter -t $(cat {folder}/$host.pid) -n -m -u"
$enter ip -br link show eth0 | grep -q UP || {{ echo "agent: host $host is down" >&2; exit 255; }}
exec env -i HOME=/root PATH=/usr/bin:/bin $enter /bin/sh -c "$*"
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


def missing() -> str | None:
    """What this machine lacks for hosts of one's own, None if nothing."""
    if os.geteuid():
        return "only root can make network namespaces"
    for program in ("ip", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    trial = subprocess.run(["unshare", "-n", "-m", "-u", "true"], capture_output=True)
    return "namespaces are not permitted here" if trial.returncode else None


class Lab:
    """Hosts `<prefix>1` to `<prefix>N`, each with an interface `eth0`.

    Attributes:
        names: The hosts; commands run on the first one see the others by name.
        agent: A program to reach hosts with, in place of ssh.
        nobody: A name with an address that no host has.
    """

    def __init__(self, num_hosts: int, rate: str | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mpicomp-hosts-"))
        self._prefix = f"h{os.getpid() % 100000}x"
        self._subnet = f"{NETWORK}.{os.getpid() % 250 + 1}"
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._switch = self._hold("switch")
        atexit.register(self.close)
        self.names = [f"{self._prefix}{index}" for index in range(1, num_hosts + 1)]
        self.nobody = f"{self._prefix}nobody"
        self._enter("switch", "ip", "link", "add", "br0", "type", "bridge")
        self._enter("switch", "ip", "link", "set", "br0", "up")
        table = "".join(f"{self.address(n)} {n}\n" for n in self.names)
        hosts = self.folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{table}{self._subnet}.{NOBODY} {self.nobody}\n")
        for name in self.names:
            self._add_host(name, hosts, rate)
        self.agent = self.folder / "agent"
        self.agent.write_text(AGENT.format(folder=self.folder))
        self.agent.chmod(0o755)

    def address(self, name: str) -> str:
        """The address of a host."""
        return f"{self._subnet}.{self.names.index(name) + 1}"

    def command(self, name: str, words: Sequence[str]) -> list[str]:
        """The argument list that runs a program on a host."""
        return [
            "nsenter",
            "-t",
            str(self._holders[name].pid),
            "-n",
            "-m",
            "-u",
            f"--wd={os.getcwd()}",
            *words,
        ]

    def run(self, name: str, *words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
        """Runs a program on a host to its end."""
        settings = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL} | settings
        return subprocess.run(self.command(name, words), **settings)

    def link(self, name: str, state: str) -> None:
        """Takes a host from the network ("down"), or gives it back ("up")."""
        self._enter(name, "ip", "link", "set", "eth0", state)

    def close_way_back(self, name: str) -> None:
        """A firewall on a host: nothing new goes from it to the first host."""
        first = self.address(self.names[0])
        self._enter(
            name, "iptables", "-A", "OUTPUT", "-d", first, "-p", "tcp", "--syn", "-j", "DROP"
        )

    def open_way_back(self, name: str) -> None:
        """Takes the firewall away."""
        self._enter(name, "iptables", "-F", "OUTPUT")

    def replace(self, name: str, path: str, by: str) -> None:
        """Another file stands at a path of one host."""
        self._enter(name, "mount", "--bind", by, os.path.realpath(path))

    def restore(self, name: str, path: str) -> None:
        """Undoes `replace`."""
        self._enter(name, "umount", os.path.realpath(path))

    def start_sshd(self, port: int = 2222) -> list[str]:
        """An ssh server on every host; returns ssh's options, the key included, to reach them."""
        for key in ("host_key", "user_key"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key)]
            subprocess.run(words, check=True)
        os.makedirs("/run/sshd", exist_ok=True)
        for name in self.names:
            config = self.folder / f"{name}.sshd_config"
            config.write_text(SSHD_CONFIG.format(port=port, folder=self.folder, host=name))
            self._enter(name, SSHD, "-f", str(config), "-E", str(self.folder / f"{name}.log"))
        known = self.folder / "known_hosts"
        return ["-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={known}"]

    def close(self) -> None:
        """Ends everything that runs on the hosts; the namespaces go with their last process."""
        for name, holder in self._holders.items():
            for pid in self._processes_of(holder.pid):
                os.kill(pid, signal.SIGKILL)
            holder.kill()
            holder.wait()
            (self.folder / f"{name}.pid").unlink(missing_ok=True)
        self._holders.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self.close)

    def processes(self) -> list[str]:
        """What runs on the hosts, for a look at what a job has left."""
        found = []
        for holder in self._holders.values():
            for pid in self._processes_of(holder.pid):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                found.append(b" ".join(words).decode(errors="replace"))
        return [words for words in found if "sshd" not in words]

    def _hold(self, name: str) -> subprocess.Popen[bytes]:
        """Starts the process that holds a host's namespaces; it dies with us."""
        holder = subprocess.Popen(
            [
                "unshare",
                "-n",
                "-m",
                "-u",
                "--propagation",
                "private",
                "setpriv",
                "--pdeathsig",
                "KILL",
                "sleep",
                "infinity",
            ],
        )
        own = os.stat("/proc/self/ns/net").st_ino
        end = time.monotonic() + 10
        while os.stat(f"/proc/{holder.pid}/ns/net").st_ino == own or "sleep" not in Path(
            f"/proc/{holder.pid}/cmdline"
        ).read_text().split("\0"):
            if time.monotonic() > end:
                raise RuntimeError("a namespace did not come up")
            time.sleep(0.01)
        self._holders[name] = holder
        return holder

    def _add_host(self, name: str, hosts: Path, rate: str | None) -> None:
        holder = self._hold(name)
        (self.folder / f"{name}.pid").write_text(str(holder.pid))
        port = f"v{self.names.index(name) + 1}"
        peer = ["peer", "name", "eth0", "netns", str(holder.pid)]
        self._enter("switch", "ip", "link", "add", port, "type", "veth", *peer)
        self._enter("switch", "ip", "link", "set", port, "master", "br0", "up")
        self._enter(name, "hostname", name)
        self._enter(name, "mount", "--bind", str(hosts), "/etc/hosts")
        self._enter(name, "ip", "link", "set", "lo", "up")
        self._enter(name, "ip", "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        self._enter(name, "ip", "link", "set", "eth0", "up")
        if rate is not None:
            shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "20ms"]
            self._enter(name, "tc", "qdisc", "add", "dev", "eth0", "root", *shape)

    def _enter(self, name: str, *words: str) -> None:
        done = subprocess.run(self.command(name, words), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} on {name}: {done.stderr.strip()}")

    @staticmethod
    def _processes_of(holder: int) -> list[int]:
        """Processes in the network namespace of a host, less the one that holds it."""
        namespace = os.stat(f"/proc/{holder}/ns/net").st_ino
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                inside = os.stat(entry / "ns/net").st_ino == namespace
            except OSError:  # ended meanwhile
                continue
            if inside and int(entry.name) != holder:
                found.append(int(entry.name))
        return found


def main() -> None:
    """`python _hosts.py N WORDS...`: runs a command on the first of N hosts."""
    lab = Lab(int(sys.argv[1]))
    try:
        words = [w.replace("@AGENT", str(lab.agent)) for w in sys.argv[2:]]
        for index, name in enumerate(lab.names, 1):
            words = [w.replace(f"@{index}", name) for w in words]
        sys.exit(subprocess.run(lab.command(lab.names[0], words)).returncode)
    finally:
        lab.close()


if __name__ == "__main__":
    main()
