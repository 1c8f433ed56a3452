"""What shoal must reach, and whether it did."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from measure import Results


@dataclass(frozen=True)
class Threshold:
    """One line that must be reached.

    Attributes:
        text: What is promised.
        limit: The number to reach.
        at_least: Whether the measured number must be at least the limit; otherwise it must be below it.
        unit: Written after both numbers.
        measure: Takes the number from the results; None where it was not measured.
    """

    text: str
    limit: float
    at_least: bool
    unit: str
    measure: Callable[[Results], float | None]

    @property
    def demand(self) -> str:
        """The limit in words."""
        return f"{'at least' if self.at_least else 'below'} {self.limit:g}{self.unit}"

    def verdict(self, value: float | None) -> str:
        """Say whether the number reaches the limit."""
        if value is None:
            return "not measured"
        reached = value >= self.limit if self.at_least else value < self.limit
        return "reached" if reached else "MISSED"


def _ratio_to_torchrl(configuration: str, key: str) -> Callable[[Results], float | None]:
    def measure(results: Results) -> float | None:
        throughput = results.throughput.get(configuration)
        return throughput.ratio(key, throughput.torchrl) if throughput else None

    return measure


def _parent_percent(results: Results) -> float | None:
    samples = results.waiting.samples.get("shoal") if results.waiting else None
    return 100 * statistics.median(sample.parent_cores for sample in samples) if samples else None


def _seconds_to_ready(results: Results) -> float | None:
    seconds = results.builds.seconds.get("shoal") if results.builds else None
    return statistics.median(seconds) if seconds else None


def _largest_worker_megabytes(results: Results) -> float | None:
    memory = results.builds.memory.get("shoal") if results.builds else None
    return max(memory.workers) / 1e6 if memory and memory.workers else None


THRESHOLDS = (
    Threshold(
        "CartPole-v1, 8 envs, one process each, against torchrl ParallelEnv",
        6,
        True,
        "x",
        _ratio_to_torchrl("cartpole-8", "shoal"),
    ),
    Threshold(
        "CartPole-v1, 8 envs on 2 processes, against torchrl ParallelEnv",
        15,
        True,
        "x",
        _ratio_to_torchrl("cartpole-8", "shoal-2"),
    ),
    Threshold(
        "CartPole-v1, 64 envs on 2 processes, against torchrl ParallelEnv",
        30,
        True,
        "x",
        _ratio_to_torchrl("cartpole-64", "shoal-2"),
    ),
    Threshold("processor time of a parent that waits for envs of 50 ms", 5, False, " % of a core", _parent_percent),
    Threshold("8 Gymnasium workers constructed and reset", 2, False, " s", _seconds_to_ready),
    Threshold("unshared memory of the largest of these workers", 40, False, " MB", _largest_worker_megabytes),
)
