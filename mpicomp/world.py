"""Who takes part: start and end of MPI, rank and size, and what happens when a rank fails."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import multiprocessing
import socket
import sys
import threading
import time
import traceback
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from mpicomp import launched
from mpicomp import settings as _settings
from mpicomp.errors import MpicompError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

    from mpicomp.comm.clocks import Reading
    from mpicomp.comm.communicator import Communicator
    from mpicomp.comm.stall import RollCall
    from mpicomp.comm.waiting import Task
    from mpicomp.engine import Engine
    from mpicomp.observe.prometheus import Endpoint
    from mpicomp.profile import Profile, Stats
    from mpicomp.progress import Progress
    from mpicomp.step import Slot

T = TypeVar("T")
log = logging.getLogger("mpicomp")


@dataclass
class World:
    """One process's place in the job, from `init` to `shutdown`."""

    communicator: Communicator
    roll_call: RollCall
    progress: Progress
    profile: Profile
    settings: _settings.Settings
    device_pointers: bool  # whether MPI may be given addresses of GPU memory
    hooks: MutableMapping[Tensor, tuple[RemovableHandle, Slot]]  # of exchanged parameters
    open_engines: list[Engine] = field(default_factory=list)  # with a step under way
    idle_communicators: list[Communicator] = field(default_factory=list)  # of closed engines
    joining: bool = False  # an optimizer is within its `join`
    clock: Reading | None = None  # against rank 0's at the start, with a trace
    endpoint: Endpoint | None = None  # for Prometheus

    def new_communicator(self) -> Communicator:
        """Collective: a communicator of its own for one user of the network."""
        from mpicomp.comm.communicator import Communicator

        if self.idle_communicators:
            return self.idle_communicators.pop()
        wait(self.communicator.barrier(), "the start of a new group of collectives")
        has_shared_memory = self.communicator.node is not None
        return Communicator(
            self.communicator.comm,
            shared_memory=has_shared_memory,  # said once if there is none
            directory=self.settings.shared_memory_dir,
            device_pointers=self.device_pointers,
        )


_world: World | None = None


def init() -> None:
    """Start MPI, if it is not running, and join the other ranks. Collective; again is harmless.

    Raises:
        MpicompError: the launch does not fit the MPI in use, or this is a child process.
    """
    global _world
    if _world is not None:
        return
    settings = _settings.read()
    if multiprocessing.parent_process() is not None:
        raise MpicompError(
            "init: this is a child process (a DataLoader worker?), and only the process that the "
            "launcher started can be a rank; move the call under `if __name__ == '__main__':`"
        )
    import torch
    from mpi4py import MPI
    from torch.utils.weak import WeakIdKeyDictionary

    from mpicomp.comm.communicator import Communicator
    from mpicomp.comm.cuda import reads_device_memory
    from mpicomp.comm.stall import RollCall
    from mpicomp.profile import Profile
    from mpicomp.progress import Progress

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise MpicompError(
            "init: MPI must be initialised with MPI_THREAD_MULTIPLE; remove the setting of "
            "mpi4py.rc.thread_level, or use an MPI that was built with it"
        )
    launched.check_size(MPI.COMM_WORLD.size, settings.expect_size, MPI.Get_library_version())
    device_pointers = reads_device_memory(MPI.COMM_WORLD)
    communicator = Communicator(
        MPI.COMM_WORLD,
        shared_memory=settings.shared_memory,
        directory=settings.shared_memory_dir,
        device_pointers=device_pointers,
    )
    if communicator.rank == 0 and torch.cuda.is_available():
        way = "by MPI, from device memory" if device_pointers else "through pinned host memory"
        log.info("what is sent from GPUs goes %s", way)
    _compare_local(communicator)
    roll_call = RollCall(
        MPI.COMM_WORLD.Dup(),
        stall_seconds=settings.stall_seconds,
        shutdown_seconds=settings.stall_shutdown_seconds,
    )
    tracing = communicator.comm.bcast(bool(settings.trace))
    profile = Profile(rank=communicator.rank, tracing=tracing)
    world = World(
        communicator,
        roll_call,
        Progress(roll_call),
        profile,
        settings,
        device_pointers,
        WeakIdKeyDictionary(),
    )
    if MPI.COMM_WORLD.size > 1:
        if not settings.report_fd:  # else mpicomp-launch's worker sees to the main thread
            sys.excepthook = _fail
        threading.excepthook = lambda args: _fail(
            args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
        )
    _observe(world)
    _world = world
    atexit.register(shutdown)


