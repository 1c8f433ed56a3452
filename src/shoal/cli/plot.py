"""The table as a chart: one panel of horizontal bars for each number of rows."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.cli.configuration import LOOP, Configuration
from shoal.cli.failures import FAILED, USAGE, CommandError
from shoal.cli.measure import Result
from shoal.cli.report import fastest, plain_rate, processes_text, times, times_plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOR, BEST_COLOR, PLAIN_COLOR = "#8fb8b5", "#0b7a75", "#7b8794"
INK, GRID = "#243b53", "#e4e7eb"
BAR_INCHES, PANEL_INCHES, FRAME_INCHES = 0.34, 0.75, 0.9


def check(path: str) -> None:
    """Makes sure that a chart can be written, before anything is measured for it.

    Raises:
        CommandError: matplotlib is missing (exit code 1); it does not write such files, or there is no such folder (2).
    """
    try:
        backend: Any = importlib.import_module("matplotlib.backends.backend_agg")
    except ImportError:
        raise CommandError("--plot needs matplotlib: pip install 'shoal[plot]'", FAILED)
    formats = sorted(backend.FigureCanvasAgg.get_supported_filetypes())
    if os.path.splitext(path)[1].removeprefix(".").lower() not in formats:
        raise CommandError(f"--plot {path}: the file's name must end in one of .{', .'.join(formats)}", USAGE)
    folder = os.path.dirname(path) or os.curdir
    if not os.path.isdir(folder):
        raise CommandError(f"--plot {path}: there is no folder {folder}", USAGE)


def draw(results: Sequence[Result], path: str, title: str) -> None:
    """Writes the chart to a file; its ending chooses the format."""
    figure_of(results, title).savefig(path, dpi=150, facecolor="white")


def figure_of(results: Sequence[Result], title: str) -> Figure:
    """Draws the steps per second of each configuration, the range of its rounds, and the plain loop as a line."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = [
        [result for result in results if result.configuration.engine != LOOP and result.configuration.rows == rows]
        for rows in dict.fromkeys(each.configuration.rows for each in results if each.configuration.engine != LOOP)
    ]
    heights = [BAR_INCHES * len(panel) + PANEL_INCHES for panel in panels]
    with matplotlib.rc_context({"font.size": 10, "text.color": INK, "axes.labelcolor": INK}):
        figure = Figure(figsize=(8.5, sum(heights) + FRAME_INCHES), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
        furthest = max((rate for result in results if result.failure is None for rate in result.rates), default=1.0)
        for index, (axes, panel) in enumerate(zip(grid[:, 0], panels, strict=True)):
            _draw_panel(axes, panel, results, first=index == 0)
            axes.set_xlim(0, 1.3 * furthest)
        grid[-1, 0].set_xlabel(
            "environment steps per second (times one plain loop); thin lines: slowest to fastest round"
        )
    return figure


def _draw_panel(axes: Axes, panel: Sequence[Result], results: Sequence[Result], *, first: bool) -> None:
    plain, best = plain_rate(results), fastest(panel)
    for place, result in enumerate(panel):
        text, end = result.status, 0.0
        if result.rate is not None:
            end = max(result.rates)
            axes.barh(place, result.rate, height=0.72, color=BEST_COLOR if result is best else COLOR)
            axes.hlines(place, min(result.rates), end, color=INK, linewidth=1.0, alpha=0.6)
            ratio = times_plain(result, results)
            text = f"{result.rate:,.0f}" + ("" if ratio is None else f"   ({times(ratio)}x)")
        axes.annotate(
            text,
            (end, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            fontweight="bold" if result is best else "normal",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85},
        )
    if plain:
        axes.axvline(plain, color=PLAIN_COLOR, linewidth=1.2, linestyle=(0, (4, 3)), zorder=0.5)
    if plain and first:
        axes.annotate(
            f"one plain loop, {plain:,.0f}",
            (plain, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=PLAIN_COLOR,
        )
    rows = panel[0].configuration.rows
    axes.set_title(f"{rows} row{'s' * (rows != 1)}", loc="left", fontsize=10, fontweight="bold")
    axes.set_yticks(range(len(panel)), [_bar_label(result.configuration) for result in panel])
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.tick_params(length=0, colors=INK)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _bar_label(configuration: Configuration) -> str:
    if configuration.processes is None:
        return processes_text(configuration)
    kind = f"process{'es' * (configuration.processes != 1)}"
    return f"{configuration.processes} {kind}" + (", one a row" if configuration.one_a_row else "")
