"""What each MPI is told, word for word. No MPI is needed here."""

import shlex

import pytest

from mpicomp_launch import dialects
from mpicomp_launch.command import UserCommand
from mpicomp_launch.mpis import Mpi
from mpicomp_launch.plan import Plan, rank_exports

MPICH = Mpi("mpich", "5.0.2", "/v/bin/mpiexec")
INTEL = Mpi("intel", "2021.18.1", "/v/bin/mpiexec.hydra")
OPENMPI5 = Mpi("openmpi", "5.0.11", "/v/bin/mpirun")
OPENMPI4 = Mpi("openmpi", "4.1.4", "/usr/bin/mpirun.openmpi")
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def plan(mpi, *, is_root=False, arguments=("a b", "--mca"), **environ):
    return Plan(
        np=4,
        command=UserCommand("/bin/prog", (), arguments, is_python=False),
        mpi=mpi,
        environ={"PATH": "/usr/bin", **environ},
        exports={"MPICOMP_EXPECT_SIZE": "4"},
        cwd="/data",
        is_root=is_root,
    )


def command(*args, **kwargs):
    job = plan(*args, **kwargs)
    return dialects.for_plan(job).command(job)


@pytest.mark.parametrize(
    ("mpi", "expected"),
    [
        (MPICH, "/v/bin/mpiexec -np 4 /bin/prog 'a b' --mca"),
        (INTEL, "/v/bin/mpiexec.hydra -np 4 /bin/prog 'a b' --mca"),
        (
            OPENMPI5,
            "/v/bin/mpirun -np 4 --bind-to none --map-by :OVERSUBSCRIBE --mca pml ob1 "
            "--mca btl self,sm,tcp --mca osc ^ucx /bin/prog 'a b' --mca",
        ),
        (
            OPENMPI4,
            "/usr/bin/mpirun.openmpi -np 4 --bind-to none --oversubscribe --mca pml ob1 "
            "--mca btl self,vader,tcp --mca osc ^ucx /bin/prog 'a b' --mca",
        ),
    ],
    ids=lambda value: f"{value.family}-{value.version}" if isinstance(value, Mpi) else "",
)
def test_arguments(mpi, expected):
    assert command(mpi).argv == tuple(shlex.split(expected))
    assert command(mpi).cwd == "/data"


@pytest.mark.parametrize(
    ("mpi", "as_user", "as_root"),
    [
        (MPICH, {}, {}),
        (INTEL, {"PATH": "/v/bin:/usr/bin", "I_MPI_PIN": "0"}, {}),
        (OPENMPI5, {}, ROOT),
        (OPENMPI4, {}, ROOT),
    ],
)
def test_variables(mpi, as_user, as_root):
    always = {"MPICOMP_EXPECT_SIZE": "4"}
    assert command(mpi).exports == {**as_user, **always}
    assert command(mpi, is_root=True).exports == {**as_user, **as_root, **always}


def test_what_the_user_has_set_stays():
    assert "I_MPI_PIN" not in command(INTEL, I_MPI_PIN="1").exports
    argv = command(OPENMPI5, OMPI_MCA_pml="ucx").argv
    assert "pml" not in argv
    assert "btl" in argv


@pytest.mark.parametrize(
    ("mpi", "status", "expected"),
    [(MPICH, 9, 137), (MPICH, 11, 139), (MPICH, 3, 3), (OPENMPI5, 137, 137), (INTEL, 255, 255)],
)
def test_status_of_a_killed_rank(mpi, status, expected):
    assert dialects.for_plan(plan(mpi)).status_of_killed(status) == expected


def test_printed_command_is_one_a_shell_reads_back():
    printed = str(command(OPENMPI5, is_root=True, arguments=("it's", "$HOME", "")))
    assert printed.startswith("env OMPI_ALLOW_RUN_AS_ROOT=1 ")
    assert shlex.split(printed)[-4:] == ["it's", "$HOME", "", "</dev/null"]


@pytest.mark.parametrize(
    ("np", "environ", "threads"),
    [(1, {}, "8"), (3, {}, "2"), (9, {}, "1"), (2, {"OMP_NUM_THREADS": ""}, "4")],
)
def test_threads_share_the_cores(np, environ, threads):
    exports = rank_exports(np, environ, 8)
    assert exports == {"MPICOMP_EXPECT_SIZE": str(np), "OMP_NUM_THREADS": threads}


def test_threads_set_by_the_user_stay():
    assert "OMP_NUM_THREADS" not in rank_exports(2, {"OMP_NUM_THREADS": "7"}, 8)


def test_a_terminal_is_told_of():
    assert "TTY_COMPATIBLE" not in rank_exports(2, {}, 8)
    shown = rank_exports(2, {}, 8, terminal_columns=90)
    assert (shown["TTY_COMPATIBLE"], shown["COLUMNS"]) == ("1", "90")
