"""A picture of what methods save and what they lose; needs Matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.text import Text

FAMILIES = {
    "no compression": ("none", "fp16", "bf16"),
    "sketching": ("sketch", "fetchsgd"),
    "low rank": ("powersgd", "acpsgd"),
    "local selection": ("topk", "threshold", "randomk", "dgc", "gaussiank", "sidco", "gtopk"),
    "selection without build-up": ("cltk", "deft", "micro", "exdyna", "oktopk"),
    "quantisation, biased": ("int8", "int4", "signsgd", "efsign", "onebit"),
    "quantisation, unbiased": ("qsgd", "terngrad", "natural", "thc"),
}
COLOURS = ("#333333", "#8c564b", "#d62728", "#1f77b4", "#17a2b8", "#2ca02c", "#e08214")

SPOTS = [
    (reach * right, reach * up)
    for reach in (1.0, 2.0, 3.5, 5.0, 7.0, 9.0)
    for right, up in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
]
"""Where a label may stand, from its point, best first; in units of `STEP` points."""

STEP = 7.0

LEAST = 1e-5  # errors below are rounding


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Error of the sum against bytes of 8 ranks, both logarithmic, as ``path``'s suffix says."""
    pyplot.rcParams["svg.hashsalt"] = "mpicomp"  # the same file from the same numbers
    pyplot.rcParams["svg.fonttype"] = "none"
    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    points: dict[str, tuple[float, float, str]] = {}
    for (family, names), colour in zip(FAMILIES.items(), COLOURS, strict=True):
        own = [row for row in rows if _name(row) in names]
        x = [row["bytes_8"] for row in own]
        y = [max(row["error_sum"], LEAST) for row in own]
        points |= {_name(row): (*place, colour) for row, *place in zip(own, x, y, strict=True)}
        if own:
            axes.scatter(x, y, s=28, color=colour, label=family, zorder=3)
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("bytes that each of 8 ranks receives in a step")
    axes.set_ylabel(f"relative error of the sum of {rows[0]['steps']} means, {LEAST:g} or more")
    axes.grid(which="major", color="#dddddd", linewidth=0.6)
    axes.margins(0.08)
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    figure.canvas.draw()
    figure.set_layout_engine("none")
    _label(figure, axes, points)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


def _name(row: Mapping[str, Any]) -> str:
    return str(row["compression"]).partition(":")[0]


def _label(figure: Any, axes: Any, points: Mapping[str, tuple[float, float, str]]) -> None:
    """Write every name at the first spot where it hides nothing."""
    scale = figure.dpi / 72
    places = {name: axes.transData.transform(point[:2]) for name, point in points.items()}
    dot = 4 * scale
    taken = [(x - dot, y - dot, x + dot, y + dot) for x, y in places.values()]
    legend = axes.get_legend().get_window_extent()
    taken.append((legend.x0, legend.y0, legend.x1, legend.y1))
    inside = axes.get_window_extent()
    for name, (x, y, colour) in points.items():
        for right, up in SPOTS:
            text = axes.annotate(
                name,
                (x, y),
                xytext=(STEP * right, STEP * up),
                textcoords="offset points",
                ha={1: "left", 0: "center", -1: "right"}[(right > 0) - (right < 0)],
                va={1: "bottom", 0: "center", -1: "top"}[(up > 0) - (up < 0)],
                fontsize=9,
                color=colour,
                arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkB": 3},
            )
            text.arrow_patch.set_visible(max(abs(right), abs(up)) > 1)
            text.update_positions(figure.canvas.get_renderer())
            box = Text.get_window_extent(text)  # without the line to the point
            own = (box.x0, box.y0, box.x1, box.y1)
            free = inside.x0 < own[0] and own[2] < inside.x1 and inside.y0 < own[1]
            if free and own[3] < inside.y1 and not any(_overlap(own, other) for other in taken):
                break
            if (right, up) != SPOTS[-1]:
                text.remove()
        taken.append(own)


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
