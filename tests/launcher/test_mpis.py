"""Finding the launcher that belongs to a library, among programs which only pretend to be one."""

import json
import sys

import pytest

from mpicomp_launch import mpis
from mpicomp_launch.allocation import Allocation
from mpicomp_launch.command import UserCommand
from mpicomp_launch.errors import LaunchError
from mpicomp_launch.hosts import Host

VERSIONS = {
    "mpich": "HYDRA build details:\n    Version:                                 5.0.2\n",
    "openmpi": "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/\n",
    "debian": "mpirun.openmpi (OpenRTE) 4.1.4\n",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b)\n",
    "slurm": "slurm 23.02\n",
    "spectrum": "mpirun (IBM Spectrum MPI) 10.3.1.03rtm0\n",
    "flux": "commands:    \t\t0.58.0\nlibflux-core:\t\t0.58.0\n",
    "jsrun": "jsrun 10.3\n",
    "pals": "PALS version 1.3.3 revision 0\n",
}
LIBRARIES = {
    "mpich": "MPICH Version:      5.0.2\nMPICH Release date: ...\n",
    "openmpi": "Open MPI v5.0.11, package: Open MPI user@localhost, ident: 5.0.11\0",
    "intel": "Intel(R) MPI Library 2021.18.1 for Linux* OS\n",
    "cray": "MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)\n",
    "mvapich2": "MVAPICH2 Version      :\t2.3.7\nMVAPICH2 Release date : ...\n",
    "mvapich": "MVAPICH Version      :\t3.0\nMVAPICH Release date : ...\n",
    "spectrum": "Open MPI v3.1.0, package: IBM Spectrum MPI, ident: 10.03.01.00rtm0\n",
    "unknown": "Fabulous MPI 1.0\n",
}


@pytest.fixture
def fake(tmp_path):
    """Writes programs that print something."""

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!{sys.executable}\nprint({text!r})\n")
        file.chmod(0o755)
        return str(file)

    return write


@pytest.fixture
def find(tmp_path, fake, monkeypatch):
    """Finds the launcher for a Python that loads a library from `tmp_path/mpi/lib`."""

    def run(library, wanted=None, scheduler=None):
        path = tmp_path / "mpi" / "lib" / "libmpi.so.12"
        answer = "a greeting\n" + json.dumps([LIBRARIES[library], str(path)])
        python = UserCommand(fake("py/python", answer), (), ("-c", "0"), is_python=True)
        granted = scheduler and Allocation(scheduler, (Host("a", 2),), "its variable")
        return mpis.find(python, wanted, {"PATH": str(tmp_path / "path")}, granted)

    return run


@pytest.mark.parametrize(
    ("name", "family", "version"),
    [
        ("mpich", "mpich", "5.0.2"),
        ("openmpi", "openmpi", "5.0.11"),
        ("debian", "openmpi", "4.1.4"),
        ("intel", "intel", "2021.18.1"),
        ("spectrum", "spectrum", "10.3.1.03rtm0"),
        ("slurm", "srun", "23.02"),
        ("flux", "flux", "0.58.0"),
        ("jsrun", "jsrun", "10.3"),
        ("pals", "pals", "1.3.3"),
    ],
)
def test_launchers_say_who_they_are(fake, name, family, version):
    path = fake("mpiexec", VERSIONS[name])
    assert mpis.identify(path, {}) == mpis.Mpi(family, version, path)


def test_other_programs_are_not_launchers(fake, tmp_path):
    assert mpis.identify(fake("mpiexec", "a program of another kind"), {}) is None
    assert mpis.identify(str(tmp_path / "absent"), {}) is None


def test_beside_the_library_comes_before_path(find, fake):
    fake("path/mpiexec", VERSIONS["mpich"])
    path = fake("mpi/bin/mpiexec", VERSIONS["mpich"])
    assert find("mpich").launcher == path


def test_another_mpi_beside_the_library_is_passed_over(find, fake):
    fake("mpi/bin/mpirun", VERSIONS["mpich"])
    path = fake("path/mpirun.openmpi", VERSIONS["debian"])
    assert find("openmpi") == mpis.Mpi("openmpi", "4.1.4", path)


def test_disagreement_names_both(find, fake, tmp_path):
    path = fake("path/mpirun", VERSIONS["openmpi"])
    with pytest.raises(LaunchError) as caught:
        find("mpich")
    assert f"only {path} (openmpi 5.0.11)" in str(caught.value)
    assert str(tmp_path / "mpi/lib/libmpi.so.12") in str(caught.value)


