"""The ways to step an environment that a benchmark compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_PROCESSES_UNASKED = 64
"""More processes than this are started only where ``--processes`` asks for them."""

LOOP, SERIAL, PARALLEL = "loop", "SerialEnv", "ParallelEnv"


@dataclass(frozen=True)
class Configuration:
    """One way to step.

    Attributes:
        engine: ``"loop"`` (one bare environment in a plain loop), ``"SerialEnv"`` or ``"ParallelEnv"``.
        rows: how many environments.
        processes: how many worker processes carry them; None where there are none.
        skipped: why it is not tried; empty where it is.
    """

    engine: str
    rows: int
    processes: int | None = None
    skipped: str = ""

    @property
    def one_a_row(self) -> bool:
        """Whether each row has a process of its own."""
        return self.processes == self.rows

    @property
    def label(self) -> str:
        """In words, within a sentence."""
        rows = f"{self.rows} row{'s' * (self.rows != 1)}"
        if self.engine == LOOP:
            return "one plain loop"
        if self.processes is None:
            return f"{rows} in this process (SerialEnv)"
        return f"{rows} on {self.processes} process{'es' * (self.processes != 1)}"

    def call(self, factory: str) -> str:
        """The expression that builds it, e.g. ``ParallelEnv(64, make_env, processes=4)``."""
        split = "" if self.processes is None or self.one_a_row else f", processes={self.processes}"
        return f"{self.engine}({self.rows}, {factory}{split})"


PLAIN_LOOP = Configuration(LOOP, 1)


def default_processes(cpus: int) -> list[int]:
    """1, 2, 4, ... up to the CPUs there are, their number itself, and twice that."""
    powers = [1 << exponent for exponent in range(cpus.bit_length())]
    return sorted({*powers, cpus, 2 * cpus})


def plan(rows: Sequence[int], processes: Sequence[int] | None, cpus: int) -> list[Configuration]:
    """All that is compared: the plain loop; for each number of rows, `SerialEnv`, grouped splits and one process a row.

    Args:
        rows: the batch sizes.
        processes: the splits that were asked for; None for those of `default_processes`.
        cpus: CPUs there are.
    """
    configurations = [PLAIN_LOOP]
    for count in rows:
        configurations.append(Configuration(SERIAL, count))
        for split in sorted({*(default_processes(cpus) if processes is None else processes), count}):
            asked = processes is not None and split in processes
            if split > count:
                if asked:
                    configurations.append(Configuration(PARALLEL, count, split, "more processes than rows"))
            elif split > MOST_PROCESSES_UNASKED and not asked:
                if split == count:
                    reason = f"over {MOST_PROCESSES_UNASKED} processes; ask for it with --processes {split}"
                    configurations.append(Configuration(PARALLEL, count, split, reason))
            else:
                configurations.append(Configuration(PARALLEL, count, split))
    return configurations
