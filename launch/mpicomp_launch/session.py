"""One job from start to end as the user sees it: output, and at the end the reason of a failure."""

from __future__ import annotations

import sys

from mpicomp_launch.dialects import Command, Dialect
from mpicomp_launch.job import NOT_STARTED, TIMED_OUT, Job, Limits
from mpicomp_launch.options import Options
from mpicomp_launch.output import Printer
from mpicomp_launch.plan import Plan


def run(plan: Plan, dialect: Dialect, command: Command, options: Options) -> int:
    """Runs a job with its output on our own streams, and returns the exit status."""
    printer = Printer(
        sys.stdout.buffer,
        sys.stderr.buffer,
        tag=options.tag,
        num_ranks=plan.np,
        timestamps=options.timestamps,
        directory=options.output_dir,
    )
    limits = Limits(options.start_timeout, options.timeout, options.grace)
    job = Job(command, dialect, plan, limits, printer)
    status = job.run()
    printer.close()
    explain(job, status, options, printer)
    return status


def explain(job: Job, status: int, options: Options, printer: Printer) -> None:
    """Says last, and once, why a job has failed."""
    if job.failures and not job.stopped_by:
        first = job.failures[0]
        printer.say(f"rank {first.rank} on {first.host} {first}{others(job, options)}")
        if first.text:
            printer.plain(first.text.rstrip("\n").encode(errors="surrogateescape"))
    elif status == NOT_STARTED:
        for line in job.diagnosis:
            printer.say(line)
    elif status == TIMED_OUT and job.is_late:
        printer.say(f"the job was ended after {options.timeout:g} s (--timeout)")
    elif status and not job.stopped_by:
        printer.say(f"the MPI's launcher ended the job with status {status}, as after MPI_Abort")


def others(job: Job, options: Options) -> str:
    """How many ranks failed after the first one."""
    count = len(job.failures) - 1
    if not count:
        return ""
    ranks = "1 other rank" if count == 1 else f"{count} other ranks"
    where = f"; see {options.output_dir}" if options.output_dir else ""
    return f", and {ranks} after it{where}"
