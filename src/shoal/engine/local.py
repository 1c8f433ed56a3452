"""The engine without processes: all rows run in the caller's own, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.drivers.base import Description
from shoal.engine.errors import raise_faults
from shoal.engine.layout import Array, Layout
from shoal.engine.protocol import Answer, Opcode
from shoal.engine.rows import Builder, RowGroup
from shoal.engine.schema import Key, Schema


class LocalEngine:
    """Runs the rows of a batch in this process.

    Args:
        builders: how to build each row's environment.

    Raises:
        Exception: what a factory raised.
    """

    def __init__(self, builders: Sequence[Builder]) -> None:
        self._group = RowGroup(range(len(builders)), remote=False)
        built = self._group.build(builders)
        if built.faults:
            self._group.close()
            raise_faults(built.faults)
        self.descriptions: list[Description] = [built.values[row] for row in range(len(builders))]
        self.arrays: dict[str, dict[Key, Array]] = {}
        self.row_arrays: list[dict[str, dict[Key, Array]]] = []

    def attach(self, schemas: Sequence[Schema]) -> None:
        """Lays out the buffered leaves and gives each row its arrays."""
        layout = Layout.of(schemas)
        buffer = bytearray(layout.size)
        self.arrays = layout.batch(buffer)
        self.row_arrays = [layout.row(buffer, row) for row in range(len(schemas))]
        self._group.attach(dict(enumerate(schemas)), layout, buffer)

    def execute(
        self, opcode: Opcode, rows: Sequence[int] | None = None, given: dict[int, Any] | None = None
    ) -> Answer | None:
        """Runs one command on some rows (None: on all); see `RowGroup.execute`."""
        mask = None
        if rows is not None:
            mask = bytearray(len(self._group.rows))
            for row in rows:
                mask[row] = 1
        return self._group.execute(opcode, mask, given)

    def close(self) -> None:
        """Calls each environment's own close; the first exception of one is raised once all are closed."""
        raise_faults(self._group.close().faults)

    @property
    def envs(self) -> list[Any]:
        """The environments themselves, by row."""
        return [driver.env for driver in self._group._drivers.values()]
