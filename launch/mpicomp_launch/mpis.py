"""Which MPI the ranks will load, and the launcher (`mpiexec`, `mpirun`) that belongs to it.

The launcher of one MPI starting ranks of another gives N jobs of one rank each, without an error.
So the Python that will run the ranks is asked what it loads, and every launcher who it is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mpicomp_launch.allocation import Allocation
from mpicomp_launch.command import UserCommand
from mpicomp_launch.errors import LaunchError

PROBE = """
import json, re
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
try:
    with open("/proc/self/maps") as maps:
        found = re.search(r"/.*/libmpi(?:ch|_cray|_abi|_ibm)?\\.so.*", maps.read())
except OSError:
    found = None
print()
print(json.dumps([MPI.Get_library_version(), found.group() if found else ""]))
"""
PROBE_SECONDS = 60


@dataclass(frozen=True)
class Family:
    """How an implementation names itself, and its launchers, the preferred one first.

    Attributes:
        title: For messages.
        library: Pattern of what its library says, with the version; None for a scheduler's
            launcher, which starts ranks of any MPI.
        launcher: Pattern of what its launcher says; None where it has none of its own.
        programs: Names of the launcher.
    """

    title: str
    library: str | None
    launcher: str | None
    programs: tuple[str, ...]


HYDRA = r"HYDRA build details:\s+Version:\s*(\S+)"
HYDRA_PROGRAMS = ("mpiexec", "mpiexec.hydra", "mpirun", "mpiexec.mpich")
FAMILIES: Mapping[str, Family] = {
    # It calls itself Open MPI, which it was made of, and has numbers of its own.
    "spectrum": Family(
        title="IBM Spectrum MPI",
        library=r"Open MPI v(\d[^\s,]*), package: IBM Spectrum MPI",
        launcher=r"\(IBM Spectrum MPI\) (\d\S*)",
        programs=("mpirun", "mpiexec"),
    ),
    "mvapich": Family("MVAPICH", r"MVAPICH\S* Version\s*:\s*(\S+)", HYDRA, HYDRA_PROGRAMS),
    "cray": Family("Cray MPICH", r"CRAY MPICH version (\S+)", None, ()),
    "mpich": Family("MPICH", r"MPICH Version:\s*(\S+)", HYDRA, HYDRA_PROGRAMS),
    "openmpi": Family(
        title="Open MPI",
        library=r"Open MPI v(\d[^\s,]*)",
        launcher=r"\((?:Open MPI|OpenRTE)\) (\d\S*)",
        programs=("mpirun", "mpiexec", "mpirun.openmpi"),
    ),
    "intel": Family(
        title="Intel MPI",
        library=r"Intel\(R\) MPI Library (\d\S*)",
        launcher=r"Intel\(R\) MPI Library for Linux\* OS, Version (\d\S*)",
        programs=("mpiexec.hydra",),  # mpirun there is a script that runs the first one on PATH
    ),
    "srun": Family("Slurm", None, r"slurm\S* (\d\S*)", ("srun",)),
    "flux": Family("Flux", None, r"(?:commands|libflux-core):\s*(\S+)", ("flux",)),
    "jsrun": Family("JSM", None, r"jsrun\D*(\d\S*)", ("jsrun",)),
    "pals": Family("PALS", None, r"PALS\D*(\d\S*)", ("mpiexec",)),
}
# Who starts the ranks of an allocation where the MPI has no launcher.
SCHEDULERS = {"slurm": "srun", "flux": "flux", "lsf": "jsrun", "pbs": "pals"}


@dataclass(frozen=True)
class Library:
    """An MPI library: a key of `FAMILIES` (None: not known), its version, where it lies."""

    family: str | None
    version: str
    path: str


@dataclass(frozen=True)
class Mpi:
    """An MPI launcher: a key of `FAMILIES`, the launcher's version, its absolute path."""

    family: str
    version: str
    launcher: str


def find(
    command: UserCommand,
    wanted: str | None,
    environ: Mapping[str, str],
    granted: Allocation | None = None,
) -> Mpi:
    """The launcher for a command.

    Args:
        command: A Python program decides by the library its mpi4py loads. Of any other program
            nothing is known, so this launcher's own Python decides, if it has mpi4py.
        wanted: A key of `FAMILIES` to insist on, None for whichever fits.
        environ: The environment of the job.
        granted: The allocation we are in; its scheduler starts what no mpirun does.

    Raises:
        LaunchError: No MPI is found, or library and launcher are not of one family.
    """
    if wanted and FAMILIES[wanted].library is None:
        return find_launcher(wanted, Path(command.python), environ, "--mpi asks for it")
    try:
        library = probe([command.python, *command.options], environ)
    except LaunchError:
        if command.is_python:
            raise
        reason = "--mpi asks for it" if wanted else "no mpi4py says which"
        return find_launcher(wanted, Path(sys.executable), environ, reason)
    described = f"{command.python} loads {library.version} ({library.path})"
    scheduler = SCHEDULERS[granted.scheduler] if granted else None
    has_launcher = library.family is not None and FAMILIES[library.family].launcher is not None
    if not has_launcher and scheduler is None:
        known = ", ".join(
            each.title for each in FAMILIES.values() if each.library and each.launcher
        )
        raise LaunchError(
            f"the MPI must be one of {known}, but {described}; run it within an "
            "allocation, or give --mpi of the launcher it belongs to"
        )
    if wanted not in (None, library.family):
        same = f"say --mpi {library.family} or nothing" if has_launcher else "say nothing"
        raise LaunchError(
            f"--mpi must be the MPI which the ranks load, got {wanted!r}, but {described}; "
            f"{same}, or install an mpi4py for {wanted}"
        )
    if not has_launcher and scheduler is not None:  # any other MPI's would start it N times alone
        return find_launcher(scheduler, Path(sys.executable), environ, described)
    try:
        return find_launcher(library.family, Path(library.path), environ, described)
    except LaunchError:
        if scheduler is None:
            raise
        return find_launcher(scheduler, Path(sys.executable), environ, described)


