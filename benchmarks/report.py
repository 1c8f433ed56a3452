"""From results to tables, and from tables to plain text and Markdown."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from contenders import CONTENDERS
from environments import SLOW_STEP_SECONDS
from thresholds import THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from measure import Builds, Measured, Results, Throughput, Waiting

IDLE_CORES_WORTH_A_WARNING = 0.03


@dataclass
class Table:
    """A table with its heading; the first column is text, the others are numbers."""

    title: str
    header: Sequence[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)

    def as_text(self) -> str:
        """Render for a terminal."""
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        lines = [self._text_line(row, widths) for row in (self.header, ["-" * width for width in widths], *self.rows)]
        return "\n".join([self.title, "=" * len(self.title), *lines, *self.notes])

    @staticmethod
    def _text_line(cells: Sequence[str], widths: Sequence[int]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()

    def as_markdown(self) -> str:
        """Render as a section of a Markdown page."""
        rule = [":---", *("---:" for _ in self.header[1:])]
        lines = [f"| {' | '.join(row)} |" for row in (self.header, rule, *self.rows)]
        notes = [f"\n{note}" for note in self.notes]
        return "\n".join([f"## {self.title}\n", *lines, *notes])


def all_tables(results: Results, sections: Iterable[str]) -> list[Table]:
    """Return the tables of the sections that were measured, and the thresholds."""
    sections = set(sections)
    tables = [throughput_table(throughput) for throughput in results.throughput.values()]
    if results.builds and "startup" in sections:
        tables.append(startup_table(results.builds))
    if results.builds and "memory" in sections:
        tables.append(memory_table(results.builds))
    if results.waiting:
        tables.append(waiting_table(results.waiting))
    return [*tables, threshold_table(results)]


def throughput_table(throughput: Throughput) -> Table:
    """Steps per second, and the ratios to the two contenders that a reader will ask about."""
    rows = [
        [
            CONTENDERS[key].label,
            f"{statistics.median(rates):,.0f}",
            spread(rates, ",.0f"),
            times(throughput.ratio(key, throughput.torchrl)),
            times(throughput.ratio(key, "plain-2")),
        ]
        for key, rates in throughput.rates.items()
    ]
    rows.sort(key=lambda row: [entry.label for entry in CONTENDERS.values()].index(row[0]))
    rounds = max(map(len, throughput.rates.values()), default=0)
    return Table(
        f"Throughput: {throughput.configuration.title}",
        ("contender", "steps/s", "quartiles", "x torchrl ParallelEnv", "x two plain loops"),
        rows,
        [
            f"Median of {rounds} alternating rounds; a ratio is the median of the ratios within a round. "
            f"The first ratio is to {CONTENDERS[throughput.torchrl].label}.",
            _idle_note(throughput),
            *_exceptions(throughput),
        ],
    )


def _idle_note(throughput: Throughput) -> str:
    """Say that nobody stole time from the others, or who did."""
    busy = {key: cores for key, cores in throughput.idle_cores.items() if cores > IDLE_CORES_WORTH_A_WARNING}
    if busy:
        named = ", ".join(f"{CONTENDERS[key].label} {100 * cores:.0f} %" for key, cores in busy.items())
        return f"WARNING: used processor time in a pause (of one core): {named}. That slows the others down."
    most = 100 * max(throughput.idle_cores.values(), default=0.0)
    return f"In a pause, no contender used more than {most:.1f} % of a core: none slows the others down."


def startup_table(builds: Builds) -> Table:
    """Seconds to be ready."""
    rows = [
        [CONTENDERS[key].label, f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f} to {max(seconds):.2f}"]
        for key, seconds in builds.seconds.items()
    ]
    rounds = max(map(len, builds.seconds.values()), default=0)
    return Table(
        f"Start-up: {builds.rows} workers, CartPole-v1",
        ("contender", "s", "range"),
        rows,
        [
            "From the constructor to the end of the first reset, in a fresh interpreter that has done its imports; "
            f"median of {rounds} alternating builds. Every contender starts its workers the way it does by default.",
            *_exceptions(builds),
        ],
    )


def memory_table(builds: Builds) -> Table:
    """Unshared memory."""
    rows = []
    for key, memory in builds.memory.items():
        sizes = memory.workers or [0]
        templates = f"{sum(memory.templates) / 1e6:.1f}" if memory.templates else "none"
        median, largest = statistics.median(sizes) / 1e6, max(sizes) / 1e6
        rows.append([CONTENDERS[key].label, str(len(memory.workers)), f"{median:.1f}", f"{largest:.1f}", templates])
    return Table(
        f"Unshared memory: {builds.rows} workers, CartPole-v1",
        ("contender", "workers", "MB a worker", "largest", "template process"),
        rows,
        ["USS after some steps: what ending that process would free. 1 MB is 10^6 bytes.", *_exceptions(builds)],
    )


def waiting_table(waiting: Waiting) -> Table:
    """Processor time spent on waiting."""
    rows = []
    for key, samples in waiting.samples.items():
        rate = statistics.median(sample.rate for sample in samples)
        parent = statistics.median(sample.parent_cores for sample in samples)
        workers = statistics.median(sample.worker_cores for sample in samples)
        rows.append([CONTENDERS[key].label, f"{rate:.1f}", f"{100 * parent:.2f} %", f"{100 * workers:.2f} %"])
    milliseconds = 1000 * SLOW_STEP_SECONDS
    ideal = waiting.rows / SLOW_STEP_SECONDS
    return Table(
        f"Waiting: {waiting.rows} envs that sleep {milliseconds:.0f} ms a step",
        ("contender", "steps/s", "parent, of one core", "all workers, of one core"),
        rows,
        [f"No contender can make more than {ideal:.0f} steps/s here.", *_exceptions(waiting)],
    )


def threshold_table(results: Results) -> Table:
    """What must be reached."""
    rows = []
    for threshold in THRESHOLDS:
        value = threshold.measure(results)
        measured = "-" if value is None else f"{value:.3g}{threshold.unit}"
        rows.append([threshold.text, threshold.demand, measured, threshold.verdict(value)])
    note = (
        "Where torchrl's workers as they come were not measured, its forked ones, which are faster, take their place."
    )
    return Table("What shoal must reach", ("", "demand", "measured", "verdict"), rows, [note])


def spread(values: Sequence[float], form: str) -> str:
    """Write the first and the third quartile."""
    if len(values) < 2:
        return "-"
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{low:{form}} to {high:{form}}"


def times(ratio: float | None) -> str:
    """Write a ratio with two or three digits that mean something."""
    if ratio is None:
        return "-"
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.1f}x" if ratio >= 1 else f"{ratio:.2g}x"


def _exceptions(measured: Measured) -> list[str]:
    labels: dict[str, list[str]] = {}
    for key, reason in measured.left_out.items():
        labels.setdefault(reason, []).append(CONTENDERS[key].label)
    left_out = [f"Left out, {reason}: {'; '.join(names)}." for reason, names in labels.items()]
    return [*left_out, *(f"WARNING: {complaint}." for complaint in measured.complaints)]