def test_no_launcher_at_all(find):
    with pytest.raises(LaunchError, match=r"must be of Intel MPI .* got none; install"):
        find("intel")


def test_wanted_must_be_what_the_ranks_load(find, fake):
    fake("path/mpirun", VERSIONS["openmpi"])
    with pytest.raises(LaunchError, match=r"--mpi must be .* got 'openmpi', .* loads MPICH"):
        find("mpich", wanted="openmpi")


def test_unknown_library(find):
    with pytest.raises(LaunchError, match=r"must be one of .*MPICH, Open MPI, Intel MPI, .*Cray"):
        find("cray")


@pytest.mark.parametrize(
    ("library", "launcher", "family"),
    [
        ("mvapich2", "mpich", "mvapich"),  # its launcher is MPICH's, and says so
        ("mvapich", "mpich", "mvapich"),
        ("spectrum", "spectrum", "spectrum"),
    ],
)
def test_relatives(find, fake, library, launcher, family):
    path = fake("mpi/bin/mpirun", VERSIONS[launcher])
    found = find(library)
    assert (found.family, found.launcher) == (family, path)


def test_spectrum_is_not_started_by_an_open_mpi(find, fake):
    fake("path/mpirun", VERSIONS["openmpi"])
    with pytest.raises(LaunchError, match=r"must be of IBM Spectrum MPI .* \(openmpi 5.0.11\)"):
        find("spectrum")


SCHEDULERS = [
    ("slurm", "srun", "slurm"),
    ("flux", "flux", "flux"),
    ("lsf", "jsrun", "jsrun"),
    ("pbs", "mpiexec", "pals"),
]


@pytest.mark.parametrize(("scheduler", "program", "says"), SCHEDULERS)
@pytest.mark.parametrize("library", ["cray", "unknown", "mpich"])
def test_the_scheduler_starts_what_has_no_mpirun(find, fake, library, scheduler, program, says):
    fake("path/mpirun", VERSIONS["openmpi"])  # of another MPI: N jobs of one rank each
    path = fake(f"path/{program}", VERSIONS[says])
    assert find(library, scheduler=scheduler).launcher == path


def test_its_own_mpirun_comes_before_the_scheduler(find, fake):
    fake("path/srun", VERSIONS["slurm"])
    path = fake("path/mpirun", VERSIONS["openmpi"])
    assert find("openmpi", scheduler="slurm").launcher == path


@pytest.mark.parametrize("library", ["cray", "unknown"])
def test_wanted_is_no_way_around_the_library(find, fake, library):
    fake("path/mpirun", VERSIONS["openmpi"])
    with pytest.raises(LaunchError, match=r"got 'openmpi', .*; say nothing, or install"):
        find(library, wanted="openmpi", scheduler="slurm")


def test_a_scheduler_whose_launcher_is_broken(find, fake):
    fake("path/srun", "srun: fatal: Could not establish a configuration source")
    with pytest.raises(LaunchError, match=r"srun must be Slurm's .*, got only .*/path/srun; put"):
        find("cray", scheduler="slurm")


def test_a_scheduler_that_is_asked_for_starts_any(find, fake):
    path = fake("path/srun", VERSIONS["slurm"])
    assert find("mpich", wanted="srun") == mpis.Mpi("srun", "23.02", path)


def test_python_without_mpi4py(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'mpi4py'\" >&2\nexit 1"
    )
    python.chmod(0o755)
    with pytest.raises(LaunchError) as caught:
        mpis.probe([str(python)], {})
    assert "No module named 'mpi4py'" in str(caught.value)
    assert f"write {sys.executable} in its place" in str(caught.value)


def test_others_may_print_too(fake):
    answer = json.dumps([LIBRARIES["mpich"], "/x/libmpi.so"])
    path = fake("py/python", f"a greeting\n{answer}\nand a farewell")
    assert mpis.probe([path], {}) == mpis.Library("mpich", "MPICH 5.0.2", "/x/libmpi.so")


def test_a_python_that_runs_nothing(fake):
    with pytest.raises(LaunchError, match="must be a working Python, got one that runs nothing"):
        mpis.probe([fake("py/python", "something else")], {})


def test_the_installed_one(mpi, environ):
    again = mpis.identify(mpi.launcher, environ)
    assert again == mpi
