"""Where each leaf of each row lies in one block of memory.

A leaf that all rows share (same key, dtype and shape) is one C-contiguous ``[N, ...]`` array, so that the parent reads
the batch with one copy. Where rows differ, each row has an array of its own. Every array starts at a cache line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from shoal.engine.schema import AREAS, NEXT, ROOT, Key, Leaf, Schema

ALIGNMENT = 64
"""Bytes of a cache line: no two arrays share one, so no two processes write to the same line by accident."""

_STORAGE = {"bfloat16": "uint16"}

Array = np.ndarray[Any, np.dtype[Any]]


def storage_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype that stores a leaf's bits (numpy has no bfloat16: its bits lie in a uint16)."""
    return np.dtype(_STORAGE.get(name, name))


def bytes_of(array: Array) -> memoryview:
    """The memory of a C-contiguous array, as one flat row of bytes."""
    return memoryview(array).cast("B")  # type: ignore[arg-type]


def align(offset: int) -> int:
    """The first multiple of the alignment that is not below ``offset``."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Slot:
    """Place of one array in the block."""

    offset: int
    storage: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """Where the place of the next array begins, at the earliest."""
        return align(self.offset + prod(self.shape) * self.storage.itemsize)

    def array(self, buffer: Any) -> Array:
        """The array over the block's memory; writing to it writes to the block."""
        array: Array = np.ndarray(self.shape, dtype=self.storage, buffer=buffer, offset=self.offset)
        return array


class Area:
    """The arrays of one area as they lie in the block: one stretch of memory, which one copy moves.

    Args:
        memory: all bytes of the stretch.
        slots: where the arrays lie in it, by key.

    Attributes:
        memory: all bytes of the stretch.
        fields: the name of each array's field in a record like `blank` makes, by key.
    """

    def __init__(self, memory: Array, slots: dict[Key, Slot]) -> None:
        self.memory = memory
        self.fields = {key: str(place) for place, key in enumerate(slots)}
        self._size = len(memory)
        # A record is the quickest way to many arrays over one piece of memory.
        self._record = np.dtype(
            {
                "names": list(self.fields.values()),
                "formats": [(slot.storage, slot.shape) for slot in slots.values()],
                "offsets": [slot.offset for slot in slots.values()],
                "itemsize": self._size,
            }
        )

    def blank(self) -> tuple[Array, Array]:
        """Memory of its own for an equal area, with nothing in it yet, and the record whose fields are the arrays."""
        memory: Array = np.empty(self._size, np.uint8)
        return memory, np.ndarray((), self._record, memory)

    def over(self, memory: Array) -> Array:
        """The record over the memory of an equal area, at its beginning."""
        record: Array = np.ndarray((), self._record, memory)
        return record


@dataclass
class Layout:
    """The places of all buffered leaves.

    Attributes:
        size: bytes of the block.
        shared: place of the ``[N, ...]`` array of each leaf that all rows share, by area and key.
        own: places of the leaves that only some rows have, or have in another shape, by row, area and key.
    """

    size: int = 0
    shared: dict[str, dict[Key, Slot]] = field(default_factory=lambda: {area: {} for area in AREAS})
    own: dict[int, dict[str, dict[Key, Slot]]] = field(default_factory=dict)

    @classmethod
    def of(cls, schemas: Sequence[Schema]) -> Layout:
        """Lays out the buffered leaves of N rows."""
        layout = cls()
        n_rows = len(schemas)
        same = all(schema == schemas[0] for schema in schemas)
        for area in AREAS:
            first = {leaf.key: leaf for leaf in schemas[0].buffered(area)}
            common = {
                key
                for key, leaf in first.items()
                if same or all(_fits(schema.by_area[area].get(key), leaf) for schema in schemas)
            }
            slots = {
                leaf.key: layout._place(leaf, (n_rows, *leaf.shape))
                for leaf in _in_order(schemas[0], area)
                if leaf.key in common
            }
            layout.shared[area] = {key: slots[key] for key in first if key in slots}
            if same:
                continue
            for row, schema in enumerate(schemas):
                places = layout.own.setdefault(row, {a: {} for a in AREAS})
                for leaf in schema.buffered(area):
                    if leaf.key not in common:
                        places[area][leaf.key] = layout._place(leaf, leaf.shape)
        layout.size = max(layout.size, ALIGNMENT)
        return layout

    def _place(self, leaf: Leaf, shape: tuple[int, ...]) -> Slot:
        slot = Slot(self.size, storage_dtype(leaf.dtype), shape)
        self.size = slot.end
        return slot

    def batch(self, buffer: Any) -> dict[str, dict[Key, Array]]:
        """The shared ``[N, ...]`` arrays by area and key."""
        return {area: {key: slot.array(buffer) for key, slot in slots.items()} for area, slots in self.shared.items()}

    def areas(self, buffer: Any) -> dict[str, Area]:
        """The shared arrays of each area as one stretch of memory; empty where rows differ."""
        if self.own:
            return {}
        areas = {}
        for area, slots in self.shared.items():
            start = min((slot.offset for slot in slots.values()), default=0)
            end = max((slot.end for slot in slots.values()), default=0)
            memory: Array = np.frombuffer(buffer, np.uint8, end - start, start)
            places = {key: Slot(slot.offset - start, slot.storage, slot.shape) for key, slot in slots.items()}
            areas[area] = Area(memory, places)
        return areas

    def row(self, buffer: Any, row: int) -> dict[str, dict[Key, Array]]:
        """One row's arrays by area and key: views, without the leading dimension."""
        arrays: dict[str, dict[Key, Array]] = {}
        for area in AREAS:
            arrays[area] = {key: slot.array(buffer)[row, ...] for key, slot in self.shared[area].items()}
            for key, slot in self.own.get(row, {}).get(area, {}).items():
                arrays[area][key] = slot.array(buffer)
        return arrays


def _in_order(schema: Schema, area: str) -> list[Leaf]:
    """The buffered leaves of an area in the order in which they lie: what ``NEXT`` has in common with ``ROOT`` begins
    both, so that ``ROOT`` is the beginning of ``NEXT`` where no row was reset."""
    order = {leaf.key: place for place, leaf in enumerate(schema.buffered(ROOT))} if area == NEXT else {}
    return sorted(schema.buffered(area), key=lambda leaf: order.get(leaf.key, len(order)))


def _fits(leaf: Leaf | None, other: Leaf) -> bool:
    return leaf is not None and leaf.fixed and leaf.dtype == other.dtype and leaf.shape == other.shape
