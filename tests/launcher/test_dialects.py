"""What each launcher is told, word for word. No MPI is needed here."""

import shlex
import signal
from pathlib import Path

import pytest

from mpicomp_launch import dialects
from mpicomp_launch.agent import Agent
from mpicomp_launch.allocation import Allocation
from mpicomp_launch.command import UserCommand
from mpicomp_launch.errors import LaunchError
from mpicomp_launch.hosts import Host, Placement
from mpicomp_launch.mpis import Mpi
from mpicomp_launch.network import Interface
from mpicomp_launch.plan import Plan

MPIS = {
    "mpich": Mpi("mpich", "5.0.2", "/v/bin/mpiexec"),
    "intel": Mpi("intel", "2021.18.1", "/v/bin/mpiexec.hydra"),
    "mvapich": Mpi("mvapich", "4.0", "/v/bin/mpiexec"),
    "openmpi5": Mpi("openmpi", "5.0.11", "/v/bin/mpirun"),
    "openmpi4": Mpi("openmpi", "4.1.4", "/usr/bin/mpirun.openmpi"),
    "spectrum": Mpi("spectrum", "10.3.1", "/opt/bin/mpirun"),
    "srun": Mpi("srun", "22.05.8", "/usr/bin/srun"),
    "flux": Mpi("flux", "0.58", "/usr/bin/flux"),
    "jsrun": Mpi("jsrun", "10.3", "/opt/bin/jsrun"),
    "pals": Mpi("pals", "1.2", "/opt/bin/mpiexec"),
}
RANK = "/v/bin/python /l/worker.py train.py 'a b' --mca"
LOCAL = {
    "mpich": "-n 4",
    "intel": "-n 4",
    "mvapich": "-n 4",
    "openmpi5": "-n 4 --map-by :OVERSUBSCRIBE --bind-to none --mca pml ob1 --mca btl self,sm,tcp "
    "--mca osc ^ucx",
    "openmpi4": "-n 4 --oversubscribe --bind-to none --mca pml ob1 --mca btl self,vader,tcp "
    "--mca osc ^ucx",
    "spectrum": "-n 4 --oversubscribe --bind-to none --mca pml ob1 --mca btl self,vader,tcp "
    "--mca osc ^ucx",
    "srun": "--ntasks=4 --export=ALL --chdir=/data --cpu-bind=none",
    "flux": "run --ntasks=4 --cwd=/data -o cpu-affinity=off",
    "jsrun": "--nrs 4 --tasks_per_rs 1 --chdir /data --bind none",
    "pals": "-n 4 --envall --wdir /data --cpu-bind none",
}
HOSTS = (Placement("a", 3), Placement("::1", 1))
EVERYTHING = {
    "placement": HOSTS,
    "forward": ("PATH", "ODD"),
    "agent": Agent(("/opt/agent", "-v"), 2222, "/k/key", ("-o", "Compression=yes")),
    "interface": "eth1",
    "network": Interface("eth0", "10.0.0.1", "10.0.0.0/24"),
    "tcp": True,
    "bind": "socket",
    "verbose": True,
    "mpi_args": ("--last", "x y"),
}
AGENT_WORDS = "-v -p 2222 -i /k/key -o Compression=yes"
REMOTE = {
    "mpich": "-n 4 -hosts a:3,[::1]:1 -launcher ssh -launcher-exec /opt/agent "
    "-bind-to socket -iface eth1 -v --last 'x y'",
    "openmpi5": "-n 4 --host a:3,[::1]:1 --prtemca plm_ssh_agent /opt/agent "
    f"--prtemca plm_ssh_args '{AGENT_WORDS}' -x PATH -x ODD --bind-to package --mca pml ob1 "
    "--mca btl self,sm,tcp --mca osc ^ucx --mca btl_tcp_links 4 --mca mpi_yield_when_idle 1 "
    "--mca btl_tcp_if_include eth1 --prtemca prte_if_include eth1 --display map,bind "
    "--prtemca plm_base_verbose 5 --last 'x y'",
    "openmpi4": "-n 4 --host a:3,[::1]:1 --mca plm_rsh_agent /opt/agent "
    f"--mca plm_rsh_args '{AGENT_WORDS}' -x PATH -x ODD --bind-to socket --mca pml ob1 "
    "--mca btl self,vader,tcp --mca osc ^ucx --mca btl_tcp_links 4 --mca mpi_yield_when_idle 1 "
    "--mca btl_tcp_if_include eth1 --mca oob_tcp_if_include eth1 --display-map --report-bindings "
    "--mca plm_base_verbose 5 --last 'x y'",
}


