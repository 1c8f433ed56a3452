"""The engine without processes: all rows run in the caller's own, one after the other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from shoal.drivers.base import Description
from shoal.engine.errors import Fault, raise_faults
from shoal.engine.layout import Area, Array, Layout
from shoal.engine.protocol import Answer, Opcode
from shoal.engine.rows import Builder, RowGroup
from shoal.engine.schema import Key, Schema


class LocalEngine:
    """Runs the rows of a batch in this process.

    Args:
        builders: how to build each row's environment.
        rebuilds: whether rows may be built anew after a fault.

    Raises:
        Exception: what a factory raised.
    """

    def __init__(self, builders: Sequence[Builder], *, rebuilds: bool = False) -> None:
        self._group = RowGroup(range(len(builders)), remote=False, rebuilds=rebuilds)
        built = self._group.build(builders)
        if built.faults:
            self._group.close()
            raise_faults(built.faults)
        self.descriptions: list[Description] = [built.values[row] for row in range(len(builders))]
        self.arrays: dict[str, dict[Key, Array]] = {}
        self.row_arrays: list[dict[str, dict[Key, Array]]] = []
        self.areas: dict[str, Area] = {}

    def attach(self, schemas: Sequence[Schema]) -> None:
        """Lays out the buffered leaves and gives each row its arrays."""
        layout = Layout.of(schemas)
        buffer = bytearray(layout.size)
        self.arrays, self.areas = layout.batch(buffer), layout.areas(buffer)
        self.row_arrays = [layout.row(buffer, row) for row in range(len(schemas))]
        self.fresh = np.zeros(len(schemas), bool)
        self.row_times, self.worker_times = np.zeros(2 * len(schemas)), np.zeros(2)
        self._own_times: Any = memoryview(self.worker_times)  # type: ignore[arg-type]
        self._group.attach(dict(enumerate(schemas)), layout, buffer, self.fresh, self.row_times)

    def execute(
        self,
        opcode: Opcode,
        rows: Sequence[int] | None = None,
        given: dict[int, Any] | None = None,
        timeout: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Answer | None:
        """Runs one command on some rows (None: on all); see `RowGroup.execute`. Nobody is there to keep a timeout, and
        there is no waiting in which anything could be done meanwhile."""
        mask = None
        if rows is not None:
            mask = bytearray(len(self._group.rows))
            for row in rows:
                mask[row] = 1
        start = time.perf_counter()
        try:
            return self._group.execute(opcode, mask, given)
        finally:
            times = self._own_times
            times[0] += time.perf_counter() - start
            times[1] += 1.0

    execute_claimed = execute

    def claim(self) -> AbstractContextManager[None]:
        """Nothing: who calls is who runs the rows. (A pool keeps other threads out.)"""
        return nullcontext()

    def carriers(self) -> tuple[list[range], list[int]]:
        """The rows and the process id of each process that carries some: this one, and all of them."""
        return [range(len(self._group.rows))], [os.getpid()]

    def rebuild(self, rows: Sequence[int]) -> list[Fault]:
        """Builds the environments of these rows anew; gives what went wrong with that."""
        answer = self.execute(Opcode.REBUILD, rows)
        return [] if answer is None else answer.faults

    def close(self) -> list[Fault]:
        """Calls each environment's own close; gives what they raised."""
        return self._group.close().faults

    @property
    def envs(self) -> list[Any]:
        """The environments themselves, by row."""
        return [driver.env for driver in self._group._drivers.values()]
