"""What schedulers say in their variables and files, and when we are a rank already."""

import json
import os
import string
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpicomp_launch import allocation, planner
from mpicomp_launch.allocation import Allocation, detect, inside_step
from mpicomp_launch.errors import LaunchError
from mpicomp_launch.hosts import Host

NODES, TASKS = "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"


@pytest.fixture
def nodefile(tmp_path):
    """Writes a file of names and returns its path."""

    def write(text):
        path = tmp_path / "nodes"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def flux(tmp_path):
    """An environment with a `flux` that prints a text, and ends with a status."""

    def write(said, status=0):
        (tmp_path / "said").write_text(said)
        program = tmp_path / "flux"
        program.write_text(
            f'#!/bin/sh\n[ "$*" = "resource R --states=up" ] || exec echo "$*"\n'
            f"[ {status} = 0 ] || echo 'flux-resource: ERROR: no broker' >&2\n"
            f"cat {tmp_path}/said; exit {status}\n"
        )
        program.chmod(0o755)
        return {"FLUX_URI": "local:///x", "PATH": f"{tmp_path}:/usr/bin:/bin"}

    return write


def resources(groups, *nodelist):
    """A resource set as `flux resource R` prints it."""
    lite = [{"rank": ranks, "children": {"core": cores}} for ranks, cores in groups]
    execution = {"R_lite": lite, "starttime": 0.0, "nodelist": list(nodelist)}
    return json.dumps({"version": 1, "execution": execution})


@pytest.mark.parametrize(
    ("environ", "hosts"),
    [
        ({NODES: "a"}, [Host("a")]),
        ({NODES: "a[1-2]", TASKS: "4(x2)", "SLURM_NTASKS": "8"}, [Host("a1", 4), Host("a2", 4)]),
        (
            {NODES: "a[08-09],b", TASKS: "2(x2),1", "SLURM_NTASKS": "5"},
            [Host("a08", 2), Host("a09", 2), Host("b", 1)],
        ),
        ({NODES: "a,b", TASKS: "3,0", "SLURM_NTASKS": "3"}, [Host("a", 3)]),
        (
            {NODES: "a,b", TASKS: "2(x2)", "SLURM_NTASKS_PER_NODE": "2"},
            [Host("a", 2), Host("b", 2)],
        ),
        # The job says no number of tasks: the counts are processors.
        ({NODES: "a,b", TASKS: "64(x2)"}, [Host("a", 64), Host("b", 64)]),
        # A shell of `srun --mpi=none -N1 --pty bash` in a larger job.
        (
            {NODES: "a,b", TASKS: "1", "SLURM_STEP_ID": "0"},
            [Host("a"), Host("b")],
        ),
    ],
)
def test_slurm(environ, hosts):
    found = detect({**environ, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert found.scheduler == "slurm"
    assert found.hosts == tuple(hosts)
    assert NODES in found.origin
    assert found.is_for_ranks == any(name.startswith("SLURM_NTASKS") for name in environ)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({NODES: "a["}, r"^SLURM_JOB_NODELIST 'a\[', column 1: "),
        ({NODES: "a,-b"}, r"^SLURM_JOB_NODELIST 'a,-b', column 3: "),
        ({NODES: "a,b", TASKS: "4"}, "each of the 2 hosts of SLURM_JOB_NODELIST, got '4'"),
        ({NODES: "a", TASKS: "4(x2)"}, "each of the 1 hosts"),
        ({NODES: "a", TASKS: "4(x"}, r"SLURM_TASKS_PER_NODE must be as in 4\(x2\),1, got '4\(x'"),
        ({NODES: "a", TASKS: "1(x999999)"}, "SLURM_TASKS_PER_NODE must be"),
        ({NODES: "a", TASKS: "0", "SLURM_NTASKS": "0"}, "must have a count above 0, got '0'"),
        ({"PBS_NODEFILE": "/none"}, "PBS_NODEFILE must name the file of the hosts, got .*'/none'"),
        ({"PBS_NODEFILE": "/"}, "PBS_NODEFILE must name the file"),
        ({"PBS_NODEFILE": "/dev/null"}, "PBS_NODEFILE must name a host, got none"),
        ({"LSB_MCPU_HOSTS": "a 4 b"}, "LSB_MCPU_HOSTS must be as in 'a 4 b 4', got 'a 4 b'"),
        ({"LSB_MCPU_HOSTS": "a 0"}, "LSB_MCPU_HOSTS must be"),
        ({"LSB_MCPU_HOSTS": "a ²"}, "LSB_MCPU_HOSTS must be"),
        ({"LSB_MCPU_HOSTS": "-oX 4"}, "^LSB_MCPU_HOSTS '-oX', column 1: a host must be"),
        ({"LSB_HOSTS": "a a:4"}, "LSB_HOSTS must have names of hosts, got 'a:4'"),
        ({"LSB_DJOB_HOSTFILE": "/none"}, "LSB_DJOB_HOSTFILE must name the file"),
    ],
)
def test_mistakes(environ, message):
    with pytest.raises(LaunchError, match=message):
        detect(environ)


def test_pbs(nodefile):
    path = nodefile("a\nb.x.org\na\n\nb.x.org\r\na\n")
    expected = Allocation("pbs", (Host("a", 3), Host("b.x.org", 2)), "PBS_NODEFILE")
    assert detect({"PBS_NODEFILE": path}) == expected
    with pytest.raises(LaunchError, match="PBS_NODEFILE 'a b', column 1"):
        detect({"PBS_NODEFILE": nodefile("a b\n")})


