"""A Slurm of one's own: two nodes on this machine, on loopback, in a private directory."""

import os
import shutil
import signal
import socket
import subprocess
import time

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "salloc", "srun")
CONFIG = """
ClusterName=mpicomp
SlurmctldHost={name}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=3
NodeName=n1 NodeHostname={name} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={name} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=main Nodes=ALL Default=YES State=UP
"""
PMI = {"mpich": "pmi2", "intel": "pmi2", "openmpi": "pmix"}
UP_SECONDS = 20


def free_ports(count):
    """Ports that nobody listens at."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """The variables by which Slurm's commands find it."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent or os.geteuid():
        pytest.skip(f"no Slurm of our own: {', '.join(absent) or 'only root can start one'}")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool.n1", "spool.n2"):
        (folder / name).mkdir()
    config = folder / "slurm.conf"
    name = os.uname().nodename
    config.write_text(CONFIG.format(name=name, folder=folder, ports=free_ports(3)))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    files = ("socket", "pid", "log", "seed")
    named = [f"--{kind}-file={folder}/munged.{kind}" for kind in files if kind != "socket"]
    munged = ["munged", "--force", "--foreground", f"--key-file={key}", *named]
    told = {"SLURM_CONF": str(config)}
    environ = {**os.environ, **told}
    daemons = []
    try:
        for words in (
            [*munged, f"--socket={folder}/munge.socket"],
            ["slurmctld", "-D", "-c"],
            ["slurmd", "-D", "-N", "n1", "-c"],
            ["slurmd", "-D", "-N", "n2", "-c"],
        ):
            log = open(folder / f"{words[0]}.out", "ab")  # noqa: SIM115 - the daemon's
            daemons.append(subprocess.Popen(words, env=environ, stdout=log, stderr=log))
            log.close()
            time.sleep(0.3)
        wait_until_idle(environ)
        yield told
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def wait_until_idle(environ):
    """Both nodes are there and free."""
    end = time.monotonic() + UP_SECONDS
    while time.monotonic() < end:
        words = ["sinfo", "-h", "-N", "-o", "%T"]
        done = subprocess.run(words, env=environ, capture_output=True, text=True)
        if done.stdout.split() == ["idle", "idle"]:
            return
        time.sleep(0.2)
    pytest.skip("Slurm did not come up here")


@pytest.fixture(scope="session")
def environ(bare_environ, slurm):
    """That in which Slurm's commands find it."""
    return {**bare_environ, **slurm}


@pytest.fixture(scope="session")
def pmi(environ, mpi):
    """The plug-in of srun by which ranks of that MPI find each other.

    `srun --mpi=list` also names those whose libraries are missing (Debian's libpmix-dev).
    """
    words = ["srun", f"--mpi={PMI[mpi.family]}", "--ntasks=1", "true"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60)
    if "Invalid MPI type" in done.stderr:
        pytest.skip(f"this Slurm cannot load {PMI[mpi.family]}")
    return PMI[mpi.family]
