"""The variables of the ranks: what they get, and what must be carried to other hosts."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence

from mpicomp_launch.errors import LaunchError
from mpicomp_launch.frames import LISTENED_TO
from mpicomp_launch.hosts import Placement, expand
from mpicomp_launch.kinds import HostSection, number_text
from mpicomp_launch.options import FIELDS, Options, variable_of
from mpicomp_launch.resolve import CONFIG_VARIABLE

# Between the launcher and the workers of its ranks, or the library.
EXPECT_SIZE = "MPICOMP_EXPECT_SIZE"
INTERNAL = (
    EXPECT_SIZE,
    "MPICOMP_THREADS",
    "MPICOMP_GPU_BIND",
    "MPICOMP_RANK_ENV",
    "MPICOMP_CHDIR",
    "MPICOMP_GRACE",
    "MPICOMP_REPORT_FD",
    LISTENED_TO,
)
FORWARDED = (
    "PATH",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "CONDA_DEFAULT_ENV",
    "OMP_NUM_THREADS",
)
FORWARDED_PREFIXES = ("MPICOMP_", "MPI4PY_", "FI_", "UCX_", "NCCL_")


def without_own(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's environment, less the variables that only the launcher reads."""
    own = {variable_of(name) for name in FIELDS if not FIELDS[name].metadata["variable"]}
    return {
        name: text
        for name, text in environ.items()
        if name not in own and name != CONFIG_VARIABLE and name not in INTERNAL
    }


def rank_exports(
    options: Options, np: int, cwd: str, placement: Sequence[Placement], environ: Mapping[str, str]
) -> dict[str, str]:
    """Variables which the launcher adds for all ranks.

    `MPICOMP_EXPECT_SIZE` lets the library notice that it runs as N jobs of one rank. Without
    `OMP_NUM_THREADS` PyTorch takes one thread, or all cores in each rank, depending on the MPI;
    each worker counts the cores of its host.
    """
    exports = {
        EXPECT_SIZE: str(np),
        "MPICOMP_THREADS": "auto",
        "MPICOMP_GRACE": number_text(options.grace),
        "MPICOMP_CHDIR": cwd,
    }
    if options.gpu_bind != "none":
        exports["MPICOMP_GPU_BIND"] = options.gpu_bind
    if options.tag == "none" and sys.stdout.isatty():
        # Ranks write to a pipe; these say that it ends on a terminal, as it is.
        exports |= {
            "TTY_COMPATIBLE": "1",
            "COLUMNS": str(shutil.get_terminal_size().columns),
        }
    sections = host_variables(options.host, placement, environ)
    if sections:
        exports["MPICOMP_RANK_ENV"] = json.dumps(sections)
    for name, field in FIELDS.items():
        value = getattr(options, name)
        if field.metadata["variable"] and value is not None:
            exports[field.metadata["variable"]] = as_text(value)
    given = dict(options.env)
    resolve_values(tuple(given.items()), environ, "--env")
    return exports | {name: text for name, text in given.items() if text is not None}


def as_text(value: object) -> str:
    """A setting of the library as a variable."""
    if isinstance(value, bool):
        return "1" if value else "0"
    return number_text(value) if isinstance(value, float) else str(value)


def resolve_values(
    pairs: Sequence[tuple[str, str | None]], environ: Mapping[str, str], what: str
) -> dict[str, str]:
    """Variables with values, from those given and the environment."""
    values = {}
    for name, text in pairs:
        if text is None and name not in environ:
            raise LaunchError(
                f"{what} {name} must name a variable that is set, got none of that name; "
                f"write {name}=VALUE to give it one"
            )
        values[name] = environ[name] if text is None else text
    return values


def host_variables(
    sections: Sequence[HostSection], placement: Sequence[Placement], environ: Mapping[str, str]
) -> list[tuple[int, int, dict[str, str]]]:
    """First rank, last rank and variables, for each host that a section names."""
    found = []
    first = 0
    named = [(set(expand(section.name)), section) for section in sections]
    for place in placement:
        values: dict[str, str] = {}
        for names, section in named:
            if place.host in names:
                values |= resolve_values(section.env, environ, f"host {place.host}: env")
        if values:
            found.append((first, first + place.ranks - 1, values))
        first += place.ranks
    return found


def to_forward(
    environ: Mapping[str, str], exports: Mapping[str, str], asked: Sequence[tuple[str, str | None]]
) -> tuple[str, ...]:
    """Names of the variables that ranks on other hosts must get."""
    names = {name for name, _ in asked} | set(exports) | {LISTENED_TO}
    names |= {name for name in environ if name in FORWARDED or name.startswith(FORWARDED_PREFIXES)}
    return tuple(sorted(names))
