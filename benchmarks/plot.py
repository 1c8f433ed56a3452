"""The chart: one panel of horizontal bars for each configuration."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")

from contenders import CONTENDERS
from matplotlib import pyplot as plt
from matplotlib.patches import Patch
from report import times

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from measure import Throughput

COLORS = {"shoal": "#0b7a75", "peer": "#9aa5b1", "limit": "#e9ecef"}
LEGEND = {"shoal": "shoal", "peer": "peers", "limit": "bare environment, no batching"}
INK = "#243b53"
BAR_INCHES = 0.34
PANEL_INCHES = 0.95


def draw_throughput(throughputs: Sequence[Throughput], path: Path) -> None:
    """Draw steps per second of every contender, with its ratio to torchrl's ParallelEnv at the bar."""
    counts = [len(throughput.rates) for throughput in throughputs]
    heights = [BAR_INCHES * count + PANEL_INCHES for count in counts]
    with plt.rc_context({"font.family": "DejaVu Sans", "font.size": 10, "text.color": INK, "axes.labelcolor": INK}):
        figure, grid = plt.subplots(
            len(throughputs),
            1,
            figsize=(10, sum(heights) + 0.7),
            height_ratios=heights,
            squeeze=False,
            layout="constrained",
        )
        for axes, throughput in zip(grid[:, 0], throughputs, strict=True):
            _draw_panel(axes, throughput)
        handles = [
            Patch(facecolor=color, edgecolor="#b8c1cc" if kind == "limit" else color, label=LEGEND[kind])
            for kind, color in COLORS.items()
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)
        figure.savefig(path, dpi=150, facecolor="white")
        plt.close(figure)


def _draw_panel(axes: Axes, throughput: Throughput) -> None:
    medians = {key: statistics.median(rates) for key, rates in throughput.rates.items()}
    keys = sorted(medians, key=medians.__getitem__)
    furthest = 1.0
    for position, key in enumerate(keys):
        entry, rates = CONTENDERS[key], throughput.rates[key]
        axes.barh(
            position,
            medians[key],
            height=0.74,
            color=COLORS[entry.kind],
            edgecolor="#b8c1cc" if entry.kind == "limit" else "none",
        )
        end = medians[key]
        if len(rates) > 1:
            low, _, high = statistics.quantiles(rates, n=4, method="inclusive")
            axes.hlines(position, low, high, color=INK, linewidth=1.0, alpha=0.6)
            end = max(end, high)
        furthest = max(furthest, end)
        axes.annotate(
            _bar_text(throughput, key, medians[key]),
            (end, position),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            fontweight="bold" if entry.kind == "shoal" else "normal",
        )
    axes.set_yticks(range(len(keys)), [CONTENDERS[key].label for key in keys])
    axes.set_xlim(0, 1.25 * furthest)
    axes.set_title(throughput.configuration.title, loc="left", fontweight="bold", fontsize=11)
    axes.set_xlabel(f"environment steps per second (and the ratio to {CONTENDERS[throughput.torchrl].label})")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.tick_params(length=0, colors=INK)
    axes.grid(axis="x", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _bar_text(throughput: Throughput, key: str, median: float) -> str:
    ratio = throughput.ratio(key, throughput.torchrl)
    return f"{median:,.0f}" if ratio is None else f"{median:,.0f}   ({times(ratio)})"
