"""What each MPI's launcher wants to hear: from a `Plan` to an argument list and an environment.

One class per dialect; no shell anywhere. Facts about each MPI stand in its class, with the reason.
"""

from __future__ import annotations

import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from mpicomp_launch.plan import Plan

# ABRT KILL SEGV TERM: only the usual ones, for hydra says 9 after signal 9 and after `Abort(9)`.
DEADLY_SIGNALS = (6, 9, 11, 15)


@dataclass(frozen=True)
class Command:
    """What is executed: argument list, variables added to the environment, directory."""

    argv: tuple[str, ...]
    exports: Mapping[str, str]
    cwd: str

    def __str__(self) -> str:
        """The same as a line for a shell."""
        assignments = [f"{name}={value}" for name, value in self.exports.items()]
        return shlex.join(["env", *assignments, *self.argv]) + " </dev/null"


class Dialect(ABC):
    """One MPI's launcher: how it is told what to do, and how it tells what happened."""

    def command(self, plan: Plan) -> Command:
        """The whole command for a plan."""
        argv = (plan.mpi.launcher, "-np", str(plan.np), *self.options(plan), *plan.command.argv())
        return Command(argv, {**self.exports(plan), **plan.exports}, plan.cwd)

    @abstractmethod
    def options(self, plan: Plan) -> list[str]:
        """Options between `-np N` and the program."""

    @abstractmethod
    def exports(self, plan: Plan) -> dict[str, str]:
        """Variables this MPI needs."""

    @abstractmethod
    def status_of_killed(self, status: int) -> int:
        """128 + n, given the launcher's status after a rank was killed by signal n."""


class Mpich(Dialect):
    """Hydra: neither binds nor counts slots, runs as root, passes the whole environment on."""

    def options(self, plan: Plan) -> list[str]:
        return []

    def exports(self, plan: Plan) -> dict[str, str]:
        return {}

    def status_of_killed(self, status: int) -> int:
        return 128 + status if status in DEADLY_SIGNALS else status


class Intel(Dialect):
    """Intel's hydra: as MPICH's, but it pins ranks, and finds its helpers through PATH."""

    def options(self, plan: Plan) -> list[str]:
        return []

    def exports(self, plan: Plan) -> dict[str, str]:
        own_bin = os.path.dirname(plan.mpi.launcher)
        path = os.pathsep.join([own_bin, plan.environ.get("PATH", os.defpath)])
        return {"PATH": path, **unless_set(plan, {"I_MPI_PIN": "0"})}

    def status_of_killed(self, status: int) -> int:
        return status  # 255 for every signal


class OpenMpi5(Dialect):
    """PRRTE's mpirun. Options take two dashes: `-bind-to` would be taken for the program."""

    def options(self, plan: Plan) -> list[str]:
        return ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", *transports(plan, "sm")]

    def exports(self, plan: Plan) -> dict[str, str]:
        return allow_root(plan)

    def status_of_killed(self, status: int) -> int:
        return status


class OpenMpi4(Dialect):
    """ORTE's mpirun."""

    def options(self, plan: Plan) -> list[str]:
        return ["--bind-to", "none", "--oversubscribe", *transports(plan, "vader")]

    def exports(self, plan: Plan) -> dict[str, str]:
        return allow_root(plan)

    def status_of_killed(self, status: int) -> int:
        return status


def for_plan(plan: Plan) -> Dialect:
    """The dialect of a plan's launcher."""
    if plan.mpi.family == "openmpi":
        major = int(plan.mpi.version.split(".")[0])
        return OpenMpi5() if major >= 5 else OpenMpi4()
    return {"mpich": Mpich, "intel": Intel}[plan.mpi.family]()


def transports(plan: Plan, shared_memory: str) -> list[str]:
    """One host needs shared memory only; looking for networks takes Open MPI a second.

    What the user has set by variable stays.
    """
    chosen = {"pml": "ob1", "btl": f"self,{shared_memory},tcp", "osc": "^ucx"}
    unset = {k: v for k, v in chosen.items() if f"OMPI_MCA_{k}" not in plan.environ}
    return [word for name, value in unset.items() for word in ("--mca", name, value)]


def allow_root(plan: Plan) -> dict[str, str]:
    """Open MPI refuses the superuser, who is the usual user in a container."""
    if not plan.is_root:
        return {}
    return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def unless_set(plan: Plan, exports: Mapping[str, str]) -> dict[str, str]:
    """Those of the variables which the user has not set."""
    return {name: value for name, value in exports.items() if name not in plan.environ}
