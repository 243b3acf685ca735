"""Every option of the launcher, once: command line, variables and config files follow this.

A field's metadata says how it is given, what it accepts, and what it means. `arguments.py` makes
the command line of it, `config.py` reads files with it, `resolve.py` decides who wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from mpicomp_launch.kinds import (
    ENV,
    FLAG,
    HOSTS,
    NUMBER,
    SECTIONS,
    TEXT,
    WHOLE,
    WORDS,
    HostSection,
    Kind,
    choice,
)

JOB = "what runs where"
RANKS = "what a rank gets"
TRAINING = "training (variables that the library reads)"
OUTPUT = "output"
TIME = "time"
NETWORK = "between hosts"


def option(
    kind: Kind,
    group: str,
    help: str,
    *,
    default: Any = None,
    flags: tuple[str, ...] = (),
    metavar: str = "",
    variable: str = "",
    repeats: bool = False,
    is_input: bool = False,
) -> Any:
    """A field of `Options`.

    Args:
        flags: Short forms beside `--the-name`; ("",) for an option that only files can give.
        variable: The library's variable it becomes; others are `MPICOMP_LAUNCH_<NAME>`.
        repeats: Whether values of several occurrences, or of several sources, are joined.
        is_input: Whether it names a file to read; a config file names it as seen from itself.
    """
    metadata = {
        "kind": kind,
        "group": group,
        "help": help,
        "flags": flags,
        "metavar": metavar,
        "variable": variable,
        "repeats": repeats,
        "is_input": is_input,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """A job as the user describes it; defaults are those of the program."""

    np: int | None = option(
        WHOLE, JOB, "number of ranks; default: all slots", flags=("-np", "-n"), metavar="N"
    )
    hosts: str | None = option(
        HOSTS,
        JOB,
        "hosts and their slots: a:4,b:4; a alone is 1 slot",
        flags=("-H",),
        metavar="LIST",
    )
    hostfile: str | None = option(
        TEXT, JOB, "file of hosts, one a line", metavar="FILE", is_input=True
    )
    host: tuple[HostSection, ...] = option(
        SECTIONS,
        JOB,
        "sections of a config file, one a host",
        default=(),
        flags=("",),
        repeats=True,
    )
    mpi: str | None = option(
        choice("mpich", "openmpi", "intel", "mvapich", "spectrum", "srun", "flux", "jsrun", "pals"),
        JOB,
        "the MPI or scheduler command to insist on",
        metavar="NAME",
    )
    pmi: str | None = option(
        choice("pmix", "pmi2", "cray_shasta"), JOB, "what srun's --mpi shall be", metavar="NAME"
    )
    mpi_args: tuple[str, ...] = option(
        WORDS,
        JOB,
        "more options for the MPI's own launcher, untouched, last",
        default=(),
        metavar="WORDS",
        repeats=True,
    )
    cwd: str | None = option(TEXT, RANKS, "working directory, on every host", metavar="DIR")
    env: tuple[tuple[str, str | None], ...] = option(
        ENV,
        RANKS,
        "a variable for all ranks; without a value, the present one",
        default=(),
        metavar="NAME[=VALUE]",
        repeats=True,
    )
    bind: str = option(
        choice("none", "core", "numa", "socket"),
        RANKS,
        "bind each rank to a part of its host",
        default="none",
        metavar="WHAT",
    )
    gpu_bind: str = option(
        choice("local", "none"),
        RANKS,
        "local shows each rank only the GPU of its local rank",
        default="none",
        metavar="HOW",
    )
    compression: str | None = option(
        TEXT,
        TRAINING,
        "as in powersgd:rank=4; for optimizers that are given none",
        metavar="SPEC",
        variable="MPICOMP_COMPRESSION",
    )
    fusion_mb: float | None = option(
        NUMBER,
        TRAINING,
        "size of a bucket of gradients",
        metavar="MB",
        variable="MPICOMP_FUSION_MB",
    )
    shared_memory: bool | None = option(
        FLAG,
        TRAINING,
        "ranks of a host exchange through shared memory",
        variable="MPICOMP_SHARED_MEMORY",
    )
    shared_memory_dir: str | None = option(
        TEXT,
        TRAINING,
        "the memory file system for it",
        metavar="DIR",
        variable="MPICOMP_SHARED_MEMORY_DIR",
    )
    stall_seconds: float | None = option(
        NUMBER,
        TRAINING,
        "a collective that waits longer is reported",
        metavar="S",
        variable="MPICOMP_STALL_SECONDS",
    )
    stall_shutdown_seconds: float | None = option(
        NUMBER,
        TRAINING,
        "one that waits longer ends the job",
        metavar="S",
        variable="MPICOMP_STALL_SHUTDOWN_SECONDS",
    )
    trace: str | None = option(
        TEXT, TRAINING, "write a time line of all ranks", metavar="FILE", variable="MPICOMP_TRACE"
    )
    prometheus: str | None = option(
        TEXT,
        TRAINING,
        "[HOST:]PORT where rank 0 answers Prometheus; on loopback without HOST",
        metavar="ADDRESS",
        variable="MPICOMP_PROMETHEUS",
    )
    stats: bool | None = option(
        FLAG, TRAINING, "print bytes and times at the end", variable="MPICOMP_STATS"
    )
    tag: str = option(
        choice("rank", "host:rank", "none"),
        OUTPUT,
        "what stands before each line",
        default="rank",
        metavar="HOW",
    )
    timestamps: bool = option(FLAG, OUTPUT, "the time before each line", default=False)
    output_dir: str | None = option(
        TEXT, OUTPUT, "write the output of each rank to a file there too", metavar="DIR"
    )
    verbose: bool = option(
        FLAG,
        OUTPUT,
        "let the MPI say what it does, and show all it says",
        default=False,
        flags=("-v",),
    )
    timeout: float | None = option(NUMBER, TIME, "end the job after so many seconds", metavar="S")
    start_timeout: float = option(
        NUMBER, TIME, "how long all ranks may take to appear", default=60.0, metavar="S"
    )
    grace: float = option(
        NUMBER,
        TIME,
        "from a signal that stops the job to its being killed",
        default=10.0,
        metavar="S",
    )
    interface: str | None = option(
        TEXT,
        NETWORK,
        "network interface, or network as in 10.0.0.0/24; default: by route",
        metavar="NAME",
    )
    fabric: str = option(
        choice("auto", "tcp", "mpi"),
        NETWORK,
        "tcp, or mpi for the MPI's own choice; auto is tcp where there is no RDMA device",
        default="auto",
        metavar="NAME",
    )
    rsh_agent: tuple[str, ...] = option(
        WORDS,
        NETWORK,
        "program to reach hosts with, called as `PROGRAM HOST COMMAND`; default: ssh",
        default=(),
        metavar="PROGRAM",
    )
    ssh_port: int | None = option(WHOLE, NETWORK, "port of the ssh servers", metavar="PORT")
    ssh_identity: str | None = option(
        TEXT, NETWORK, "file of the ssh key", metavar="FILE", is_input=True
    )
    ssh_args: tuple[str, ...] = option(
        WORDS, NETWORK, "more options for ssh", default=(), metavar="WORDS", repeats=True
    )


FIELDS: Mapping[str, Field[Any]] = {each.name: each for each in fields(Options)}


def variable_of(name: str) -> str:
    """The environment variable of an option."""
    return FIELDS[name].metadata["variable"] or f"MPICOMP_LAUNCH_{name.upper()}"


def flag_of(name: str) -> str:
    """The long form on the command line."""
    return "-np" if name == "np" else "--" + name.replace("_", "-")
