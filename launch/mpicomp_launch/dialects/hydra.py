"""Hydra, the launcher of MPICH, and what Intel MPI and MVAPICH have made of it."""

from __future__ import annotations

from typing import ClassVar

from mpicomp_launch.dialects.base import Dialect, Option, own_bin_first, slots, unless_set
from mpicomp_launch.plan import Plan


class Hydra(Dialect):
    """Neither binds nor counts slots by itself, runs as root, passes the whole environment on."""

    title = "MPICH's mpiexec"
    verbose: ClassVar[tuple[Option, ...]] = (("-v",),)
    unknown_schedulers = ("flux",)
    agent_options = ("-launcher", "-launcher-exec")
    agent_variable = "HYDRA_LAUNCHER_EXTRA_ARGS"  # no option has a word for these

    def where(self, plan: Plan) -> list[Option]:
        return [("-hosts", slots(plan))] if plan.is_remote else []

    def reach(self, plan: Plan) -> list[Option]:
        if not plan.is_remote:
            return []
        kind, program = self.agent_options
        own = plan.agent.program[0]
        return [(kind, "ssh"), *([] if own == "ssh" else [(program, own)])]

    def binding(self, plan: Plan) -> list[Option]:
        return [] if plan.bind == "none" else [("-bind-to", plan.bind)]

    def network(self, plan: Plan) -> list[Option]:
        if not plan.is_remote or plan.interface is None:
            return []
        return [("-iface", self.interface_name(plan.interface))]

    def exports(self, plan: Plan) -> dict[str, str]:
        if not plan.is_remote:
            return {}
        exports = {"FI_PROVIDER": "tcp", "MPIR_CVAR_CH4_NETMOD": "ofi"} if plan.tcp else {}
        if plan.interface is not None:
            name = self.interface_name(plan.interface)
            exports |= {"FI_TCP_IFACE": name, "UCX_NET_DEVICES": name}
        elif plan.tcp and plan.network is not None and plan.mpi.version.startswith(("3.", "4.")):
            # These may have UCX, which tries docker0.
            exports["UCX_NET_DEVICES"] = plan.network.name
        return {**unless_set(plan, exports), **self.agent_exports(plan)}

    def agent_exports(self, plan: Plan) -> dict[str, str]:
        """What stands between the remote agent and the host."""
        words = self.agent_words(plan)
        return {self.agent_variable: words} if words else {}

    def interface_name(self, interface: str) -> str:
        """A network (10.0.0.0/24) is more than this family understands."""
        if "/" in interface:
            raise self.cannot(f"--interface {interface}", "give the interface's name, as in eth0")
        return interface


class Intel(Hydra):
    """As MPICH's, but it pins ranks, and finds its helpers through PATH."""

    title = "Intel's mpiexec.hydra"
    verbose: ClassVar[tuple[Option, ...]] = (("-v",), ("-genv", "I_MPI_DEBUG", "5"))
    agent_options = ("-bootstrap", "-bootstrap-exec")
    agent_variable = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"

    def ranks(self, plan: Plan) -> list[Option]:
        return [] if plan.is_remote else super().ranks(plan)

    def where(self, plan: Plan) -> list[Option]:
        """Nothing: it reads `-hosts a:2,b:1` without the counts."""
        return []

    def segments(self, plan: Plan, rank: Option) -> Option:
        """A command line for each host, with colons between them."""
        if not plan.is_remote:
            return rank
        words: list[str] = []
        for place in plan.placement:
            words += [":", "-n", str(place.ranks), "-host", place.host, *rank]
        return tuple(words[1:])

    def binding(self, plan: Plan) -> list[Option]:
        return []

    def exports(self, plan: Plan) -> dict[str, str]:
        if plan.bind == "none":
            pinning = unless_set(plan, {"I_MPI_PIN": "0"})
        else:
            pinning = {"I_MPI_PIN": "1", "I_MPI_PIN_DOMAIN": plan.bind}
        exports = {**own_bin_first(plan), **pinning}
        if not plan.is_remote:
            return exports
        network = {"FI_PROVIDER": "tcp"} if plan.tcp else {}
        if plan.interface is not None:
            network["FI_TCP_IFACE"] = self.interface_name(plan.interface)
        return {**exports, **self.agent_exports(plan), **unless_set(plan, network)}


class Mvapich(Hydra):
    """Hydra again; the library binds by itself, which pins all threads of a rank to one core."""

    title = "MVAPICH's mpiexec"

    def binding(self, plan: Plan) -> list[Option]:
        return []

    def exports(self, plan: Plan) -> dict[str, str]:
        levels = {"core": "core", "numa": "numanode", "socket": "socket"}
        if plan.bind == "none":
            binding = unless_set(plan, {"MV2_ENABLE_AFFINITY": "0"})
        else:
            binding = {"MV2_ENABLE_AFFINITY": "1", "MV2_CPU_BINDING_LEVEL": levels[plan.bind]}
        return {**super().exports(plan), **binding}
