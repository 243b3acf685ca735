"""Open MPI: PRRTE's mpirun since version 5, ORTE's before."""

from __future__ import annotations

import signal

from mpicomp_launch.dialects.base import Dialect, Option, slots
from mpicomp_launch.plan import Plan


class OpenMpi(Dialect):
    """Binds and counts slots unless told otherwise, refuses root, and forwards nothing by itself.

    Options take two dashes: version 5 would take `-bind-to` for the program.
    """

    unknown_schedulers = ("lsf", "flux")  # to the one from PyPI
    shared_memory: str  # its name of the transport within a host
    package: str  # its name of a socket
    agent_options: tuple[str, str, str]  # how to name the agent, and its options
    daemon_interface: tuple[str, str]
    oversubscribe: tuple[Option, ...]

    def where(self, plan: Plan) -> list[Option]:
        return [("--host", slots(plan))] if plan.is_remote else list(self.oversubscribe)

    def reach(self, plan: Plan) -> list[Option]:
        if not plan.is_remote:
            return []
        option, agent, arguments = self.agent_options
        words = self.agent_words(plan)
        return [
            (option, agent, plan.agent.program[0]),
            *([(option, arguments, words)] if words else []),
        ]

    def environment(self, plan: Plan) -> list[Option]:
        everywhere = plan.is_remote or plan.allocation is not None
        return [("-x", name) for name in plan.forward] if everywhere else []

    def binding(self, plan: Plan) -> list[Option]:
        return [("--bind-to", self.package if plan.bind == "socket" else plan.bind)]

    def network(self, plan: Plan) -> list[Option]:
        settings: dict[str, str] = {}
        if plan.tcp or not plan.spans_hosts:
            # Looking for other networks takes a second, and one host needs none.
            settings |= {"pml": "ob1", "btl": f"self,{self.shared_memory},tcp", "osc": "^ucx"}
        if plan.tcp and plan.spans_hosts:
            # One socket carries large messages one way at a time; ranks that spin starve others.
            settings |= {"btl_tcp_links": "4", "mpi_yield_when_idle": "1"}
        interface = plan.interface
        if interface is None and plan.network is not None:
            # It may take docker0 for a way to the others. Names differ from host to host.
            interface = plan.network.network
        if interface is not None:
            settings["btl_tcp_if_include"] = interface
        unset = {k: v for k, v in settings.items() if f"OMPI_MCA_{k}" not in plan.environ}
        options: list[Option] = [("--mca", name, value) for name, value in unset.items()]
        if interface is not None:
            options.append((*self.daemon_interface, interface))
        return options

    def carrier(self, signum: int) -> int:
        """It kills the ranks itself on the usual ones; guards turn these into what was meant."""
        if signum == signal.SIGUSR1:
            return signum
        return signal.SIGURG if signum == signal.SIGINT else signal.SIGUSR2

    def exports(self, plan: Plan) -> dict[str, str]:
        """Open MPI refuses the superuser, who is the usual user in a container."""
        if not plan.is_root:
            return {}
        return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class OpenMpi5(OpenMpi):
    """PRRTE's mpirun."""

    title = "Open MPI 5"
    shared_memory = "sm"
    package = "package"
    agent_options = ("--prtemca", "plm_ssh_agent", "plm_ssh_args")
    daemon_interface = ("--prtemca", "prte_if_include")
    oversubscribe = (("--map-by", ":OVERSUBSCRIBE"),)
    verbose = (("--display", "map,bind"), ("--prtemca", "plm_base_verbose", "5"))


class OpenMpi4(OpenMpi):
    """ORTE's mpirun."""

    title = "Open MPI 4"
    shared_memory = "vader"
    package = "socket"
    agent_options = ("--mca", "plm_rsh_agent", "plm_rsh_args")
    daemon_interface = ("--mca", "oob_tcp_if_include")
    oversubscribe = (("--oversubscribe",),)
    verbose = (("--display-map",), ("--report-bindings",), ("--mca", "plm_base_verbose", "5"))
    begins_here = True
