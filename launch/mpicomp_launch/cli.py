"""`mpicomp-launch`: from the command line to what is to be done."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence

from mpicomp_launch import arguments, dialects, resolve
from mpicomp_launch.arguments import Request
from mpicomp_launch.environment import INTERNAL
from mpicomp_launch.errors import LaunchError
from mpicomp_launch.resolve import Resolved, Value

USAGE_STATUS = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: the job's, or 2 for a mistake."""
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it lasts as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # words are printed as they came
    try:
        status = act(arguments.parse(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except OSError as error:  # nobody reads what we print, or the disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"mpicomp-launch: {error}", file=sys.stderr)
        return BROKEN_PIPE
    except LaunchError as error:
        print(f"mpicomp-launch: {error}", file=sys.stderr)
        return USAGE_STATUS
    except KeyboardInterrupt:
        return INTERRUPTED


def act(request: Request) -> int:
    """Does the one thing that was asked for."""
    if request.completion:
        from mpicomp_launch import completion

        print(completion.script(request.completion), end="")
        return 0
    resolved = gather(request.given, request.config)
    if request.write_config:
        from mpicomp_launch import config_writer

        config_writer.write(request.write_config, resolved)
        return 0
    if request.write_script:
        from mpicomp_launch import scripts

        print(scripts.script(request.write_script, resolved, request.words), end="")
        return 0
    if request.check:
        from mpicomp_launch import check

        return check.run(resolved, request.words, os.environ, as_json=request.json)
    return launch(resolved, request)


def gather(given: Mapping[str, Value], config_file: str | None) -> Resolved:
    """The options from all sources."""
    environ = resolve.from_environment(os.environ, INTERNAL)
    file = config_file or os.environ.get(resolve.CONFIG_VARIABLE)
    if not file:
        return resolve.resolve(given, environ)
    from mpicomp_launch import config

    return resolve.resolve(given, environ, config.read(file))


def launch(resolved: Resolved, request: Request) -> int:
    """Runs the job, or shows the command."""
    from mpicomp_launch import planner

    plan, warnings = planner.make_plan(resolved, request.words, os.environ)
    dialect = dialects.for_plan(plan)
    command = dialect.command(plan)
    for warning in warnings:
        print(f"mpicomp-launch: {warning}", file=sys.stderr)
    if request.dry_run:
        print("\n".join(f"# {line}" for line in resolved.lines()))
        print(command)
        return 0
    from mpicomp_launch import session

    return session.run(plan, dialect, command, resolved.options)
