"""What each launcher wants to hear: from a `Plan` to an argument list. No shell anywhere."""

from __future__ import annotations

from mpicomp_launch.dialects.base import Command, Dialect
from mpicomp_launch.dialects.hydra import Hydra, Intel, Mvapich
from mpicomp_launch.dialects.openmpi import OpenMpi4, OpenMpi5
from mpicomp_launch.dialects.schedulers import Flux, Jsrun, Pals, Srun
from mpicomp_launch.mpis import Mpi
from mpicomp_launch.plan import Plan

__all__ = ["Command", "Dialect", "for_mpi", "for_plan"]

DIALECTS: dict[str, type[Dialect]] = {
    "mpich": Hydra,
    "intel": Intel,
    "mvapich": Mvapich,
    "spectrum": OpenMpi4,  # from which it was made
    "srun": Srun,
    "flux": Flux,
    "jsrun": Jsrun,
    "pals": Pals,
}


def for_plan(plan: Plan) -> Dialect:
    """The dialect of a plan's launcher."""
    return for_mpi(plan.mpi)


def for_mpi(mpi: Mpi) -> Dialect:
    """The dialect of a launcher."""
    if mpi.family == "openmpi":
        major = int(mpi.version.split(".")[0])
        return OpenMpi5() if major >= 5 else OpenMpi4()
    return DIALECTS[mpi.family]()
