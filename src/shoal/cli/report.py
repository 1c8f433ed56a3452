"""From results to a table and a recommendation, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.cli.configuration import LOOP, PARALLEL, Configuration
from shoal.cli.measure import Result
from shoal.cli.target import Target

HEADER = ("rows", "processes", "steps/s", "slowest to fastest", "x plain loop", "start-up")
FASTEST = "*"


@dataclass(frozen=True)
class Recommendation:
    """What to use.

    Attributes:
        configuration: the fastest.
        rate: its environment steps per second.
        times_one_a_row: its rate over that of one process a row for as many rows; None where that has no number.
        sentence: in words.
        code: the same, to be copied into a program.
    """

    configuration: Configuration
    rate: float
    times_one_a_row: float | None
    sentence: str
    code: str


def plain_rate(results: Sequence[Result]) -> float | None:
    """Steps per second of the plain loop."""
    return next((result.rate for result in results if result.configuration.engine == LOOP), None)


def times_plain(result: Result, results: Sequence[Result]) -> float | None:
    """A result's rate over that of the plain loop; None where either has none."""
    plain = plain_rate(results)
    return None if result.rate is None or not plain else result.rate / plain


def fastest(results: Sequence[Result], rows: int | None = None) -> Result | None:
    """The batch that makes the most steps per second, among those of so many rows or all; None if there is none."""
    batches = [
        result
        for result in results
        if result.configuration.engine != LOOP and result.rate is not None and rows in (None, result.configuration.rows)
    ]
    return max(batches, key=lambda result: result.rate or 0.0, default=None)


def recommend(results: Sequence[Result], target: Target) -> Recommendation | None:
    """The fastest batch, and what it is compared to; None where no batch has a number."""
    best = fastest(results)
    if best is None or best.rate is None:
        return None
    configuration = best.configuration
    one_a_row = next(
        (
            result.rate
            for result in results
            if result.configuration.engine == PARALLEL
            and result.configuration.rows == configuration.rows
            and result.configuration.one_a_row
        ),
        None,
    )
    over_plain = times_plain(best, results)
    sentence = f"{configuration.label}: {best.rate:,.0f} steps/s"
    if one_a_row and not configuration.one_a_row:
        sentence += f", {times(best.rate / one_a_row)} times one process a row"
    elif over_plain is not None:
        sentence += f", {times(over_plain)} times one plain loop"
    ratio = best.rate / one_a_row if one_a_row else None
    return Recommendation(configuration, best.rate, ratio, sentence, code(configuration, target))


def code(configuration: Configuration, target: Target) -> str:
    """Lines that build a configuration, to be copied into a program."""
    lines = [*target.imports, f"from shoal import {configuration.engine}", ""]
    return "\n".join([*lines, f"env = {configuration.call(target.expression)}"])


def title(target: Target, cpus: int, seconds: float, rounds: int) -> str:
    """What was measured, and how."""
    of_rounds = "one round" if rounds == 1 else f"median of {rounds} rounds"
    return f"{target.text} on {cpus} CPU{'s' * (cpus != 1)}, {of_rounds} of {seconds:g} s"


def table(results: Sequence[Result]) -> str:
    """The results in columns, those of each number of rows together and the fastest of them marked."""
    best = {id(fastest(results, result.configuration.rows)) for result in results}
    rows = [_cells(result, results) for result in results]
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    lines = [_line(HEADER, widths), _line(["-" * width for width in widths], widths)]
    group = None
    for result, cells in zip(results, rows, strict=True):
        configuration = result.configuration
        if group is not None and group != (configuration.engine == LOOP, configuration.rows):
            lines.append("")
        group = (configuration.engine == LOOP, configuration.rows)
        lines.append(_line(cells, widths, FASTEST if id(result) in best else ""))
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int], remark: str = "") -> str:
    return "  ".join([*(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)), remark]).rstrip()


def _cells(result: Result, results: Sequence[Result]) -> tuple[str, ...]:
    configuration, ratio = result.configuration, times_plain(result, results)
    return (
        str(configuration.rows),
        processes_text(configuration),
        result.status if result.rate is None else f"{result.rate:,.0f}",
        _range(result.rates) if result.rate is not None and len(result.rates) > 1 else "",
        "" if ratio is None else times(ratio),
        "" if result.rate is None or result.startup_seconds is None else f"{result.startup_seconds:.2f} s",
    )


def _range(rates: Sequence[float]) -> str:
    return f"{min(rates):,.0f} to {max(rates):,.0f}"


def processes_text(configuration: Configuration) -> str:
    """Where the rows run, as a cell of the table and a label of the chart."""
    if configuration.engine == LOOP:
        return "plain loop"
    if configuration.processes is None:
        return "SerialEnv"
    return f"{configuration.processes} (one a row)" if configuration.one_a_row else str(configuration.processes)


def remarks(results: Sequence[Result], recommendation: Recommendation | None) -> list[str]:
    """What a reader should know to read the table: its marks, why something has no number, who won."""
    notes = [f"{result.status}, {result.configuration.label}: {result.reason}" for result in results if result.reason]
    if recommendation is not None:
        notes.insert(0, f"{FASTEST} fastest of its rows. steps/s counts the steps of single environments.")
    plain = plain_rate(results)
    if plain and recommendation is not None and plain > recommendation.rate:
        notes.append(
            f"No batch is faster than one plain loop, where a step takes {seconds_text(1 / plain)}: on so few CPUs, so "
            "cheap a step gains nothing from being shared out."
        )
    return notes


def times(ratio: float) -> str:
    """A ratio with the digits that mean something."""
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2f}"


def seconds_text(seconds: float) -> str:
    """A short time in the unit that suits it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.2g} µs"
    return f"{seconds * 1e3:.2g} ms" if seconds < 1 else f"{seconds:.2g} s"
