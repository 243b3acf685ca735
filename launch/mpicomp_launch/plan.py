"""A job as data: everything known about it before any launcher's dialect is spoken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpicomp_launch.agent import Agent
from mpicomp_launch.allocation import Allocation
from mpicomp_launch.command import UserCommand
from mpicomp_launch.hosts import Placement
from mpicomp_launch.mpis import Mpi
from mpicomp_launch.network import Interface


@dataclass(frozen=True)
class Plan:
    """What to run, how often, where, and under which MPI.

    Attributes:
        np: Number of ranks.
        command: What every rank runs.
        mpi: The launcher that starts the ranks, with its family, version and path.
        placement: Ranks of each host in order; empty for this host alone, or where a scheduler
            knows the hosts itself.
        allocation: What a scheduler granted us, None outside of one.
        environ: The environment the user started us in, without the launcher's own variables.
        exports: Variables added to it for the ranks.
        forward: Names of those variables, of both, which ranks on other hosts must get.
        cwd: Working directory of every rank.
        bind: "none", "core", "numa" or "socket".
        agent: How other hosts are reached.
        interface: Name or network (as in 10.0.0.0/24) for MPI's traffic, if the user wants one.
        network: The interface that leads to the other hosts, for an MPI which cannot choose well.
        tcp: Whether MPI shall use shared memory and TCP only.
        pmi: What `srun --mpi` shall be, None for the cluster's default.
        verbose: Whether the launcher shall say what it does.
        mpi_args: The user's own options for the launcher.
        is_root: Whether the job runs as the superuser.
    """

    np: int
    command: UserCommand
    mpi: Mpi
    environ: Mapping[str, str]
    exports: Mapping[str, str]
    cwd: str
    placement: tuple[Placement, ...] = ()
    allocation: Allocation | None = None
    forward: tuple[str, ...] = ()
    bind: str = "none"
    agent: Agent = field(default_factory=Agent)
    interface: str | None = None
    network: Interface | None = None
    tcp: bool = False
    pmi: str | None = None
    verbose: bool = False
    mpi_args: tuple[str, ...] = ()
    is_root: bool = False

    @property
    def is_remote(self) -> bool:
        """Whether hosts were named, so that ranks may run elsewhere than here."""
        return bool(self.placement)

    @property
    def spans_hosts(self) -> bool:
        """Whether ranks run on several hosts, as far as is known."""
        granted = self.allocation.hosts if self.allocation else ()
        return self.is_remote or len(granted) > 1
