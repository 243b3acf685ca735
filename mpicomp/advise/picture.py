"""Predicted speed-ups over bandwidth and over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from mpicomp.advise.forecast import NARROWEST, WIDEST, Forecast
from mpicomp.bench import report
from mpicomp.predict.choose import DENSE
from mpicomp.predict.network import Network

POINTS = 60  # of a curve over bandwidth
MOST_RANKS = 4096


def draw(forecast: Forecast, specs: Sequence[str], network: Network, path: str) -> None:
    """Two panels: the ranks of ``network`` on other links, and other ranks on its links."""
    plots = report.pyplot()
    figure, (left, right) = plots.subplots(
        1, 2, figsize=(11, 4.2), sharey=True, layout="constrained"
    )
    ratio = (WIDEST / NARROWEST) ** (1 / (POINTS - 1))
    bandwidths = [NARROWEST * ratio**point for point in range(POINTS)]
    clusters = []
    for exponent in range(1, MOST_RANKS.bit_length()):
        with contextlib.suppress(ValueError):  # so many do not fill hosts, or hosts are unknown
            clusters.append(network.with_ranks(2**exponent))
    for spec in specs:
        style = {"label": spec, "color": "black"} if spec == DENSE else {"label": spec}
        over_bandwidth = [
            forecast.speedup(spec, network.with_link(gigabits=gigabits)) for gigabits in bandwidths
        ]
        left.plot(bandwidths, over_bandwidth, **style)
        over_ranks = [forecast.speedup(spec, cluster) for cluster in clusters]
        right.plot([cluster.ranks for cluster in clusters], over_ranks, **style)
    left.set(xlabel="bandwidth between hosts, Gb/s", ylabel="predicted speed-up")
    left.set(xscale="log", yscale="log", title=f"{network.ranks} ranks")
    right.set(xscale="log", xlabel="ranks", title="on the network as it is")
    right.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axes in (left, right):
        axes.grid(which="major", color="#dddddd", linewidth=0.6)
    report.save(figure, path)
    plots.close(figure)
