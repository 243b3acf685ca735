"""A laboratory of slow networks: a job across hosts of one's own, joined by links of a known rate.

    python benchmarks/netlab.py --hosts 2 --rate 1gbit python benchmarks/step.py
    python benchmarks/netlab.py --hosts 4 --rate none --ranks-per-host 2 python train.py

The hosts are namespaces of this machine (`_hosts.py`, needs root); the link of each to the bridge
between them carries the rate each way, by a token bucket at either end. Before a command runs,
TCP streams measure the links, and a message by MPI shows that it takes them: MPI may find that
the hosts share memory. Whatever happens, nothing is left; what an earlier run left, because it
was killed together with its sweeper, is ended and reported.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import _hosts
import _stream
import _sweep

FEWEST, MOST = 2, 4
INTERFACE = "eth0"
ABOVE, BELOW = 1.1, 0.9  # of the rate: it did not take effect, the machine does not reach it
TRIES = 3  # a machine that does other things as well stalls now and then
PROBE_BYTES = 1 << 20
PROBE = f"""
from mpi4py import MPI
world = MPI.COMM_WORLD
there, here = (world.rank + 1) % world.size, bytearray({PROBE_BYTES})
world.Sendrecv(bytearray({PROBE_BYTES}), there, recvbuf=here)
"""
OWN_FAILURE = 125  # as the launcher has it


@dataclass(frozen=True)
class Shape:
    """A token bucket of tc: bits per second, what passes at once, how long packets wait at most."""

    bits: float
    burst: str
    latency: str


# A burst of about 2 ms: less and the rate is not reached, more and small messages are not limited.
SHAPES = {
    "100mbit": Shape(1e8, "32kb", "50ms"),
    "1gbit": Shape(1e9, "256kb", "20ms"),
    "5gbit": Shape(5e9, "1mb", "20ms"),
    "10gbit": Shape(1e10, "2mb", "20ms"),
    "none": Shape(float("inf"), "", ""),
}


class Net:
    """Hosts with links of one rate, measured, for as many jobs as you like.

        with netlab.Net(hosts=2, rate="1gbit") as net:
            done = net.launch([sys.executable, "train.py"], capture=True)

    Attributes:
        lab: The hosts.
        one_way: Bits per second of a TCP stream from the first host to the last, all else quiet.
        all_at_once: The same of the slowest stream while each host sends to the next; with two
            hosts, that is both ways at once.
        moved: Bytes that each host has sent over its link in the last job, headers included.
    """

    def __init__(self, *, hosts: int, rate: str) -> None:
        if not FEWEST <= hosts <= MOST:
            raise ValueError(f"netlab: hosts must be {FEWEST} to {MOST}, got {hosts}")
        if rate not in SHAPES:
            raise ValueError(f"netlab: rate must be one of {', '.join(SHAPES)}, got {rate}")
        reason = _hosts.missing("tc")
        if reason is not None:
            raise RuntimeError(f"netlab: this machine must let us make hosts, got: {reason}")
        sweep_leftovers()
        self.rate = rate
        self.one_way = self.all_at_once = 0.0
        self.moved: list[int] = []
        self.lab = _hosts.Lab(hosts)
        try:
            self._shape()
            self._measure()
            self._prove()
        except BaseException:
            self.lab.close()
            raise

    def __enter__(self) -> Net:
        return self

    def __exit__(self, *_: object) -> None:
        self.lab.close()

    def launch(
        self,
        words: Sequence[str],
        *,
        ranks_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        capture: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command as ranks on all hosts, by the launcher on the first of them.

        Args:
            words: The command and its arguments.
            ranks_per_host: How many ranks each host gets.
            env: More variables for the ranks.
            capture: Whether to keep what they print, instead of passing it on.
        """
        ranks = ranks_per_host * len(self.lab.names)
        threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))  # hosts share the cores
        given = {
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
            **(env or {}),
        }
        options = ["--hosts", ",".join(f"{name}:{ranks_per_host}" for name in self.lab.names)]
        options += ["--rsh-agent", str(self.lab.agent), "--interface", INTERFACE]
        options += ["--fabric", "tcp", "--tag", "none"]
        options += [word for name in given for word in ("--env", name)]
        before = self._sent()
        done = self.lab.run(
            self.lab.names[0],
            *[sys.executable, "-m", "mpicomp_launch", *options, *words],
            env={**os.environ, **given},
            capture_output=capture,
        )
        self.moved = [now - then for now, then in zip(self._sent(), before, strict=True)]
        return done

    def _shape(self) -> None:
        """Limits both ends of each link: what a host sends, and what all others send to it."""
        shape = SHAPES[self.rate]
        if self.rate == "none":
            return
        words = ["tbf", "rate", self.rate, "burst", shape.burst, "latency", shape.latency]
        for index, name in enumerate(self.lab.names, 1):
            for place, interface in ((name, INTERFACE), ("switch", f"v{index}")):
                self.lab.must(place, "tc", "qdisc", "add", "dev", interface, "root", *words)

    def _measure(self) -> None:
        names = self.lab.names
        self.one_way = min(self._rates([(names[0], names[-1])]))
        circle = list(zip(names, names[1:] + names[:1], strict=True))
        self.all_at_once = min(self._rates(circle))
        asked = SHAPES[self.rate].bits
        if self.rate != "none" and min(self.one_way, self.all_at_once) < BELOW * asked:
            print(
                f"netlab: this machine does not reach {self.rate}: its links carry "
                f"{in_words(self.one_way)}, and {in_words(self.all_at_once)} each "
                f"when all {len(names)} hosts send at once",
                file=sys.stderr,
            )

    def _rates(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Bits per second of streams at once, within the limit on each of its links."""
        asked = SHAPES[self.rate].bits
        best: list[float] = []
        for _ in range(TRIES):
            rates = self._streams(pairs)
            if max(rates) <= ABOVE * asked and min(rates) > min(best, default=0.0):
                best = rates
            if self.rate == "none" or (best and min(best) >= BELOW * asked):
                break
        if not best:
            raise RuntimeError(
                f"netlab: links must be limited to {self.rate}, got {in_words(max(rates))}: "
                "the limit did not take effect; see what `tc qdisc` can do on this machine"
            )
        return best

    def _streams(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        program = [sys.executable, _stream.__file__]
        receivers = [self.lab.start(there, *program, "receive") for _, there in pairs]
        senders = []
        for (here, there), receiver in zip(pairs, receivers, strict=True):
            assert receiver.stdout is not None
            where = [self.lab.address(there), receiver.stdout.readline().strip()]
            senders.append(self.lab.start(here, *program, "send", *where))
        outputs = [process.communicate() for process in receivers + senders]
        for process, (_, errors) in zip(receivers + senders, outputs, strict=True):
            if process.returncode:
                raise RuntimeError(f"netlab: a stream must pass between hosts, got: {errors}")
        return [float(out) for out, _ in outputs[: len(receivers)]]

    def _prove(self) -> None:
        """Sends by MPI from each host to the next, and sees whether it passed over the links."""
        done = self.launch([sys.executable, "-c", PROBE], capture=True)
        if done.returncode:
            raise RuntimeError(f"netlab: MPI must start across the hosts, got: {done.stderr}")
        if min(self.moved) < PROBE_BYTES:
            raise RuntimeError(
                f"netlab: MPI must use the links between the hosts, got {min(self.moved)} bytes on "
                f"{INTERFACE} for a message of {PROBE_BYTES}; unset what tells MPI another way"
            )

    def _sent(self) -> list[int]:
        """Bytes that each host has sent over its link so far."""
        counter = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        return [int(self.lab.run(name, "cat", counter).stdout) for name in self.lab.names]


def sweep_leftovers() -> None:
    """Ends what earlier runs left that were killed together with their sweepers; says so."""
    for folder in _sweep.leftovers():
        found = [(pid, _sweep.command_line(pid)) for pid in _sweep.processes(folder)]
        _sweep.sweep(folder)
        lines = "".join(f"\n    {pid} {line}" for pid, line in found)
        print(f"netlab: ended what a killed run left in {folder}:{lines}", file=sys.stderr)


def in_words(bits: float) -> str:
    return f"{bits / 1e9:.3g} Gb/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mb/s"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, required=True, help=f"{FEWEST} to {MOST}")
    parser.add_argument("--rate", required=True, help=f"of each link: {', '.join(SHAPES)}")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("words", nargs=argparse.REMAINDER, help="the command and its arguments")
    args = parser.parse_args()
    if not args.words:
        parser.error("no command to run: give it after the options")
    if args.ranks_per_host < 1:
        parser.error(f"--ranks-per-host must be 1 or more, got {args.ranks_per_host}")
    return args


def main() -> int:
    args = options()
    try:
        net = Net(hosts=args.hosts, rate=args.rate)
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return OWN_FAILURE
    with net:
        status = net.launch(args.words, ranks_per_host=args.ranks_per_host).returncode
        print(
            f"netlab: {args.hosts} hosts, {args.rate}: {in_words(net.one_way)}, "
            f"{in_words(net.all_at_once)} each with all sending at once; "
            f"bytes sent by each host: {', '.join(map(str, net.moved))}",
            file=sys.stderr,
        )
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
