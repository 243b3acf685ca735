"""Tables, JSON and pictures of what was measured; all by rank 0."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mpicomp.errors import MpicompError
from mpicomp.predict.collectives import fastest
from mpicomp.predict.network import Profile

COLOURS = {
    "data": "#bbbbbb",
    "forward": "#9ecae1",
    "backward": "#3182bd",
    "accumulate": "#c7e9c0",
    "encode": "#d62728",
    "values": "#fdae6b",
    "indices": "#e6550d",
    "decode": "#9467bd",
    "waiting": "#dddddd",
    "optimizer": "#74c476",
}


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column is text, the others are numbers."""
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        shown.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    # Never cut to a narrow terminal: a number that lacks digits is another number.
    width = Console(width=1000).measure(shown).maximum
    Console(width=max(width, len(title))).print(shown)


def check_writable(out: str | None, plot: str | None) -> None:
    """Find out before measuring that a file cannot be written, on every rank.

    Raises:
        MpicompError: there is no such directory, it must not be written to, or nothing can draw.
    """
    for path in filter(None, (out, plot)):
        if not os.access(Path(path).absolute().parent, os.W_OK) or Path(path).is_dir():
            raise MpicompError(f"bench: --out and --plot must be files to write, got {path}")
    if plot:
        pyplot()


def write_json(path: str, record: Mapping[str, Any]) -> None:
    """Write ``record`` and today's date."""
    dated = {"date": datetime.date.today().isoformat(), **record}
    Path(path).write_text(json.dumps(dated, indent=1) + "\n")


def pyplot() -> Any:
    """Matplotlib without a display; the same numbers make the same file.

    Raises:
        MpicompError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise MpicompError(
            "bench: --plot needs matplotlib; install it with `pip install 'mpicomp[plots]'`"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plots

    plots.rcParams["svg.hashsalt"] = "mpicomp"
    plots.rcParams["svg.fonttype"] = "none"
    return plots


def save(figure: Any, path: str) -> None:
    """Write a figure; its suffix says as what."""
    try:
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None, dpi=110)
    except (OSError, ValueError) as error:
        raise MpicompError(
            f"bench: --plot must be a picture that can be written, got {path}: {error}"
        ) from None


def draw_bars(
    names: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    path: str,
    *,
    label: str,
    marks: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Stacked bars, one for each name, and marks beside their ends."""
    plots = pyplot()
    figure, axes = plots.subplots(figsize=(9, 0.4 * len(names) + 1.8), layout="constrained")
    left = [0.0] * len(names)
    for part, widths in parts.items():
        axes.barh(names, widths, left=left, color=COLOURS[part], label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for what, places in (marks or {}).items():
        axes.plot(places, names, "k|", markersize=14, label=what)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)
    plots.close(figure)


def draw_network(profile: Profile, path: str) -> None:
    """Seconds over bytes: what was measured, and the alpha and beta that fit it."""
    plots = pyplot()
    figure, axes = plots.subplots(figsize=(7, 5), layout="constrained")
    for level, samples in profile.samples.items():
        for kind, link in getattr(profile.network, level).items():
            own = [sample for sample in samples if sample.collective == kind]
            sizes = [sample.num_bytes for sample in own]
            (dots,) = axes.plot(sizes, [s.seconds for s in own], "o", label=f"{kind} {level}")
            works = [fastest(kind, s.ranks, s.num_bytes, link.alpha, link.beta) for s in own]
            fitted = [work.seconds(link.alpha, link.beta) for work in works]
            axes.plot(sizes, fitted, color=dots.get_color(), linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="seconds; lines: alpha and beta")
    axes.grid(which="major", color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)
    save(figure, path)
    plots.close(figure)
