"""One job from start to end as the user sees it: output, and at the end the reason of a failure."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass

from mpicomp_launch.dialects import Command, Dialect
from mpicomp_launch.job import TIMED_OUT, Job, Limits
from mpicomp_launch.kinds import number_text
from mpicomp_launch.options import Options
from mpicomp_launch.output import Printer
from mpicomp_launch.plan import Plan
from mpicomp_launch.roster import NOT_STARTED, Failure


@dataclass(frozen=True)
class Outcome:
    """How a job has ended.

    Attributes:
        status: The exit status.
        failures: Ranks that failed, the first one first; those that were stopped have not.
        reason: Lines that say why the status is not 0.
        text: Last words of the first rank that failed.
    """

    status: int
    failures: list[Failure]
    reason: list[str]
    text: str


def run(plan: Plan, dialect: Dialect, command: Command, options: Options) -> int:
    """Runs a job, says last, and once, why it has failed, and returns the exit status."""
    printer = make_printer(plan, options)
    outcome = play(plan, dialect, command, options, printer)
    for line in outcome.reason:
        printer.say(line)
    if outcome.text:
        printer.plain(outcome.text.rstrip("\n").encode(errors="surrogateescape"))
    return outcome.status


def make_printer(plan: Plan, options: Options) -> Printer:
    """What writes the output of the ranks to our own streams."""
    return Printer(
        sys.stdout.buffer,
        sys.stderr.buffer,
        tag=options.tag,
        num_ranks=plan.np,
        timestamps=options.timestamps,
        directory=options.output_dir,
    )


def play(
    plan: Plan, dialect: Dialect, command: Command, options: Options, printer: Printer
) -> Outcome:
    """Runs a job to its end."""
    limits = Limits(options.start_timeout, options.timeout, options.grace)
    job = Job(command, dialect, plan, limits, printer)
    status = job.run()
    with contextlib.suppress(OSError):  # nobody reads it any more
        printer.close()
    text = job.roster.failures[0].text if job.roster.failures and not job.stopped_by else ""
    return Outcome(status, job.roster.failures, explain(job, status, options), text)


def explain(job: Job, status: int, options: Options) -> list[str]:
    """Why a job has failed."""
    if job.stopped_by or not status:
        return []
    if job.roster.failures:
        first = job.roster.failures[0]
        return [f"rank {first.rank} on {first.host} {first}{others(job, options)}"]
    if status == NOT_STARTED:
        return job.diagnosis
    if status == TIMED_OUT and job.is_late:
        return [f"the job was ended after {number_text(options.timeout or 0.0)} s (--timeout)"]
    early = job.roster.first_to_end
    after = f"{early} had ended with status 0, without MPI_Finalize?" if early else "MPI_Abort?"
    return [f"the MPI's launcher ended the job with status {status}; {after}"]


def others(job: Job, options: Options) -> str:
    """How many ranks failed after the first one."""
    count = len(job.roster.failures) - 1
    if not count:
        return ""
    ranks = "1 other rank" if count == 1 else f"{count} other ranks"
    where = f"; see {options.output_dir}" if options.output_dir else ""
    return f", and {ranks} after it{where}"