@pytest.fixture(autouse=True)
def worker_elsewhere(monkeypatch):
    """The worker as if the launcher lay in /l."""
    monkeypatch.setattr("mpicomp_launch.command.__file__", "/l/command.py")


def make(name, **settings):
    """A plan of four ranks."""
    return Plan(
        **{
            "np": 4,
            "command": UserCommand("/v/bin/python", (), ("train.py", "a b", "--mca"), True),
            "mpi": MPIS[name],
            "environ": {"PATH": "/usr/bin"},
            "exports": {"MPICOMP_EXPECT_SIZE": "4"},
            "cwd": "/data",
            **settings,
        }
    )


def command(name, **settings):
    plan = make(name, **settings)
    return dialects.for_plan(plan).command(plan)


@pytest.mark.parametrize("name", MPIS)
def test_on_this_host(name):
    told = command(name)
    program = MPIS[name].launcher
    assert told.argv == tuple(shlex.split(f"{program} {LOCAL[name]} {RANK}"))
    assert told.cwd == "/data"


@pytest.mark.parametrize("name", REMOTE)
def test_everything_on_several_hosts(name):
    told = command(name, **EVERYTHING)
    assert told.argv == tuple(shlex.split(f"{MPIS[name].launcher} {REMOTE[name]} {RANK}"))


def test_intel_gets_a_command_line_for_each_host():
    told = command("intel", **EVERYTHING)
    options = "-bootstrap ssh -bootstrap-exec /opt/agent -iface eth1 -v -genv I_MPI_DEBUG 5"
    expected = f"/v/bin/mpiexec.hydra {options} --last 'x y' -n 3 -host a {RANK} : -n 1 -host ::1"
    assert told.argv == tuple(shlex.split(f"{expected} {RANK}"))


@pytest.mark.parametrize(
    ("name", "settings", "exports"),
    [
        ("mpich", {}, {}),
        ("intel", {}, {"PATH": "/v/bin:/usr/bin", "I_MPI_PIN": "0"}),
        ("intel", {"environ": {"PATH": "/x", "I_MPI_PIN": "1"}}, {"PATH": "/v/bin:/x"}),
        (
            "intel",
            {"bind": "core"},
            {"PATH": "/v/bin:/usr/bin", "I_MPI_PIN": "1", "I_MPI_PIN_DOMAIN": "core"},
        ),
        ("mvapich", {}, {"MV2_ENABLE_AFFINITY": "0"}),
        (
            "mvapich",
            {"bind": "numa"},
            {"MV2_ENABLE_AFFINITY": "1", "MV2_CPU_BINDING_LEVEL": "numanode"},
        ),
        ("openmpi5", {}, {}),
        (
            "openmpi4",
            {"is_root": True},
            {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        ),
        ("srun", {"interface": "10.0.0.0/24"}, {"OMPI_MCA_btl_tcp_if_include": "10.0.0.0/24"}),
        ("srun", {"environ": {"SLURM_LABELIO": "1", "SLURM_JOB_ID": "7"}}, {"SLURM_LABELIO": "0"}),
        (
            "mpich",
            EVERYTHING,
            {
                "FI_PROVIDER": "tcp",
                "MPIR_CVAR_CH4_NETMOD": "ofi",
                "FI_TCP_IFACE": "eth1",
                "UCX_NET_DEVICES": "eth1",
                "HYDRA_LAUNCHER_EXTRA_ARGS": AGENT_WORDS,
            },
        ),
        (
            "intel",
            EVERYTHING,
            {
                "PATH": "/v/bin:/usr/bin",
                "I_MPI_PIN": "1",
                "I_MPI_PIN_DOMAIN": "socket",
                "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": AGENT_WORDS,
                "FI_PROVIDER": "tcp",
                "FI_TCP_IFACE": "eth1",
            },
        ),
    ],
)
def test_variables(name, settings, exports):
    assert command(name, **settings).exports == {**exports, "MPICOMP_EXPECT_SIZE": "4"}


@pytest.mark.parametrize("name", MPIS)
def test_values_are_never_words(name):
    settings = {"exports": {"SECRET": "hunter2"}, "forward": ("SECRET",)}
    for more in ({}, {"placement": HOSTS}):
        try:
            told = command(name, **settings, **more)
        except LaunchError:
            continue
        assert "hunter2" not in " ".join(told.argv)
        assert told.exports["SECRET"] == "hunter2"


@pytest.mark.parametrize("name", ["openmpi4", "openmpi5"])
def test_open_mpi_is_kept_from_dead_ends(name):
    argv = command(name, placement=HOSTS, network=Interface("eth0", "10.0.0.1", "10.0.0.0/24")).argv
    assert argv[argv.index("btl_tcp_if_include") + 1] == "10.0.0.0/24"


def test_old_mpich_is_kept_from_dead_ends():
    eth0 = Interface("eth0", "10.0.0.1", "10.0.0.0/24")
    for version, devices in (("4.0.2", "eth0"), ("5.0.2", None)):
        mpi = Mpi("mpich", version, "/usr/bin/mpiexec.mpich")
        told = command("mpich", mpi=mpi, placement=HOSTS, network=eth0, tcp=True)
        assert told.exports.get("UCX_NET_DEVICES") == devices


def test_what_the_user_has_set_stays():
    argv = command("openmpi5", environ={"OMPI_MCA_pml": "ucx"}).argv
    assert "pml" not in argv
    assert "btl" in argv


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("srun", {"placement": HOSTS}, "--hosts cannot be said to srun; let the scheduler choose"),
        ("flux", {"bind": "numa"}, "--bind numa cannot be said to flux run; it knows none, core"),
        ("jsrun", {"bind": "socket"}, "cannot be said to jsrun"),
        (
            "mpich",
            {"placement": HOSTS, "agent": Agent(("/opt/my agent",))},
            "a blank or quote in '/opt/my agent' cannot be said to MPICH's mpiexec; use a script",
        ),
        (
            "openmpi5",
            {"placement": HOSTS, "agent": Agent(options=("-o", "ProxyCommand=a b"))},
            "a blank or quote in 'ProxyCommand=a b' cannot be said to Open MPI 5",
        ),
        (
            "mpich",
            {"placement": HOSTS, "interface": "10.0.0.0/24"},
            "--interface 10.0.0.0/24 cannot be said to MPICH's mpiexec; give the interface's name",
        ),
    ],
)
def test_what_cannot_be_said_is_an_error(name, settings, text):
    with pytest.raises(LaunchError) as caught:
        command(name, **settings)
    assert text in str(caught.value)


