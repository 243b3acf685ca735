"""Stands in for a scheduler's launcher: checks its options, then starts the ranks as it would.

`stubs.py KIND WORDS...`: the options below are those of the real programs that a launcher of jobs
could use, as their manuals have them; any other is an error, as it is there.
"""

import argparse
import os
import subprocess
import sys

# Options with a value, options without, and the variables of rank, size, local rank, local size.
KINDS = {
    "srun": (
        "-n --ntasks -N --nodes --ntasks-per-node -w --nodelist --mpi --cpu-bind --export -D "
        "--chdir -c --cpus-per-task -t --time -o --output -e --error -i --input --gpus-per-task",
        "-l --label -u --unbuffered -v --verbose -O --overcommit --overlap -Q --quiet",
        "SLURM_PROCID SLURM_NTASKS SLURM_LOCALID -",
    ),
    "flux": (
        "-n --ntasks -N --nodes -c --cores-per-task -g --gpus-per-task -o --setopt --env --cwd "
        "-t --time-limit --output --error --input --label-io",
        "-v --verbose -l -u --unbuffered",
        "FLUX_TASK_RANK FLUX_JOB_SIZE FLUX_TASK_LOCAL_ID -",
    ),
    "jsrun": (
        "-n --nrs -a --tasks_per_rs -c --cpu_per_rs -g --gpu_per_rs -r --rs_per_host -b --bind "
        "-d --launch_distribution -E --env -h --chdir -e --stdio_mode",
        "-v",
        "JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE JSM_NAMESPACE_LOCAL_RANK JSM_NAMESPACE_LOCAL_SIZE",
    ),
    "pals": (
        "-n --np --ppn --hosts --hostfile -d --depth --cpu-bind --env --envlist --wdir --timeout",
        "--envall --envnone --label -l --line-buffer -v --verbose",
        "PALS_RANKID PALS_SIZE PALS_LOCAL_RANKID PALS_LOCAL_SIZE",
    ),
    "mvapich": (
        "-n -np -hosts -f -ppn -env -genv -envlist -genvlist -wdir -launcher -launcher-exec -iface "
        "-bind-to -map-by",
        "-l -v -genvall -genvnone",
        "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS",
    ),
}
VERSIONS = {
    "srun": "slurm 23.02.6",
    "flux": "commands:    \t\t0.58.0\nlibflux-core:\t\t0.58.0",
    "jsrun": "jsrun version 10.4.0",
    "pals": "PALS version 1.3.3 revision 0",
    "mvapich": "HYDRA build details:\n    Version:                                 4.1",
}
COUNTS = ("ntasks", "nrs", "np", "n")


def main():
    """Answers `--version`, or runs all ranks and returns the largest of their statuses."""
    kind, words = sys.argv[1], sys.argv[2:]
    if words == ["--version"]:
        print(VERSIONS[kind])
        return 0
    if kind == "flux":
        assert words.pop(0) == "run"
    with_value, without, variables = KINDS[kind]
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for flag in with_value.split():
        parser.add_argument(flag, dest=flag.lstrip("-"))
    for flag in without.split():
        parser.add_argument(flag, dest=flag.lstrip("-"), action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = vars(parser.parse_args(words))
    size = next(given[name] for name in COUNTS if given.get(name))
    names = variables.split()
    ranks = []
    for rank in map(str, range(int(size))):
        told = dict(zip(names, (rank, size, rank, size), strict=True))
        environ = {**os.environ, **{k: v for k, v in told.items() if k != "-"}}
        cwd = given.get("chdir") or given.get("cwd") or given.get("wdir")
        ranks.append(subprocess.Popen(given["command"], env=environ, cwd=cwd))
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
