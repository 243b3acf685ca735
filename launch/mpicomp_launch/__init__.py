"""Start training jobs under whichever MPI the target Python uses: `mpicomp-launch`, and `run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpicomp_launch.errors import LaunchError, RankError
    from mpicomp_launch.function import run

__all__ = ["LaunchError", "RankError", "run"]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is used: what runs in every rank imports this package."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(
        "mpicomp_launch.function" if name == "run" else "mpicomp_launch.errors"
    )
    return getattr(module, name)