@pytest.mark.parametrize("name", ["mpich", "intel", "openmpi4", "openmpi5"])
def test_in_an_allocation_hosts_are_not_passed(name):
    granted = Allocation("slurm", (Host("a", 2), Host("b", 2)), "SLURM_JOB_NODELIST")
    argv = command(name, allocation=granted, forward=("PATH",)).argv
    assert not {"-hosts", "--host", "-host", "-launcher", "-bootstrap"} & set(argv)
    assert ("-x" in argv) == name.startswith("openmpi")


def test_pmi_of_schedulers():
    assert command("srun", pmi="pmix").options[1] == ("--mpi=pmix",)
    assert command("flux", pmi="pmix").options[2] == ("-o", "pmi=pmix")
    granted = Allocation("lsf", (Host("a", 2), Host("b", 2)), "LSB_MCPU_HOSTS")
    assert ("--rs_per_host", "2") in command("jsrun", allocation=granted).options


@pytest.mark.parametrize(
    ("name", "signum", "sent"),
    [
        ("mpich", signal.SIGINT, signal.SIGINT),
        ("mpich", signal.SIGHUP, signal.SIGTERM),
        ("openmpi5", signal.SIGINT, signal.SIGURG),
        ("openmpi4", signal.SIGTERM, signal.SIGUSR2),
        ("openmpi5", signal.SIGUSR1, signal.SIGUSR1),
        ("srun", signal.SIGINT, signal.SIGUSR2),
    ],
)
def test_how_signals_travel(name, signum, sent):
    assert dialects.for_plan(make(name)).carrier(signum) == sent


def test_printed_command_is_one_a_shell_reads_back(tmp_path):
    odd = ("it's", "$HOME", "", "a\nb")
    plan = make("openmpi5", is_root=True, command=UserCommand("/v/bin/python", (), odd, True))
    told = dialects.for_plan(plan).command(plan)
    printed = str(told)
    assert printed.startswith("cd /data &&\nenv \\\n    OMPI_ALLOW_RUN_AS_ROOT=1 \\\n")
    assert "\n    --bind-to none \\\n" in printed
    words = shlex.split(printed.replace("\\\n", ""))
    assert words[-1] == "</dev/null"
    assert tuple(words[-1 - len(told.argv) : -1]) == told.argv
    assert Path(told.program).name == "mpirun"
