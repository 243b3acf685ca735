"""Launchers that belong to a scheduler: it knows the hosts and reaches them itself."""

from __future__ import annotations

import math
import signal
from typing import ClassVar

from mpicomp_launch.dialects.base import Dialect, Option
from mpicomp_launch.plan import Plan


class Scheduler(Dialect):
    """What srun, flux, jsrun and PALS have in common: nothing to name, nothing to reach."""

    bindings: ClassVar[dict[str, Option]]  # of `Options.bind`; what is missing cannot be said

    def where(self, plan: Plan) -> list[Option]:
        if plan.is_remote:
            raise self.cannot("--hosts", "let the scheduler choose, or give --mpi of an MPI")
        return []

    def binding(self, plan: Plan) -> list[Option]:
        if plan.bind not in self.bindings:
            known = ", ".join(self.bindings)
            raise self.cannot(f"--bind {plan.bind}", f"it knows {known}; or use --mpi-args")
        return [self.bindings[plan.bind]]

    def exports(self, plan: Plan) -> dict[str, str]:
        """Which MPI the ranks load decides which of these counts; the others are harmless."""
        if plan.interface is None:
            return {}
        exports = {"OMPI_MCA_btl_tcp_if_include": plan.interface}
        if "/" not in plan.interface:
            exports |= {"FI_TCP_IFACE": plan.interface, "UCX_NET_DEVICES": plan.interface}
        return exports


# What srun may have been told about output, and how it is told the reverse.
UNTOUCHED = {
    "SLURM_LABELIO": "0",
    "SLURM_UNBUFFEREDIO": "0",
    "SLURM_STDOUTMODE": "all",
    "SLURM_STDERRMODE": "all",
}


class Srun(Scheduler):
    """Slurm. It hands on whole lines, if the user's environment does not say otherwise."""

    title = "srun"
    bindings: ClassVar = {
        "none": ("--cpu-bind=none",),
        "core": ("--cpu-bind=cores",),
        "numa": ("--cpu-bind=ldoms",),
        "socket": ("--cpu-bind=sockets",),
    }
    verbose = (("-v",),)

    def ranks(self, plan: Plan) -> list[Option]:
        pmi = [(f"--mpi={plan.pmi}",)] if plan.pmi else []
        return [(f"--ntasks={plan.np}",), *pmi]

    def environment(self, plan: Plan) -> list[Option]:
        return [("--export=ALL",)]

    def directory(self, plan: Plan) -> list[Option]:
        return [(f"--chdir={plan.cwd}",)]

    def exports(self, plan: Plan) -> dict[str, str]:
        told = {name: value for name, value in UNTOUCHED.items() if name in plan.environ}
        return super().exports(plan) | told

    def carrier(self, signum: int) -> int:
        """It asks back on SIGINT, and kills the ranks itself on SIGTERM."""
        return signum if signum == signal.SIGUSR1 else signal.SIGUSR2


class Flux(Scheduler):
    """Flux. Open MPI needs its `pmix` plug-in; all others its own PMI."""

    title = "flux run"
    bindings: ClassVar = {
        "none": ("-o", "cpu-affinity=off"),
        "core": ("-o", "cpu-affinity=per-task"),
    }
    verbose = (("-v",),)

    def ranks(self, plan: Plan) -> list[Option]:
        pmi = [("-o", f"pmi={plan.pmi}")] if plan.pmi else []
        return [("run",), (f"--ntasks={plan.np}",), *pmi]

    def directory(self, plan: Plan) -> list[Option]:
        return [(f"--cwd={plan.cwd}",)]


class Jsrun(Scheduler):
    """LSF on machines with JSM: a resource set for each rank."""

    title = "jsrun"
    bindings: ClassVar = {"none": ("--bind", "none"), "core": ("--bind", "packed:1")}

    def ranks(self, plan: Plan) -> list[Option]:
        sets: list[Option] = [("--nrs", str(plan.np)), ("--tasks_per_rs", "1")]
        hosts = plan.allocation.hosts if plan.allocation else ()
        if hosts:
            sets.append(("--rs_per_host", str(math.ceil(plan.np / len(hosts)))))
        return sets

    def directory(self, plan: Plan) -> list[Option]:
        return [("--chdir", plan.cwd)]


class Pals(Scheduler):
    """HPE's mpiexec, under PBS."""

    title = "PALS mpiexec"
    bindings: ClassVar = {name: ("--cpu-bind", name) for name in ("none", "core", "numa", "socket")}
    verbose = (("-v",),)

    def environment(self, plan: Plan) -> list[Option]:
        return [("--envall",)]

    def directory(self, plan: Plan) -> list[Option]:
        return [("--wdir", plan.cwd)]
