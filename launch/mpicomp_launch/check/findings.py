"""What a check finds: one line of the table."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARNING, FAILURE = "ok", "warning", "failure"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        where: The host.
        what: What was looked at.
        state: `OK`; `WARNING` if a job runs, but not as well as it could; `FAILURE` if none runs.
        value: What there is.
        advice: What to do about it.
    """

    where: str
    what: str
    state: str
    value: str
    advice: str = ""
