"""What a rank makes of the variables it finds."""

import json

import pytest

from mpicomp_launch import rank_env


def prepare(num_cores=8, num_gpus=4, **environ):
    rank_env.prepare(environ, num_cores, num_gpus)
    return environ


@pytest.mark.parametrize("table", [rank_env.RANK, rank_env.LOCAL_RANK, rank_env.LOCAL_SIZE])
def test_tables(table):
    for name in table:
        assert rank_env.number(table, {name: "3"}) == 3
    assert rank_env.number(table, {table[0]: "", table[-1]: "2"}) == 2
    assert rank_env.number(table, {table[0]: "x"}) is None


@pytest.mark.parametrize(
    ("tasks", "node", "size"),
    [
        ("4", "0", 4),
        ("4(x2),3", "0", 4),
        ("4(x2),3", "1", 4),
        ("4(x2),3", "2", 3),
        ("4(x2),3", "3", None),
        ("", "0", None),
        ("4", "", None),
    ],
)
def test_local_size_of_slurm(tasks, node, size):
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        assert rank_env.local_size({name: tasks, "SLURM_NODEID": node}) == size
    both = {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_TASKS_PER_NODE": "9", "SLURM_NODEID": "0"}
    assert rank_env.local_size(both) == 1


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(8, "2", "4"), (8, "3", "2"), (2, "4", "1")]
)
def test_threads(cores, ranks, threads):
    got = prepare(cores, MPICOMP_THREADS="auto", MPI_LOCALNRANKS=ranks)
    assert got == {"MPI_LOCALNRANKS": ranks, "OMP_NUM_THREADS": threads}


def test_threads_stay():
    assert prepare(MPICOMP_THREADS="auto", FLUX_TASK_LOCAL_ID="0") == {"FLUX_TASK_LOCAL_ID": "0"}
    kept = {"OMP_NUM_THREADS": "3", "MPI_LOCALNRANKS": "2"}
    assert prepare(MPICOMP_THREADS="auto", **kept) == kept
    assert "OMP_NUM_THREADS" not in prepare(MPI_LOCALNRANKS="2")


@pytest.mark.parametrize(
    ("visible", "local_rank", "expected"),
    [
        (None, "1", "1"),
        (None, "5", "1"),
        (None, None, None),
        ("", "1", ""),
        ("2,3", "1", "3"),
        ("2,3", "2", "2"),
        ("2,3", None, "2,3"),
        ("GPU-8932f937, GPU-1c3c2fb1", "1", "GPU-1c3c2fb1"),
        ("MIG-GPU-8932f937/1/2", "0", "MIG-GPU-8932f937/1/2"),
    ],
)
def test_gpu(visible, local_rank, expected):
    environ = {"CUDA_VISIBLE_DEVICES": visible, "MPI_LOCALRANKID": local_rank}
    known = {name: text for name, text in environ.items() if text is not None}
    got = prepare(MPICOMP_GPU_BIND="local", **known)
    assert got.get("CUDA_VISIBLE_DEVICES") == expected


def test_no_gpu():
    asked = {"MPICOMP_GPU_BIND": "local", "MPI_LOCALRANKID": "0"}
    assert "CUDA_VISIBLE_DEVICES" not in prepare(num_gpus=0, **asked)
    assert "CUDA_VISIBLE_DEVICES" not in prepare(MPI_LOCALRANKID="0")


@pytest.mark.parametrize(("rank", "value"), [("0", None), ("1", "x y"), ("2", "x y"), ("3", None)])
def test_variables_of_a_host(rank, value):
    sections = json.dumps([[1, 2, {"WHERE": "x y"}], [9, 9, {"WHERE": "no"}]])
    assert prepare(MPICOMP_RANK_ENV=sections, PMI_RANK=rank).get("WHERE") == value


def test_a_host_may_say_how_many_threads():
    sections = json.dumps([[0, 0, {"OMP_NUM_THREADS": "7"}]])
    hydra = {"PMI_RANK": "0", "MPI_LOCALNRANKS": "2"}
    got = prepare(MPICOMP_RANK_ENV=sections, MPICOMP_THREADS="auto", **hydra)
    assert got["OMP_NUM_THREADS"] == "7"
