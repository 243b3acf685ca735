"""What launchers leave in the environment, and what follows from it. No MPI needed."""

from __future__ import annotations

import json
import os

import pytest

from mpicomp import launched
from mpicomp.errors import MpicompError

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "0",
}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "0",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
PALS = {
    "PALS_RANKID": "0",
    "PALS_LOCAL_RANKID": "0",
    "PALS_LOCAL_SIZE": "2",
    "PMI_RANK": "0",
    "PMI_SIZE": "4",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "0",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "0",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}
FLUX = {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "0"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
}
SRUN_PMI2 = {**SRUN, "PMI_RANK": "0", "PMI_SIZE": "4", "PMI_FD": "9"}
OTHER_PMI = {"PMI_RANK": "0", "PMI_SIZE": "4"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}

BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SALLOC = {**SRUN, "SLURM_STEP_ID": "4294967290"}
ONE_TASK = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}

LIBRARY = "MPICH Version:      5.0.2\nMPICH Release date: unreleased"


@pytest.fixture
def check(monkeypatch):
    """`check_size` in an environment of the given variables and no others."""

    def run(actual, environ, expected=0):
        with monkeypatch.context() as context:
            context.setattr(os, "environ", environ)
            launched.check_size(actual, expected, LIBRARY)

    monkeypatch.setattr(launched, "PATIENCE_SECONDS", 0)
    return run


@pytest.mark.parametrize(
    ("environ", "title", "way"),
    [
        (OPENMPI, "Open MPI's mpirun", "mpirun of that MPI"),
        (HYDRA, "Hydra's mpiexec", "mpicomp-launch"),
        (MVAPICH, "MVAPICH's mpirun_rsh", "mpirun of that MPI"),
        (PALS, "PALS' mpiexec", "Cray MPICH"),
        (JSRUN, "jsrun", "mpirun of that MPI"),
        (FLUX, "flux run", "flux run -o pmi=pmix"),
        (SRUN, "srun", "srun --mpi=list"),
        (SRUN_PMI2, "srun", "srun --mpi=pmix"),
        (OTHER_PMI, "an mpiexec", "mpirun of that MPI"),
        (TORCHRUN, "torchrun", "mpirun -n N"),
        ({**BATCH, **OPENMPI}, "Open MPI's mpirun", "mpirun of that MPI"),
        ({**ONE_TASK, **HYDRA}, "Hydra's mpiexec", "mpirun of that MPI"),
        # Hydra starts its helpers by srun, one a node: their step is not that of the ranks
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "2", **HYDRA}, "Hydra's mpiexec", "mpirun of that MPI"),
        ({**FLUX, "FLUX_JOB_SIZE": "1", **HYDRA}, "Hydra's mpiexec", "mpirun of that MPI"),
    ],
)
def test_alone_where_four_were_started(check, environ, title, way):
    check(4, environ)
    with pytest.raises(MpicompError) as caught:
        check(1, environ)
    text = str(caught.value)
    assert f"the launcher ({title}) started 4 ranks, but this one is in a world of 1" in text
    assert "The library is MPICH Version: 5.0.2" in text
    assert way in text
    assert "MPICOMP_EXPECT_SIZE=1" in text
    assert "{" not in text
    check(1, environ, expected=1)


@pytest.mark.parametrize(
    "environ",
    [{}, BATCH, SALLOC, ONE_TASK, {"RANK": "1", "WORLD_SIZE": "4"}, {"PMI_SIZE": "1"}],
    ids=["nothing", "sbatch", "salloc", "srun --pty", "somebody's RANK", "one"],
)
def test_one_process_by_itself_is_legal(check, environ):
    check(1, environ)


def test_a_world_of_several_needs_no_permission(check):
    """Also one of other launchers within: the nearest is the one that counts."""
    check(8, {**SRUN, **OPENMPI})
    check(2, {**ONE_TASK, "PMI_RANK": "0"})
    check(3, SALLOC)


