"""One life of the sub-environments: from the start of their engine to its close."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from shoal.engine.errors import Fault, WorkerDied, WorkerTimeout, raise_faults
from shoal.engine.faults import RAISED, FaultLog, RestartPolicy
from shoal.engine.pool import Pool
from shoal.engine.protocol import Answer, Opcode
from shoal.engine.recovery import Engine, Recovery
from shoal.engine.schema import NEXT, ROOT, Key
from shoal.envs.specs import RowSpecs, row_specs
from shoal.envs.stats import Meter


class Session:
    """An engine and what is known of its rows. An environment and the views of it share one.

    Args:
        engine: runs the commands; its environments are built.
        use_buffers: whether leaves of fixed shape travel by buffer.
        policy: how to mend faults; None to raise them.
        faults: where to note them.

    Attributes:
        meter: the clock of what this process does for it.
        timeout: seconds that a command may take; None for what the engine was told.
        rows: the sub-environments.
        alike: whether they all have the same leaves.
        latest: for each row, the latest root values of the leaves that travel by message.
    """

    def __init__(
        self, engine: Engine, *, use_buffers: bool, policy: RestartPolicy | None = None, faults: FaultLog | None = None
    ) -> None:
        self.engine = engine
        self.rows: list[RowSpecs] = [row_specs(description) for description in engine.descriptions]
        self.schemas = [
            row.schema if use_buffers and (row.native or isinstance(engine, Pool)) else row.schema.without_buffers()
            for row in self.rows
        ]
        engine.attach(self.schemas)
        self.alike = all(schema == self.schemas[0] for schema in self.schemas)
        self._in_next = [False] * len(self.rows)
        self._all_moved: Opcode | None = None
        self.latest: list[dict[Key, Any]] = [{} for _ in self.rows]
        self.closed = False
        self.meter = Meter()
        self.timeout: float | None = None
        self.faults = FaultLog() if faults is None else faults
        self._recovery = None if policy is None else Recovery(engine, self.schemas, policy, self.faults)
        self._execute = engine.execute if self._recovery is None else self._recovery.run

    def run(
        self,
        opcode: Opcode,
        rows: Sequence[int] | None = None,
        given: dict[int, Any] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[int, Any] | None:
        """Runs a command on some rows (None: all) and gives the values that came by message, by row; ``meanwhile`` is
        what to do while they are at it, see `Pool.execute`.

        Raises:
            Exception: what a sub-environment raised; the other rows' results are kept.
        """
        start = time.perf_counter()
        try:
            answer: Answer | None = self._execute(opcode, rows, given, self.timeout, meanwhile)
        except BaseException as error:
            self.closed = self.closed or getattr(self.engine, "closed", False)
            if self._recovery is None and isinstance(error, (WorkerDied, WorkerTimeout)):
                pids = error.pids if isinstance(error, WorkerTimeout) else [error.pid] * len(error.rows)
                lost = zip(error.rows, pids, strict=True)
                self.faults.add([Fault.of_loss(row, opcode.command, error, pid) for row, pid in lost], RAISED)
            raise
        if opcode in _MOVES:
            self.meter.engine += time.perf_counter() - start
            self.meter.commands += 1
            if answer is None:
                self._move(opcode, rows, ())
                return None
        if answer is None:
            return None
        if self._recovery is None and answer.faults:
            self.faults.add(answer.faults, RAISED)
        if opcode in _MOVES:
            self._move(opcode, rows, {fault.row for fault in answer.faults})
            for row, values in answer.values.items():
                area = NEXT if self.in_next[row] else ROOT
                self.latest[row].update({key: value for (where, key), value in values.items() if where == area})
        raise_faults(answer.faults)
        return answer.values

    @property
    def restarted(self) -> set[int]:
        """The rows whose episode the last step has ended because their environment was put up again."""
        return set() if self._recovery is None else self._recovery.restarted

    def _move(self, opcode: Opcode, rows: Sequence[int] | None, failed: Collection[int]) -> None:
        """Notes where the latest values of the rows lie that a command has moved."""
        if rows is None and not failed:
            self._all_moved = opcode
            return
        in_next = self.in_next
        for row in range(len(self.rows)) if rows is None else rows:
            if row not in failed:
                in_next[row] = self._lies_in_next(opcode, row)

    def _lies_in_next(self, opcode: Opcode, row: int) -> bool:
        if opcode == Opcode.STEP_AND_MAYBE_RESET:
            return not self.engine.fresh[row]
        return opcode == Opcode.STEP

    @property
    def in_next(self) -> list[bool]:
        """For each row, whether its latest values lie in the ``NEXT`` area rather than in the ``ROOT`` area."""
        if self._all_moved is not None:
            self._in_next = [self._lies_in_next(self._all_moved, row) for row in range(len(self.rows))]
            self._all_moved = None
        return self._in_next

    def close(self) -> None:
        """Ends the engine.

        Raises:
            Exception: what a sub-environment raised in its own close; everything is closed all the same.
        """
        self.closed = True
        raise_faults(self.engine.close())


_MOVES = frozenset({Opcode.RESET, Opcode.STEP, Opcode.STEP_AND_MAYBE_RESET})