def test_lsf(nodefile):
    listed = {
        "LSB_MCPU_HOSTS": "a 1 b 4 c 4",
        "LSB_DJOB_HOSTFILE": nodefile("x\nb\nb\n"),
        "LSB_HOSTS": "a y",
    }
    expected = Allocation("lsf", (Host("a"), Host("b", 4), Host("c", 4)), "LSB_MCPU_HOSTS")
    assert detect(listed) == expected
    # The launch node, which jsrun starts no rank on.
    found = detect({**listed, "CSM_ALLOCATION_ID": "7"})
    assert found == replace(expected, hosts=expected.hosts[1:], is_for_ranks=False)
    del listed["LSB_MCPU_HOSTS"]
    assert detect(listed) == Allocation("lsf", (Host("x"), Host("b", 2)), "LSB_DJOB_HOSTFILE")
    del listed["LSB_DJOB_HOSTFILE"]
    assert detect(listed) == Allocation("lsf", (Host("a"), Host("y")), "LSB_HOSTS")


@pytest.mark.parametrize(
    ("said", "hosts"),
    [
        (resources([("0-1", "0-3"), ("2", "0,2-3")], "a[1-3]"), [("a1", 4), ("a2", 4), ("a3", 3)]),
        (resources([("0", "0"), ("1", "0-1")], "a", "b"), [("a", 1), ("b", 2)]),
        (resources([("0-3", "0-1")], "a,a,a,a"), [("a", 8)]),  # several brokers on a host
    ],
)
def test_flux(flux, said, hosts):
    found = detect({**flux(said), "LSB_HOSTS": "the job that flux runs in"})
    assert found.hosts == tuple(Host(*each) for each in hosts)
    assert (found.scheduler, found.origin, found.is_for_ranks) == ("flux", "FLUX_URI", False)


@pytest.mark.parametrize(
    ("said", "status", "part"),
    [
        ("", 1, "got 'flux-resource: ERROR: no broker'; else unset it"),
        ("", 0, "got b''"),
        ("[]", 0, r"got b'\[\]'"),
        ('{"execution": null}', 0, "got b'{"),
        (resources([("0-1", "0-3")], "a"), 0, "got b'{"),
        (resources([("0", "")], "a"), 0, "got b'{"),
        (resources([("0", "0")], "-a"), 0, "host '-a', column 1"),
    ],
)
def test_flux_that_does_not_answer(flux, said, status, part):
    with pytest.raises(LaunchError, match=part):
        detect(flux(said, status))


def test_flux_hangs(tmp_path, monkeypatch):
    (tmp_path / "flux").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "flux").chmod(0o755)
    monkeypatch.setattr(allocation, "FLUX_SECONDS", 0.1)
    with pytest.raises(LaunchError, match="FLUX_URI must name a Flux instance that answers"):
        detect({"FLUX_URI": "x", "PATH": f"{tmp_path}:{os.defpath}"})


def test_no_allocation(tmp_path):
    assert detect({}) is None
    assert detect({NODES: "", "PBS_NODEFILE": "", "LSB_HOSTS": "", "FLUX_URI": ""}) is None
    assert detect({"FLUX_URI": "x", "PATH": str(tmp_path)}) is None  # a container without `flux`


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        ({}, None),
        ({"PMI_RANK": "0"}, "PMI_RANK"),
        ({"OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"}, "OMPI_COMM_WORLD_RANK"),
        ({"JSM_NAMESPACE_RANK": "1"}, "JSM_NAMESPACE_RANK"),
        # The shells of sbatch and of salloc.
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}, None),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, None),
        # `srun --mpi=none -n 2`
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
            "SLURM_STEP_NUM_TASKS",
        ),
        ({"PMI_SIZE": "2", "RANK": "0", "WORLD_SIZE": "2"}, None),
    ],
)
def test_inside_step(environ, variable):
    assert inside_step(environ) == variable


VARIABLES = (NODES, TASKS, "SLURM_NTASKS", "SLURM_STEP_ID", "PBS_NODEFILE", "LSB_MCPU_HOSTS")
VARIABLES += ("LSB_DJOB_HOSTFILE", "LSB_HOSTS", "CSM_ALLOCATION_ID")
WORDS = st.text(st.sampled_from(string.ascii_letters + "0123456789,()[]x- .:/\n"), max_size=12)


@given(
    st.dictionaries(
        st.sampled_from(VARIABLES),
        st.one_of(WORDS, st.text(), st.sampled_from(["a 1 b 2", "a[1-3]", "2(x2),1"])),
    )
)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_variables(environ):
    found, error = None, ""
    try:
        found = detect(environ)
    except LaunchError as raised:
        error = str(raised)
    assert not error or any(name in error for name in environ)
    assert found is None or (found.hosts and all(host.slots >= 1 for host in found.hosts))


def test_processors_are_not_taken_for_ranks():
    """One rank a processor are too many for most, and for one a node mpirun must be told so."""
    granted = detect({NODES: "a,b", TASKS: "64(x2)"})
    with pytest.raises(LaunchError, match="-np must be given, got nothing; SLURM_JOB_NODELIST and"):
        planner.count_ranks(None, (), (), granted, [])
    warnings = []
    assert planner.count_ranks(129, (), (), granted, warnings) == 129
    assert warnings == [f"129 ranks on 128 slots, which {NODES} and {TASKS} says"]
    asked = replace(granted, is_for_ranks=True)
    assert planner.count_ranks(None, (), (), asked, []) == 128
