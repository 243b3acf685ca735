"""From what the user said to a `Plan`: hosts, MPI, environment, network."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from mpicomp_launch import allocation, command, dialects, hosts, mpis, network
from mpicomp_launch.agent import Agent
from mpicomp_launch.allocation import Allocation
from mpicomp_launch.environment import rank_exports, to_forward, without_own
from mpicomp_launch.errors import LaunchError
from mpicomp_launch.hosts import Host, Placement
from mpicomp_launch.network import Interface
from mpicomp_launch.options import Options
from mpicomp_launch.plan import Plan
from mpicomp_launch.resolve import COMMAND_LINE, Resolved


def make_plan(
    resolved: Resolved, words: Sequence[str], environ: Mapping[str, str]
) -> tuple[Plan, list[str]]:
    """The job which the options describe, and what the user should be told about it.

    Raises:
        LaunchError: An option, the command, the hosts or the installed MPI will not do.
    """
    options = resolved.options
    refuse_nesting(environ)
    warnings: list[str] = []
    user_command = command.parse(words, environ)
    granted = allocation.detect(environ)
    named = named_hosts(options)
    placement = where(resolved, named, granted, warnings)
    mpi = mpis.find(user_command, options.mpi, environ, granted)
    dialect = dialects.for_mpi(mpi)
    if dialect.begins_here:
        placement = tuple(sorted(placement, key=lambda each: not network.is_here(each.host)))
    np = count_ranks(options.np, placement, named, granted, warnings)
    if granted is not None and granted.scheduler in dialect.unknown_schedulers:
        placement = unless_all_here(hosts.place(granted.hosts, np))
    cwd = working_directory(options.cwd)
    kept = without_own(environ)
    exports = rank_exports(options, np, cwd, placement or granted_places(granted, np), kept)
    plan = Plan(
        np=np,
        command=user_command,
        mpi=mpi,
        environ=kept,
        exports=exports,
        cwd=cwd,
        placement=placement,
        allocation=granted,
        forward=to_forward(kept, exports, options.env),
        bind=options.bind,
        agent=make_agent(options),
        interface=options.interface,
        network=network_between(placement),
        tcp=uses_tcp(options),
        pmi=options.pmi,
        verbose=options.verbose,
        mpi_args=options.mpi_args,
        is_root=os.geteuid() == 0,
    )
    return plan, warnings


def refuse_nesting(environ: Mapping[str, str]) -> None:
    """A rank cannot start a job with the variables of its own MPI in its environment."""
    variable = allocation.inside_step(environ)
    if variable:
        raise LaunchError(
            f"mpicomp-launch must be started once, got {variable} in the environment, which says "
            "that this is a rank already; it starts all ranks itself: leave out mpirun or srun "
            "(for a shell on a node, `salloc`, or `srun --mpi=none --pty bash`)"
        )


def where(
    resolved: Resolved, named: Sequence[Host], granted: Allocation | None, warnings: list[str]
) -> tuple[Placement, ...]:
    """Ranks of each host; empty for this host alone and for an allocation's hosts."""
    options = resolved.options
    if options.hosts is not None and options.hostfile is not None:
        first, second = resolved.origins["hosts"], resolved.origins["hostfile"]
        raise LaunchError(
            f"hosts must be given once, got --hosts ({first}) and --hostfile ({second})"
        )
    if not named:
        return ()
    if granted is not None:
        origin = (
            resolved.origins.get("hosts") or resolved.origins.get("hostfile") or "host sections"
        )
        text = f"hosts of {origin} are not used: {granted.origin} says which there are"
        if origin == COMMAND_LINE:
            raise LaunchError(f"{text}; leave out --hosts, or unset that variable")
        warnings.append(text)
        return ()
    return unless_all_here(hosts.place(named, options.np))


def unless_all_here(placement: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """Nothing where all hosts are this one: it needs no ssh."""
    return () if all(network.is_here(each.host) for each in placement) else placement


def named_hosts(options: Options) -> tuple[Host, ...]:
    """The hosts of the list, the file, or the sections that say how many slots they have."""
    if options.hosts is not None:
        named = hosts.parse_hosts(options.hosts)
    elif options.hostfile is not None:
        named = hosts.read_hostfile(options.hostfile)
    else:
        named = hosts.merge(
            Host(name, section.slots, section.max_slots)
            for section in options.host
            if section.slots is not None
            for name in hosts.expand(section.name)
        )
    return named


def granted_places(granted: Allocation | None, np: int) -> tuple[Placement, ...]:
    """Where the ranks of an allocation will be, if they go by its slots."""
    if granted is None or sum(host.slots for host in granted.hosts) < np:
        return ()
    return hosts.place(granted.hosts, np)


def count_ranks(
    given: int | None,
    placement: Sequence[Placement],
    named: Sequence[Host],
    granted: Allocation | None,
    warnings: list[str],
) -> int:
    """The number of ranks: as given, or all slots there are."""
    if placement:
        return sum(each.ranks for each in placement)
    slots = sum(host.slots for host in granted.hosts) if granted else 0
    if given is not None:
        if granted is not None and given > slots:
            warnings.append(f"{given} ranks on {slots} slots, which {granted.origin} says")
        return given
    if granted is not None and not granted.is_for_ranks:
        raise LaunchError(
            f"-np must be given, got nothing; {granted.origin} says which processors there are, "
            "not how many ranks are wanted"
        )
    if not slots and not named:
        raise LaunchError(
            "-np or --hosts must be given, got nothing; as in `-np 4` for four ranks on this host"
        )
    return slots or sum(host.slots for host in named)  # all of them this one


def working_directory(given: str | None) -> str:
    """The directory of all ranks; it must be one on this host too."""
    try:
        directory = os.path.abspath(given) if given else os.getcwd()
    except FileNotFoundError:
        raise LaunchError(
            "the working directory must exist, got one that was deleted; go elsewhere, or give "
            "--cwd"
        ) from None
    if not os.path.isdir(directory):
        raise LaunchError(f"--cwd must be a directory, got {directory!r}")
    return directory


def make_agent(options: Options) -> Agent:
    """How other hosts are reached."""
    return Agent(
        program=options.rsh_agent or ("ssh",),
        port=options.ssh_port,
        identity=options.ssh_identity and os.path.abspath(options.ssh_identity),
        options=options.ssh_args,
    )


def network_between(placement: Sequence[Placement]) -> Interface | None:
    """Our interface to the network that all the hosts are in, None if there is none."""
    return network.shared_network(each.host for each in placement if not network.is_here(each.host))


def uses_tcp(options: Options) -> bool:
    """Whether MPI shall look for nothing faster than TCP between hosts."""
    return options.fabric == "tcp" or (options.fabric == "auto" and not network.has_rdma())