@pytest.mark.parametrize("environ", [OPENMPI, HYDRA, SRUN, FLUX])
def test_only_the_first_rank_tells_the_story(check, environ):
    last = {name: "3" if "RANK" in name or "PROCID" in name else v for name, v in environ.items()}
    last |= {name: environ[name] for name in environ if "NRANKS" in name}
    with pytest.raises(SystemExit) as caught:
        check(1, last)
    assert caught.value.code == "mpicomp: rank 3 is in a world of 1, not 4, too"


def test_a_launcher_that_tells_no_size(check):
    """The rank called 0 cannot know; the next one speaks for all."""
    check(1, {"PMIX_RANK": "0"})
    with pytest.raises(MpicompError, match=r"\(a PMIx launcher\) started several ranks"):
        check(1, {"PMIX_RANK": "1"})
    with pytest.raises(SystemExit, match="not all, too"):
        check(1, {"PMIX_RANK": "2"})
    with pytest.raises(MpicompError, match=r"PALS' mpiexec\) started several"):
        check(1, {"PALS_RANKID": "1", "PMIX_RANK": "1"})


def test_what_mpicomp_launch_expects_is_exact(check):
    check(3, OPENMPI, expected=3)
    with pytest.raises(MpicompError, match=r"mpirun\) started 4 ranks, .* in a world of 2"):
        check(2, OPENMPI, expected=4)
    with pytest.raises(MpicompError, match="the launcher started 2 ranks"):
        check(1, {}, expected=2)


@pytest.mark.parametrize("text", ["", "two", "-1", "²", "1.5", "0x4"])
def test_values_that_are_no_numbers(check, text):
    check(1, {"OMPI_COMM_WORLD_RANK": text, "OMPI_COMM_WORLD_SIZE": text, "PMI_SIZE": "4"})
    check(1, {**SRUN, "SLURM_STEP_ID": text})


@pytest.mark.parametrize("environ", [OPENMPI, HYDRA, MVAPICH, PALS, JSRUN, FLUX, SRUN, {}, BATCH])
def test_places_on_a_host_agree(monkeypatch, environ):
    monkeypatch.setattr(os, "environ", environ)
    assert launched.compare_local(0, 2, 4) is None


@pytest.mark.parametrize("environ", [OPENMPI, HYDRA, MVAPICH, PALS, JSRUN])
@pytest.mark.parametrize("ours", [(1, 2), (0, 1), (0, 4)])
def test_places_on_a_host_differ(monkeypatch, environ, ours):
    monkeypatch.setattr(os, "environ", environ)
    text = launched.compare_local(*ours, 4)
    assert text is not None
    assert f"number 0 of 2 on its host, MPI calls it {ours[0]} of {ours[1]}" in text


def test_helpers_of_mpirun_are_not_asked_for_places(monkeypatch):
    """Ranks below mpirun inherit what srun has told mpirun's own helper."""
    monkeypatch.setattr(os, "environ", {**SRUN, "SLURM_STEP_NUM_TASKS": "2", **HYDRA})
    assert launched.compare_local(0, 2, 4) is None
    monkeypatch.setattr(os, "environ", {**SRUN, "SLURM_STEP_NUM_TASKS": "2"})
    assert launched.compare_local(1, 2, 4) is None


def test_reports_go_to_the_worker(monkeypatch):
    reader, writer = os.pipe()
    monkeypatch.setenv("MPICOMP_REPORT_FD", f"{writer}:{os.getpid()}")
    assert launched.report("Traceback:\n  é\n", 3)
    assert json.loads(os.read(reader, 1000)) == {"status": 3, "text": "Traceback:\n  é\n"}
    os.close(reader)
    os.close(writer)
    assert not launched.report("too late", 1)


@pytest.mark.parametrize("value", ["", "7", "7:", "7:1", ":", "x:y"])
def test_children_of_a_rank_do_not_report(monkeypatch, value):
    monkeypatch.setenv("MPICOMP_REPORT_FD", value)
    assert not launched.report("text", 1)
