"""Shows findings: a table for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from mpicomp_launch.check.findings import FAILURE, OK, Finding

STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red"}


def show(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Prints them, and what to do about each that is not well."""
    runs = not any(each.state == FAILURE for each in findings)
    if as_json:
        print(json.dumps({"runs": runs, "findings": [asdict(each) for each in findings]}, indent=1))
        return
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("host", "what", "", "found", box=box.SIMPLE_HEAD, pad_edge=False)
    for each in findings:
        state = f"[{STYLES[each.state]}]{each.state}[/]"
        table.add_row(escape(each.where), each.what, state, escape(each.value))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    for each in findings:
        if each.state != OK:
            text = f"{each.where}, {each.what}: {each.value}. {each.advice}".rstrip(" .")
            console.print(f"[{STYLES[each.state]}]{each.state}[/]: {escape(text)}")
    console.print("The job can run." if runs else "The job cannot run.")