def ask(words: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a program for what it prints."""
    return subprocess.run(
        words,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=PROBE_SECONDS,
    )


def probe(python: Sequence[str], environ: Mapping[str, str]) -> Library:
    """Asks a Python which MPI its mpi4py loads, without initialising it."""
    try:
        answer = ask([*python, "-c", PROBE], environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{python[0]} must be a working Python, got: {error}") from error
    if answer.returncode:
        raise LaunchError(no_mpi4py(python[0], answer.stderr))
    said = [line for line in answer.stdout.splitlines() if line.startswith('["')]
    if not said:  # others may print before and after, as sitecustomize does
        raise LaunchError(f"{python[0]} must be a working Python, got one that runs nothing")
    text, path = json.loads(said[-1])
    for key, family in FAMILIES.items():
        found = re.search(family.library, text) if family.library else None
        if found:
            return Library(key, f"{family.title} {found.group(1)}", path)
    return Library(None, text.splitlines()[0], path)


def no_mpi4py(python: str, stderr: str) -> str:
    """The error text for a Python that cannot load MPI."""
    reason = (stderr.strip().splitlines() or ["it ended without a message"])[-1]
    text = f"{python} must be a Python with mpi4py and an MPI, got: {reason}; "
    if os.path.realpath(python) != os.path.realpath(sys.executable):
        text += (
            f"it is another Python than the launcher's: write {sys.executable} in its place, "
            "activate the environment you mean, or "
        )
    return f"{text}run `{python} -m pip install mpi4py mpich`"


def find_launcher(
    family: str | None, beside: Path, environ: Mapping[str, str], described: str
) -> Mpi:
    """The first launcher of a family (None: of any), near a file, then on PATH."""
    others = []
    for path in candidates(family, beside, environ):
        mpi = identify(path, environ)
        if mpi is not None and is_of(mpi, family):
            return replace(mpi, family=family or mpi.family)
        others.append(f"{path} ({mpi.family} {mpi.version})" if mpi else path)
    wanted = FAMILIES[family] if family else None
    kind = wanted.title if wanted else "MPI"
    got = "only " + ", ".join(others) if others else "none"
    if wanted and wanted.library is None:
        name = wanted.programs[0]
        raise LaunchError(
            f"{name} must be {kind}'s and answer --version ({described}), got {got}; "
            "put its directory on PATH, or see what it says by hand"
        )
    raise LaunchError(
        f"mpirun or mpiexec must be of {kind} ({described}), got {got}; "
        "install that MPI completely, or put its bin directory on PATH"
    )


def is_of(mpi: Mpi, family: str | None) -> bool:
    """Whether a launcher is one of a family's; MVAPICH's is MPICH's."""
    if family is None:
        return FAMILIES[mpi.family].library is not None
    return FAMILIES[mpi.family].launcher == FAMILIES[family].launcher


def candidates(family: str | None, beside: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """Paths where a launcher may lie: `bin` of each directory above a file, then PATH."""
    families = [FAMILIES[family]] if family else list(FAMILIES.values())
    programs = list(dict.fromkeys(name for each in families for name in each.programs))
    above = [str(parent / "bin") for parent in beside.parents][:5]
    seen = set()
    for directories in (os.pathsep.join(above), environ.get("PATH", os.defpath)):
        for name in programs:
            path = shutil.which(name, path=directories)
            if path and os.path.realpath(path) not in seen:
                seen.add(os.path.realpath(path))
                yield os.path.abspath(path)


def identify(path: str, environ: Mapping[str, str]) -> Mpi | None:
    """Asks a launcher who it is; None if it is none that we know, or broken."""
    try:
        answer = ask([path, "--version"], environ)
    except (OSError, subprocess.TimeoutExpired):
        return None
    for key, family in FAMILIES.items():
        found = re.search(family.launcher, answer.stdout) if family.launcher else None
        if found and key != "mvapich":  # whose launcher says that it is MPICH's
            return Mpi(key, found.group(1), path)
    return None