def shutdown() -> None:
    """Leave the job: write what is to be written at the end. Ranks then train by themselves.

    Collective; runs by itself when the process ends. Again is harmless.
    """
    global _world
    if _world is None:
        return
    atexit.unregister(shutdown)
    world, _world = _world, None
    world.progress.stop()
    if world.settings.stats and world.communicator.rank == 0:
        sys.stderr.write(f"mpicomp: {world.profile.stats}\n")
    if world.endpoint is not None:
        world.endpoint.close()
    if world.clock is not None:
        from mpicomp.observe import trace

        trace.write(world.settings.trace, world.profile, world.communicator, world.clock)


def get() -> World:
    """The world, joined now if it was not before."""
    if _world is None:
        init()
    assert _world is not None
    return _world


def is_initialized() -> bool:
    """Whether `init` has been called, and `shutdown` not since."""
    return _world is not None


def rank() -> int:
    """The number of this process, from 0."""
    return get().communicator.rank


def size() -> int:
    """How many processes there are."""
    return get().communicator.size


def local_rank() -> int:
    """The number of this process among those of its host; the GPU to use."""
    return int(get().communicator.local.rank)


def local_size() -> int:
    """How many processes there are on this host."""
    return int(get().communicator.local.size)


def stats() -> Stats:
    """A copy of the totals of this rank so far; the difference of two tells what lay between."""
    return dataclasses.replace(get().profile.stats)


def wait(task: Task[T], what: str) -> T:
    """Run ``task`` to its end, asleep while it waits; a long wait is reported as ``what``."""
    return get().roll_call.run(task, what)


def _compare_local(communicator: Communicator) -> None:
    """Warn, once, if the launcher numbers the ranks of a host otherwise than MPI. Collective."""
    local, rank, size = communicator.local, communicator.rank, communicator.size
    difference = launched.compare_local(local.rank, local.size, size) if size > 1 else None
    first = min(communicator.comm.allgather(rank if difference else size))
    if rank == first:
        log.warning("rank %d: %s", rank, difference)


def _observe(world: World) -> None:
    """Begin with what looks on while training goes; what rank 0 was told counts. Collective."""
    settings, communicator = world.settings, world.communicator
    if settings.prometheus and communicator.rank == 0:
        from mpicomp.observe import prometheus

        world.endpoint = prometheus.serve(settings.prometheus, world.profile.stats)
    if world.profile.tracing:
        from mpicomp.comm.clocks import compare
        from mpicomp.observe import trace

        if communicator.rank == 0:
            trace.check(settings.trace)
        task = compare(communicator.comm)
        world.clock = world.roll_call.run(task, "the comparison of clocks")


def _fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The exception hook: one message that says who failed, and the end of the whole job."""
    if issubclass(kind, SystemExit):  # a thread that ends itself
        return
    from mpi4py import MPI

    text = "".join(traceback.format_exception(kind, error, trace))
    status = 130 if issubclass(kind, KeyboardInterrupt) else 1
    sys.stdout.flush()
    if not launched.report(text, status):
        sys.stderr.write(f"[rank {MPI.COMM_WORLD.rank} on {socket.gethostname()}]\n{text}")
        sys.stderr.flush()
    if not MPI.Is_finalized():
        time.sleep(0.2)  # mpirun drops what it has not read yet when it ends the job
        MPI.COMM_WORLD.Abort(status)
