"""The command line of `mpicomp-launch`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from mpicomp_launch import command, dialects, job, mpis
from mpicomp_launch.errors import LaunchError
from mpicomp_launch.plan import Plan, available_cores, rank_exports, terminal_columns

USAGE_STATUS = 2
INTERRUPTED = 130

# Options that only become a variable which the library reads: (option, variable, how to parse it).
EXPORTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (
        "--compression",
        "MPICOMP_COMPRESSION",
        {"metavar": "SPEC", "help": "as in powersgd:rank=4; for optimizers that are given none"},
    ),
    ("--trace", "MPICOMP_TRACE", {"metavar": "FILE", "help": "write a time line of all ranks"}),
    (
        "--stats",
        "MPICOMP_STATS",
        {"action": "store_const", "const": "1", "help": "print bytes and times at the end"},
    ),
)


class Parser(argparse.ArgumentParser):
    """argparse, with errors in our words and nothing else."""

    def error(self, message: str) -> NoReturn:
        """Raises what argparse would print and exit for."""
        raise LaunchError(f"{message}; see `mpicomp-launch --help`")


def make_parser() -> Parser:
    """All options of the launcher."""
    parser = Parser(
        prog="mpicomp-launch",
        usage="%(prog)s -np N [options] COMMAND [ARGS...]",
        description="Run COMMAND on N ranks, under the MPI which its Python loads.",
        epilog="What follows COMMAND belongs to it and is passed on as it is.",
        allow_abbrev=False,
    )
    parser.add_argument("-np", "-n", metavar="N", help="number of ranks, on this host")
    parser.add_argument("--mpi", choices=list(mpis.FAMILIES), help="the MPI to insist on")
    parser.add_argument("--dry-run", action="store_true", help="print the command, do not run it")
    for option, variable, settings in EXPORTS:
        parser.add_argument(option, dest=variable, **settings)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def make_plan(options: argparse.Namespace) -> Plan:
    """The job which the options describe.

    Raises:
        LaunchError: An option, the command or the installed MPI will not do.
    """
    environ = dict(os.environ)
    np = parse_np(options.np)
    words = options.command[options.command[:1] == ["--"] :]
    if not words:
        raise LaunchError(
            "COMMAND must be given after the options, got nothing; "
            "as in `mpicomp-launch -np 2 python train.py`"
        )
    user_command = command.parse(words, environ)
    given = {variable: getattr(options, variable) for _, variable, _ in EXPORTS}
    return Plan(
        np=np,
        command=user_command,
        mpi=mpis.find(user_command, options.mpi, environ),
        environ=environ,
        exports={
            **rank_exports(np, environ, available_cores(), terminal_columns()),
            **{name: value for name, value in given.items() if value is not None},
        },
        cwd=os.getcwd(),
        is_root=hasattr(os, "geteuid") and os.geteuid() == 0,
    )


def parse_np(text: str | None) -> int:
    """The number of ranks."""
    if text is None:
        raise LaunchError("-np must be given, got nothing; as in `-np 4` for four ranks")
    if not re.fullmatch("0*[1-9][0-9]{0,5}", text):
        raise LaunchError(
            f"-np must be a whole number, 1 or more, got {text!r}; as in `-np 4` for four ranks"
        )
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: the job's, or 2 for a mistake."""
    try:
        options = make_parser().parse_args(argv)
        plan = make_plan(options)
        dialect = dialects.for_plan(plan)
        if options.dry_run:
            print(dialect.command(plan))
            return 0
        return job.run(plan, dialect)
    except LaunchError as error:
        print(f"mpicomp-launch: {error}", file=sys.stderr)
        return USAGE_STATUS
    except KeyboardInterrupt:
        return INTERRUPTED
