"""A network as numbers: alpha and beta of each collective, within a host and across hosts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mpicomp.errors import MpicompError
from mpicomp.predict.collectives import fastest

WITHIN, ACROSS = "within", "across"
GIGABIT = 1e9 / 8  # bytes
MEASURED = {"all-reduce", "all-gather", "all-to-all", "broadcast"}
ROUNDS = 5  # of a fit


@dataclass(frozen=True, slots=True)
class Link:
    """What a message costs: ``alpha`` seconds, and ``beta`` seconds for each byte."""

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        if not (0 <= self.alpha < math.inf and 0 <= self.beta < math.inf):
            raise ValueError(f"network: alpha and beta must be finite and not negative, got {self}")

    @property
    def gigabits(self) -> float:
        """Bandwidth in Gb/s."""
        return 1 / (self.beta * GIGABIT) if self.beta else float("inf")


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured collective: seconds, by the size that `collectives` speaks of."""

    collective: str
    ranks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Network:
    """A cluster of equal hosts.

    Attributes:
        hosts: how many.
        ranks_per_host: ranks on each.
        within: the links of each collective among ranks of one host; empty if there is one each.
        across: the same among hosts; empty if there is one.
    """

    hosts: int
    ranks_per_host: int
    within: Mapping[str, Link]
    across: Mapping[str, Link]

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def seconds(self, collective: str, num_bytes: float) -> float:
        """How long a collective of all ranks takes; sizes as in `collectives`.

        An all-reduce has two levels: within hosts, and across hosts in as many parts as a host has
        ranks, all of which go through the host's one link.
        """
        if self.ranks == 1 or num_bytes == 0:
            return 0.0
        if self.hosts == 1:
            return self._level(WITHIN, self.ranks_per_host, collective, num_bytes)
        if collective in ("all-reduce", "broadcast"):
            local = self._level(WITHIN, self.ranks_per_host, collective, num_bytes)
            return local + self._level(ACROSS, self.hosts, collective, num_bytes)
        if collective == "all-to-all":  # what the ranks of a host send to other hosts
            link, leaving = self.across[collective], self.ranks - self.ranks_per_host
            share = num_bytes / self.ranks * self.ranks_per_host
            return leaving * (link.alpha + share * link.beta)
        return self._level(ACROSS, self.ranks, collective, num_bytes)

    def _level(self, level: str, n: int, collective: str, num_bytes: float) -> float:
        if n == 1:
            return 0.0
        links = self.within if level == WITHIN else self.across
        link = links["all-to-all" if collective == "message" else collective]
        work = fastest(collective, n, num_bytes, link.alpha, link.beta)
        return work.seconds(link.alpha, link.beta)

    def with_ranks(self, ranks: int) -> Network:
        """The same hosts and links with another number of ranks: fill a host, then add hosts.

        Raises:
            ValueError: what is needed has not been measured, or ranks do not fill the hosts.
        """
        if ranks < 1:
            raise ValueError(f"network: ranks must be at least 1, got {ranks}")
        local = min(ranks, self.ranks_per_host)
        hosts = -(-ranks // local)
        if hosts * local != ranks:
            raise ValueError(
                f"network: ranks must be a multiple of the {local} ranks of a host, got {ranks}"
            )
        if hosts > 1 and not self.across:
            raise ValueError(
                f"network: {ranks} ranks need more than the one host that was measured; measure "
                "two hosts, or say what lies between them with --bandwidth and --latency"
            )
        return replace(self, hosts=hosts, ranks_per_host=local)

    def with_link(self, *, gigabits: float, alpha: float | None = None) -> Network:
        """The same hosts joined by links of ``gigabits`` Gb/s and ``alpha`` seconds.

        Without ``alpha``, what each collective has across hosts, or else the least within one.
        """
        beta = 1 / (gigabits * GIGABIT)
        links = self.across or self.within
        least = min((link.alpha for link in links.values()), default=0.0)
        alphas = {kind: link.alpha for kind, link in links.items()} if alpha is None else {}
        across = {
            kind: Link(alphas.get(kind, least if alpha is None else alpha), beta)
            for kind in MEASURED
        }
        return replace(self, across=across)


def fit(samples: Sequence[Sample]) -> Link:
    """Beta from the longest messages, then alpha from the shortest; neither is negative.

    Beta explains the difference between the longest and one that is at most a quarter of it. In
    between, links that let bursts pass look faster than they are to anybody who sends a lot.
    Which algorithm a size takes depends on the answer: a few rounds settle it.
    """
    ordered = sorted(samples, key=lambda sample: sample.num_bytes)
    short, long = ordered[0], ordered[-1]
    middle = max(
        (s for s in ordered if s.num_bytes <= long.num_bytes / 4),
        key=lambda sample: sample.num_bytes,
        default=short,
    )
    link = Link(1e-5, 1e-9)
    for _ in range(ROUNDS):
        works = [
            fastest(s.collective, s.ranks, s.num_bytes, link.alpha, link.beta)
            for s in (short, middle, long)
        ]
        rounds, num_bytes = (
            works[2].rounds - works[1].rounds,
            works[2].num_bytes - works[1].num_bytes,
        )
        seconds = long.seconds - middle.seconds - rounds * link.alpha
        beta = max(0.0, seconds / num_bytes) if num_bytes else 0.0
        alpha = max(0.0, short.seconds - works[0].num_bytes * beta) / works[0].rounds
        link = Link(alpha, beta)
    return link


# ------------------------------------------------------------------------------------ profiles


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured network, where it was measured, and what from.

    Attributes:
        machine: what must be the same where the profile is used: processor, cores, MPI, device.
        samples: by level, ``within`` and ``across``.
    """

    network: Network
    machine: Mapping[str, str]
    samples: Mapping[str, Sequence[Sample]]

    def as_json(self) -> dict[str, Any]:
        return {"mpicomp_network": 1, **asdict(self)}

    def check_machine(self, machine: Mapping[str, str]) -> None:
        """Raise an `MpicompError` unless this profile was measured on such a machine."""
        for what, here in machine.items():
            there = self.machine.get(what)
            if there != here:
                raise MpicompError(
                    f"network: profile must be from this machine, got one whose {what} is "
                    f"{there!r}, not {here!r}; measure here with `python -m mpicomp.bench "
                    "network`, or say --foreign-network if the network is meant to be another one"
                )


def load(path: str | Path) -> Profile:
    """Read what `python -m mpicomp.bench network --out FILE` has written.

    Raises:
        MpicompError: the file cannot be read, or is something else.
    """
    try:
        record = json.loads(Path(path).read_text())
        network = record["network"]
        links = {
            level: {c: Link(**link) for c, link in network[level].items()}
            for level in (WITHIN, ACROSS)
        }
        ranks = {WITHIN: network["ranks_per_host"], ACROSS: network["hosts"]}
        for level, number in ranks.items():
            if number < 1 or (number > 1 and links[level].keys() != MEASURED):
                raise ValueError(f"{number} ranks {level} with {sorted(links[level])}")
        samples = {
            level: tuple(Sample(**sample) for sample in record["samples"][level])
            for level in record["samples"]
        }
        return Profile(
            Network(network["hosts"], network["ranks_per_host"], **links),
            record["machine"],
            samples,
        )
    except OSError as error:
        raise MpicompError(f"network: {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MpicompError(
            f"network: {path} must be a profile that `python -m mpicomp.bench network --out` "
            f"wrote, got something else ({type(error).__name__}: {error})"
        ) from None
