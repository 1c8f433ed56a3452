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

from shoal.engine.schema import AREAS, Key, Leaf, Schema

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
    dtype: str
    shape: tuple[int, ...]

    def array(self, buffer: Any) -> Array:
        """The array over the block's memory; writing to it writes to the block."""
        dtype = storage_dtype(self.dtype)
        array: Array = np.ndarray(self.shape, dtype=dtype, buffer=buffer, offset=self.offset)
        return array


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
            for key in first:
                if key in common:
                    layout.shared[area][key] = layout._place(first[key], (n_rows, *first[key].shape))
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
        slot = Slot(self.size, leaf.dtype, shape)
        self.size = align(self.size + prod(shape) * storage_dtype(leaf.dtype).itemsize)
        return slot

    def batch(self, buffer: Any) -> dict[str, dict[Key, Array]]:
        """The shared ``[N, ...]`` arrays by area and key."""
        return {area: {key: slot.array(buffer) for key, slot in slots.items()} for area, slots in self.shared.items()}

    def row(self, buffer: Any, row: int) -> dict[str, dict[Key, Array]]:
        """One row's arrays by area and key: views, without the leading dimension."""
        arrays: dict[str, dict[Key, Array]] = {}
        for area in AREAS:
            arrays[area] = {key: slot.array(buffer)[row, ...] for key, slot in self.shared[area].items()}
            for key, slot in self.own.get(row, {}).get(area, {}).items():
                arrays[area][key] = slot.array(buffer)
        return arrays


def _fits(leaf: Leaf | None, other: Leaf) -> bool:
    return leaf is not None and leaf.fixed and leaf.dtype == other.dtype and leaf.shape == other.shape
