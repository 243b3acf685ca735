"""Data-parallel PyTorch over plain MPI, with gradient compression.

Importing this package starts nothing: MPI is loaded by `init`, or by what needs it first.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "mpicomp.world": (
        "init",
        "shutdown",
        "is_initialized",
        "rank",
        "size",
        "local_rank",
        "local_size",
        "stats",
    ),
    "mpicomp.optimizer": ("DistributedOptimizer",),
    "mpicomp.auto": ("Auto",),
    "mpicomp.collectives": (
        "Average",
        "Max",
        "Min",
        "Product",
        "Sum",
        "allgather",
        "allreduce",
        "allreduce_",
        "alltoall",
        "barrier",
        "broadcast",
        "broadcast_",
        "reducescatter",
    ),
    "mpicomp.replicate": (
        "allgather_object",
        "broadcast_object",
        "broadcast_optimizer_state",
        "broadcast_parameters",
    ),
    "mpicomp.compress": (
        "ACPSGD",
        "BFloat16",
        "CLTK",
        "DEFT",
        "DGC",
        "EFSign",
        "ExDyna",
        "FetchSGD",
        "Float16",
        "GTopK",
        "GaussianK",
        "Int4",
        "Int8",
        "MiCRO",
        "Natural",
        "NoCompression",
        "OkTopk",
        "OneBit",
        "PowerSGD",
        "QSGD",
        "RandomK",
        "SIDCo",
        "SignSGD",
        "Sketch",
        "THC",
        "TernGrad",
        "Threshold",
        "TopK",
    ),
    "mpicomp.errors": ("MismatchError", "MpicompError", "StallError"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_PACKAGES = ("compress", "observe")  # with public names of their own

__all__ = list(_MODULE_OF)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"mpicomp.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mpicomp' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", *_PACKAGES])
