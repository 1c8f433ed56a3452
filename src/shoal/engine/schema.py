"""What a sub-environment looks like from outside: its leaves, their dtypes and shapes.

A *leaf* is one array of an environment's input or output, named by its nested key. A schema lists the leaves of one
row. Leaves are grouped into three *areas*, after the way data flows in one exchange:

- ``INPUT``: what a step reads (actions and states);
- ``NEXT``: what a step gives (observations, rewards, dones);
- ``ROOT``: what the following step starts from (observations and dones, after a reset where the row was done).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

Key = tuple[str, ...]
"""A nested key: one string a level."""

INPUT = "input"
NEXT = "next"
ROOT = "root"
AREAS = (INPUT, NEXT, ROOT)

ACTION = "action"
STATE = "state"
OBSERVATION = "observation"
REWARD = "reward"
DONE = "done"

_AREAS_OF_ROLE = {
    ACTION: (INPUT,),
    STATE: (INPUT,),
    OBSERVATION: (NEXT, ROOT),
    REWARD: (NEXT,),
    DONE: (NEXT, ROOT),
}


@dataclass(frozen=True)
class Leaf:
    """One array of one row.

    Args:
        key: nested key of the leaf.
        role: one of ``ACTION``, ``STATE``, ``OBSERVATION``, ``REWARD``, ``DONE``.
        dtype: name of the dtype, as numpy spells it (``"float32"``, ``"bool"``) or ``"bfloat16"``; ``"object"`` for
            what is not an array.
        shape: shape of one row's value, the sub-environment's own batch dimensions included; -1 where it varies.
        fixed: whether the value can live in a buffer: always an array, always of that dtype and shape.
    """

    key: Key
    role: str
    dtype: str
    shape: tuple[int, ...]
    fixed: bool = True


@dataclass(frozen=True)
class Schema:
    """The leaves of one row, in a fixed order."""

    leaves: tuple[Leaf, ...]

    @cached_property
    def by_area(self) -> dict[str, dict[Key, Leaf]]:
        """The leaves of each area by key. A reward that is also a state is carried over into ``ROOT``."""
        areas: dict[str, dict[Key, Leaf]] = {area: {} for area in AREAS}
        for leaf in self.leaves:
            for area in _AREAS_OF_ROLE[leaf.role]:
                areas[area][leaf.key] = leaf
        for key, leaf in areas[NEXT].items():
            if leaf.role == REWARD and key in areas[INPUT]:
                areas[ROOT][key] = leaf
        return areas

    def buffered(self, area: str) -> Iterable[Leaf]:
        """The leaves of an area that live in buffers."""
        return (leaf for leaf in self.by_area[area].values() if leaf.fixed)

    def messages(self, area: str) -> Iterable[Leaf]:
        """The leaves of an area that travel by message."""
        return (leaf for leaf in self.by_area[area].values() if not leaf.fixed)

    def without_buffers(self) -> Schema:
        """The same leaves, all of them by message."""
        return Schema(tuple(replace(leaf, fixed=False) for leaf in self.leaves))
