"""From options and surroundings to a plan: hosts, counts, allocations, networks."""

import json
import sys

import pytest

from mpicomp_launch import mpis, network, planner, resolve
from mpicomp_launch.errors import LaunchError
from mpicomp_launch.hosts import Placement
from mpicomp_launch.mpis import Mpi
from mpicomp_launch.network import Interface
from mpicomp_launch.resolve import Value, convert

SLURM = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS": "4"}
LSF = {"LSB_MCPU_HOSTS": "n1 3 n2 1", "LSB_JOBID": "1"}


@pytest.fixture
def plan(monkeypatch):
    """A plan of a host called `here`; options by name, from the command line."""
    found = {"mpi": Mpi("mpich", "5.0.2", "/v/bin/mpiexec")}
    monkeypatch.setattr(mpis, "find", lambda *_: found["mpi"])
    monkeypatch.setattr(network, "is_here", lambda name: name in ("here", "localhost"))
    eth0 = Interface("eth0", "10.0.0.1", "10.0.0.0/24")
    monkeypatch.setattr(network, "shared_network", lambda hosts: eth0 if list(hosts) else None)
    monkeypatch.setattr(network, "has_rdma", lambda: found.get("rdma", False))

    def make(environ=(), origin="command line", mpi=None, rdma=False, **options):
        found["mpi"] = mpi or found["mpi"]
        found["rdma"] = rdma
        given = {name: convert(name, value, origin) for name, value in options.items()}
        words = [sys.executable, "-c", "0"]
        return planner.make_plan(resolve.resolve(given), words, {"PATH": "/bin", **dict(environ)})

    return make


def test_hosts_and_counts(plan):
    made, warnings = plan(hosts="a:2,b:1")
    assert (made.np, warnings) == (3, [])
    assert made.placement == (Placement("a", 2), Placement("b", 1))
    assert made.network.name == "eth0"
    assert plan(hosts="a:2,b:1", np=1)[0].placement == (Placement("a", 1),)
    assert plan(np=3)[0].placement == ()
    with pytest.raises(LaunchError, match="-np or --hosts must be given, got nothing"):
        plan()
    with pytest.raises(LaunchError, match="hosts must be given once"):
        plan(hosts="a", hostfile="b")


def test_this_host_alone_needs_no_ssh(plan):
    made, _ = plan(hosts="here:2,localhost:1")
    assert (made.np, made.placement, made.is_remote) == (3, (), False)


def test_sections_with_slots_are_hosts(plan):
    sections = {"b[1-2]": {"slots": 2, "env": ["OWN=b", "HOME"]}, "c": {"env": ["OWN=c"]}}
    made, _ = plan({"HOME": "/h"}, host=sections)
    assert made.placement == (Placement("b1", 2), Placement("b2", 2))
    values = {"OWN": "b", "HOME": "/h"}
    assert json.loads(made.exports["MPICOMP_RANK_ENV"]) == [[0, 1, values], [2, 3, values]]
    made, _ = plan(host=sections, hosts="c,b1", environ={"HOME": "/h"})
    assert json.loads(made.exports["MPICOMP_RANK_ENV"]) == [[0, 0, {"OWN": "c"}], [1, 1, values]]


def test_open_mpi_4_begins_on_this_host(plan):
    made, _ = plan(hosts="a,here:2", mpi=Mpi("openmpi", "4.1.4", "/usr/bin/mpirun"))
    assert [each.host for each in made.placement] == ["here", "a"]
    made, _ = plan(hosts="a,here:2", mpi=Mpi("openmpi", "5.0.11", "/v/bin/mpirun"))
    assert [each.host for each in made.placement] == ["a", "here"]


def test_an_allocation_says_hosts_and_counts(plan):
    made, warnings = plan(SLURM)
    assert (made.np, made.placement, made.spans_hosts, warnings) == (4, (), True, [])
    with pytest.raises(LaunchError, match=r"SLURM_JOB_NODELIST.* leave out --hosts"):
        plan(SLURM, hosts="a")
    made, warnings = plan(SLURM, hosts="a", origin="cluster.toml:1:1")
    assert made.placement == ()
    assert "hosts of cluster.toml:1:1 are not used" in warnings[0]
    _, warnings = plan(SLURM, np=9)
    assert "9 ranks on 4 slots" in warnings[0]


def test_an_allocation_that_the_mpi_does_not_know_is_passed(plan):
    made, _ = plan(LSF, mpi=Mpi("openmpi", "5.0.11", "/v/bin/mpirun"))
    assert made.placement == (Placement("n1", 3), Placement("n2", 1))
    assert plan(LSF, mpi=Mpi("mpich", "5.0.2", "/v/bin/mpiexec"))[0].placement == ()


def test_ranks_start_no_jobs(plan):
    with pytest.raises(LaunchError, match="got PMI_RANK in the environment"):
        plan({"PMI_RANK": "0"}, np=2)


def test_network(plan):
    assert plan(np=1)[0].tcp
    assert not plan(np=1, rdma=True)[0].tcp
    assert plan(np=1, rdma=True, fabric="tcp")[0].tcp
    assert not plan(np=1, fabric="mpi")[0].tcp


def test_variables(plan, tmp_path):
    environ = {
        "SECRET": "x",
        "MPICOMP_LAUNCH_NP": "7",
        "MPICOMP_STATS": "1",
        "VIRTUAL_ENV": "/v",
        "OTHER": "y",
    }
    made, _ = plan(
        environ,
        hosts="a,b",
        env=["SECRET", "GIVEN=1 = 2"],
        fusion_mb=25.1234567,
        stats=False,
        cwd=str(tmp_path),
        gpu_bind="local",
    )
    assert "MPICOMP_LAUNCH_NP" not in made.environ
    assert made.exports == {
        "MPICOMP_EXPECT_SIZE": "2",
        "MPICOMP_THREADS": "auto",
        "MPICOMP_GRACE": "10",
        "MPICOMP_CHDIR": str(tmp_path),
        "MPICOMP_GPU_BIND": "local",
        "MPICOMP_FUSION_MB": "25.1234567",
        "MPICOMP_STATS": "0",
        "GIVEN": "1 = 2",
    }
    assert {"PATH", "SECRET", "GIVEN", "VIRTUAL_ENV", "MPICOMP_STATS"} <= set(made.forward)
    assert "OTHER" not in made.forward
    with pytest.raises(LaunchError, match="--env NONE must name a variable that is set"):
        plan(np=1, env=["NONE"])


def test_a_stronger_name_undoes_a_weaker_value(plan):
    sources = [
        {"env": Value((("A", None),), "command line"), "np": Value(1, "command line")},
        {"env": Value((("A", "weak"),), "f:1:1")},
    ]
    words = [sys.executable, "-c", "0"]
    made, _ = planner.make_plan(resolve.resolve(*sources), words, {"A": "present"})
    assert "A" not in made.exports
    assert made.environ["A"] == "present"
