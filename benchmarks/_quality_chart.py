"""A picture of quality over time, one panel a network; needs Matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot

WORST = 5.5  # bits per byte at the top: before, a model learns how often each byte occurs
COLOURS = ("#333333", "#999999", "#8c564b", "#e08214", "#2ca02c", "#d62728", "#1f77b4", "#17a2b8")


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Bits per byte over seconds: the median of seeds as a line, their range as a band."""
    pyplot.rcParams["svg.hashsalt"] = "mpicomp"  # the same file from the same numbers
    pyplot.rcParams["svg.fonttype"] = "none"
    networks = list(dict.fromkeys(row["network"] for row in rows))
    names = list(dict.fromkeys(row["compression"] for row in rows))
    figure, panels = pyplot.subplots(
        1, len(networks), figsize=(5.5 * len(networks), 4.5), layout="constrained", squeeze=False
    )
    for axes, network in zip(panels[0], networks, strict=True):
        for row in (row for row in rows if row["network"] == network):
            levels, seconds = _seconds_at_levels(row["curves"])
            colour = COLOURS[names.index(row["compression"]) % len(COLOURS)]
            axes.plot(np.median(seconds, axis=0), levels, color=colour, label=row["compression"])
            band = seconds.min(axis=0), seconds.max(axis=0)
            axes.fill_betweenx(levels, *band, color=colour, alpha=0.2, linewidth=0)
            axes.axhline(row["bits_per_byte"], color="#bbbbbb", linewidth=0.8, zorder=0)
        axes.set(title=network, xlabel="seconds of training", ylabel="bits per held-out byte")
        axes.set_xlim(left=0)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    pyplot.close(figure)


def _seconds_at_levels(curves: Sequence[Iterable[tuple[int, float, float]]]) -> tuple[Any, Any]:
    """Levels of quality that all seeds reach, worst first, and when each seed first does.

    Seeds meet the target after different numbers of steps, so that a median at each moment would
    end with the first of them; a median at each level of quality ends where the target is met.
    """
    best = []
    for curve in curves:
        _, seconds, bits = np.array(list(curve)).T
        best.append((seconds, np.minimum.accumulate(bits)))
    end = max(bits[-1] for _, bits in best)
    levels = np.linspace(WORST, end, 200)
    # np.interp looks up in what rises, so both signs are changed
    return levels, np.stack([np.interp(-levels, -bits, seconds) for seconds, bits in best])
