"""Where the time of a batch goes: in the environments, in waiting for them, in the face, outside."""

from __future__ import annotations

import time
from dataclasses import dataclass

from shoal.engine.recovery import Engine


@dataclass(frozen=True)
class RowStats:
    """One sub-environment.

    Attributes:
        row: its index.
        calls: resets and steps that it was asked for.
        env_seconds: time in them, with what its driver does around them. Where one loop steps several Gymnasium
            environments of a process, every sixteenth step is measured and stands for sixteen.
    """

    row: int
    calls: int
    env_seconds: float


@dataclass(frozen=True)
class ProcessStats:
    """One process that carries rows.

    Attributes:
        pid: its process id.
        rows: the rows that it carries.
        commands: commands that it has run.
        busy_seconds: time in them.
        waiting_seconds: time without one.
    """

    pid: int
    rows: tuple[int, ...]
    commands: int
    busy_seconds: float
    waiting_seconds: float


@dataclass(frozen=True)
class Stats:
    """Where the time of a batch went since its start; print it for a table.

    Attributes:
        seconds: time since the start.
        commands: resets and steps of the batch.
        engine_seconds: time in the engine, which is waiting for the environments.
        face_seconds: time in making TensorDicts of results, and input of TensorDicts.
        outside_seconds: the rest: the policy, learning, whatever the program does.
        processes: the processes.
        rows: the rows.
    """

    seconds: float
    commands: int
    engine_seconds: float
    face_seconds: float
    outside_seconds: float
    processes: tuple[ProcessStats, ...]
    rows: tuple[RowStats, ...]

    def __str__(self) -> str:
        def share(seconds: float) -> str:
            return f"{seconds:10.3f} s {100 * seconds / self.seconds if self.seconds else 0.0:5.1f} %"

        lines = [
            f"{self.commands} commands in {self.seconds:.3f} s",
            f"  engine  {share(self.engine_seconds)}  waiting for the environments",
            f"  face    {share(self.face_seconds)}  TensorDicts",
            f"  outside {share(self.outside_seconds)}  the program's own",
        ]
        for process in self.processes:
            rows = (
                f"row {process.rows[0]}" if len(process.rows) == 1 else f"rows {process.rows[0]} to {process.rows[-1]}"
            )
            lines.append(f"  process {process.pid} ({rows}) busy {share(process.busy_seconds)}")
        slowest = sorted(self.rows, key=lambda row: row.env_seconds, reverse=True)[:5]
        for row in slowest:
            each = 1e6 * row.env_seconds / row.calls if row.calls else 0.0
            lines.append(f"  row {row.row:<4} {share(row.env_seconds)}  {each:.1f} us a call")
        return "\n".join(lines)


class Meter:
    """The parent's own clock of one session.

    Attributes:
        commands: resets and steps so far.
        engine: seconds in the engine for them.
        moving: seconds in the methods that a user calls for them, the engine's included.
    """

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.commands = 0
        self.engine = 0.0
        self.moving = 0.0

    def stats(self, engine: Engine) -> Stats:
        """All that is known by now."""
        seconds = time.perf_counter() - self.start
        rows = engine.row_times.reshape(-1, 2).tolist()
        processes = []
        times = engine.worker_times.reshape(-1, 2).tolist()
        for carried, pid, (busy, commands) in zip(*engine.carriers(), times, strict=True):
            processes.append(ProcessStats(pid, tuple(carried), int(commands), busy, max(seconds - busy, 0.0)))
        face = max(self.moving - self.engine, 0.0)
        return Stats(
            seconds=seconds,
            commands=self.commands,
            engine_seconds=self.engine,
            face_seconds=face,
            outside_seconds=max(seconds - self.engine - face, 0.0),
            processes=tuple(processes),
            rows=tuple(RowStats(row, int(calls), spent) for row, (spent, calls) in enumerate(rows)),
        )
