"""What a user can set through the environment, in one place.

A call argument wins over the environment; the launcher's options arrive as these variables.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

_PREFIX = "MPICOMP_"
_OF_THE_LAUNCHER = "MPICOMP_LAUNCH_"


@dataclass(frozen=True, slots=True)
class Settings:
    """Each field is the variable ``MPICOMP_<FIELD>``.

    Attributes:
        compression: used where the optimizer is given none.
        fusion_mb: size of a bucket of gradients.
        shared_memory: 0 sends everything through MPI, also on one host.
        shared_memory_dir: the memory file system to use for it.
        stall_seconds: a collective that waits longer is reported with the ranks that are missing.
        stall_shutdown_seconds: one that waits longer ends the job.
        trace: file for a Chrome trace of the run; rank 0's counts.
        prometheus: ``[HOST:]PORT`` where rank 0 answers Prometheus.
        stats: 1 prints a line of totals at the end.
        expect_size: number of ranks that the launcher started; `init` checks it.
        report_fd: where a rank tells the launcher's worker why it fails.
    """

    compression: str = "none"
    fusion_mb: float = 25.0
    shared_memory: bool = True
    shared_memory_dir: str = "/dev/shm"
    stall_seconds: float = 60.0
    stall_shutdown_seconds: float = 600.0
    trace: str = ""
    prometheus: str = ""
    stats: bool = False
    expect_size: int = 0
    report_fd: str = ""


def read(environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings of ``environment``.

    Raises:
        ValueError: an unknown ``MPICOMP_`` variable, or a value that does not fit.
    """
    known = {_PREFIX + field.name.upper(): field for field in fields(Settings)}
    values: dict[str, object] = {}
    for name, text in environment.items():
        if not name.startswith(_PREFIX) or name.startswith(_OF_THE_LAUNCHER):
            continue
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise ValueError(f"environment: {name} is not a setting of mpicomp{hint}")
        if text:  # an empty variable counts as one that is not set
            values[known[name].name] = _convert(name, text, str(known[name].type))
    return Settings(**values)  # type: ignore[arg-type]


def _convert(name: str, text: str, kind: str) -> object:
    if kind == "bool":
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
    elif kind == "str":
        return text
    else:
        try:
            number = int(text) if kind == "int" else float(text)
        except ValueError:
            number = -1
        if number >= 0:  # NaN is not
            return number
    contract = {"bool": "0 or 1", "int": "a whole number >= 0", "float": "a number >= 0"}[kind]
    raise ValueError(f"environment: {name} must be {contract}, got {text!r}")
