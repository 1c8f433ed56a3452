"""Gymnasium spaces as leaves: which arrays carry their values, and what writes and reads those.

This module never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from gymnasium import spaces

from shoal.engine.layout import Array
from shoal.engine.schema import Key

ARRAY = "array"
ONE_HOT = "one_hot"
MULTI_ONE_HOT = "multi_one_hot"
CATEGORICAL = "categorical"
MULTI_CATEGORICAL = "multi_categorical"
TEXT = "text"
SEQUENCE = "sequence"
LOOSE = (TEXT, SEQUENCE)


@dataclass(frozen=True)
class Encoding:
    """How the values of one space become one array.

    Attributes:
        kind: which encoding.
        dtype: name of the array's dtype.
        shape: its shape.
        sizes: number of choices, of each choice for the ``MULTI_*`` kinds.
        start: first value of a discrete space, of each choice for several.
        space: the space itself.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    start: Any = 0
    space: Any = None


@dataclass(frozen=True)
class Plan:
    """How the values of a space become leaves: a tree like the space's own.

    Attributes:
        encoding: of a space that is one leaf.
        children: of a dict or tuple that is several leaves, by the name that the leaf key gets.
        sources: the name or index in the environment's own value of each child.
        stacked: for a tuple of equal spaces: the plan of one element; the leaf stacks them.
        length: how many are stacked.
    """

    encoding: Encoding | None = None
    children: dict[str, Plan] = field(default_factory=dict)
    sources: dict[str, Any] = field(default_factory=dict)
    stacked: Plan | None = None
    length: int = 0
    is_tuple: bool = False

    def leaves(self, prefix: Key = ()) -> dict[Key, Encoding]:
        """The leaves by key, with the shape that stacking gives them."""
        if self.encoding is not None:
            return {prefix: self.encoding}
        if self.stacked is not None:
            inner = self.stacked.leaves(prefix)
            return {key: replace(leaf, shape=(self.length, *leaf.shape)) for key, leaf in inner.items()}
        found: dict[Key, Encoding] = {}
        for name, child in self.children.items():
            found.update(child.leaves((*prefix, name)))
        return found


def plan_space(space: Any, categorical: bool = False) -> Plan:
    """How values of a Gymnasium space become leaves.

    Where torchrl's conversion raises, this one goes on: a tuple of unequal spaces becomes a nested dict with the keys
    ``"0"``, ``"1"``, ...; a ``MultiBinary`` of several dimensions an int8 array of its shape; a ``MultiDiscrete`` of
    several dimensions an array of its dtype and shape; a ``Discrete`` that starts elsewhere is counted from its start.

    Args:
        space: the space.
        categorical: whether discrete values stay numbers rather than one-hot vectors.

    Raises:
        TypeError: no way to carry values of this space.
    """
    if isinstance(space, spaces.Dict):
        return _plan_dict(space, categorical)
    if isinstance(space, spaces.Tuple):
        return _plan_tuple(space, categorical)
    return Plan(encoding=encode_space(space, categorical))


def _plan_dict(space: spaces.Dict, categorical: bool) -> Plan:
    children, sources = {}, {}
    for source, child in space.spaces.items():
        if not isinstance(source, str):
            raise TypeError(f"keys of a Dict space must be strings, found {source!r} in {space}")
        name = "observation" if source == "state" and "observation" not in space.spaces else source
        children[name] = plan_space(child, categorical)
        sources[name] = source
    return Plan(children=children, sources=sources)


def _plan_tuple(space: Any, categorical: bool) -> Plan:
    plans = [plan_space(child, categorical) for child in space.spaces]
    first = plans[0].leaves()
    alike = {key: (leaf.kind, leaf.dtype, leaf.shape, leaf.sizes) for key, leaf in first.items()}
    if all(
        {key: (leaf.kind, leaf.dtype, leaf.shape, leaf.sizes) for key, leaf in plan.leaves().items()} == alike
        for plan in plans[1:]
    ) and not any(leaf.kind in LOOSE for leaf in first.values()):
        return Plan(stacked=plans[0], length=len(plans), is_tuple=True)
    names = [str(index) for index in range(len(plans))]
    return Plan(children=dict(zip(names, plans, strict=True)), sources={n: int(n) for n in names}, is_tuple=True)


def encode_space(space: Any, categorical: bool) -> Encoding:
    if isinstance(space, spaces.Box):
        return Encoding(ARRAY, space.dtype.name, space.shape or (1,), space=space)
    if isinstance(space, spaces.Discrete):
        size, start = (int(space.n),), int(space.start)
        if categorical:
            return Encoding(CATEGORICAL, space.dtype.name, (), size, start, space)
        return Encoding(ONE_HOT, "int64", size, size, start, space)
    if isinstance(space, spaces.MultiBinary):
        return Encoding(ARRAY, space.dtype.name, tuple(space.shape), space=space)
    if isinstance(space, spaces.MultiDiscrete):
        return _multi_discrete(space, categorical)
    if isinstance(space, spaces.Text):
        return Encoding(TEXT, "object", (), space=space)
    if isinstance(space, spaces.Sequence) and space.stack and isinstance(space.feature_space, spaces.Box):
        inner = encode_space(space.feature_space, categorical)
        return Encoding(SEQUENCE, inner.dtype, (-1, *inner.shape), space=space)
    raise TypeError(
        f"shoal has no array for a Gymnasium space of type {type(space).__name__} ({space}); wrap the environment so "
        "that it gives Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict or Tuple spaces, or return a torchrl "
        "environment from the factory"
    )


def _multi_discrete(space: spaces.MultiDiscrete, categorical: bool) -> Encoding:
    sizes = tuple(int(n) for n in np.ravel(space.nvec))
    start = np.asarray(space.start) if np.any(space.start) else 0
    if space.nvec.ndim > 1:
        return Encoding(ARRAY, space.dtype.name, space.shape, space=space)
    if categorical:
        return Encoding(MULTI_CATEGORICAL, space.dtype.name, space.shape, sizes, start, space)
    if len(set(sizes)) == 1:
        return Encoding(ONE_HOT, "int64", (len(sizes), sizes[0]), sizes[:1], start, space)
    return Encoding(MULTI_ONE_HOT, "int64", (sum(sizes),), sizes, start, space)


Writer = Callable[[Any], None]
Reader = Callable[[], Any]


def make_writer(plan: Plan, arrays: dict[Key, Array], prefix: Key, name: Callable[[Key], str]) -> Writer:
    """What writes one value of a space to its arrays."""
    if plan.encoding is not None:
        return _leaf_writer(plan.encoding, arrays[prefix], name(prefix))
    if plan.stacked is not None:
        writers = [
            make_writer(plan.stacked, {key: array[index, ...] for key, array in arrays.items()}, prefix, name)
            for index in range(plan.length)
        ]

        def write_stack(value: Any) -> None:
            for writer, item in zip(writers, value, strict=True):
                writer(item)

        return write_stack
    parts = [
        (plan.sources[child], make_writer(sub, below(arrays, (*prefix, child)), (*prefix, child), name))
        for child, sub in plan.children.items()
        if below(arrays, (*prefix, child))
    ]

    def write_parts(value: Any) -> None:
        for source, writer in parts:
            try:
                item = value[source]
            except (KeyError, IndexError):
                raise KeyError(
                    f"the observation has no entry {source!r}, which the observation space has; found "
                    f"{sorted(value) if isinstance(value, Mapping) else len(value)}"
                ) from None
            writer(item)

    return write_parts


def below(arrays: dict[Key, Array], prefix: Key) -> dict[Key, Array]:
    return {key: array for key, array in arrays.items() if key[: len(prefix)] == prefix}


def _leaf_writer(encoding: Encoding, array: Array, name: str) -> Writer:
    if encoding.kind == ONE_HOT:
        return _one_hot_writer(array, encoding.sizes[0], encoding.start, name)
    if encoding.kind == MULTI_ONE_HOT:
        offsets = np.cumsum((0, *encoding.sizes[:-1])) - encoding.start
        limits = np.array(encoding.sizes) + encoding.start

        def write_multi_one_hot(value: Any) -> None:
            if np.any(value >= limits) or np.any(np.asarray(value) < encoding.start):
                raise ValueError(f"{name}: the value {value!r} is outside of its space {encoding.space}")
            array[...] = 0
            array[offsets + value] = 1

        return write_multi_one_hot
    shape, start = array.shape, encoding.start
    source_shape = tuple(encoding.space.shape)

    ndarray, same = np.ndarray, source_shape == shape

    def write_array(value: Any) -> None:
        if value.__class__ is not ndarray or value.shape != source_shape:
            value = np.asarray(value)
            if value.shape != source_shape:
                value = reshaped(value, shape, name)
        array[...] = value if same else value.reshape(shape)

    def write_from_start(value: Any) -> None:
        write_array(np.asarray(value) - start)

    return write_from_start if np.any(start) else write_array


def _one_hot_writer(array: Array, size: int, start: Any, name: str) -> Writer:
    several = array.ndim > 1
    rows = np.arange(array.shape[0]) if several else None

    clear = array.fill

    def write_one_hot(value: Any) -> None:
        if isinstance(value, (int, np.integer)) and not several and start <= value < start + size:
            clear(0)
            array[value - start] = 1
            return
        index = np.asarray(value) - start
        if (index >= size).any() or (index < 0).any():
            raise ValueError(f"{name}: the value {value!r} is outside of its discrete space of {size} values")
        array[...] = 0
        if several:
            array[rows, index] = 1
        else:
            array[index.reshape(())] = 1

    return write_one_hot


def reshaped(value: Array, shape: tuple[int, ...], name: str) -> Array:
    try:
        return value.reshape(shape)
    except ValueError:
        raise ValueError(f"{name}: expected shape {shape} by the space, found {value.shape}") from None


def make_reader(plan: Plan, arrays: dict[Key, Array], prefix: Key) -> Reader:
    """What reads one action for the environment from its arrays, in memory of its own."""
    if plan.encoding is not None:
        return _leaf_reader(plan.encoding, arrays[prefix])
    if plan.stacked is not None:
        readers = [
            make_reader(plan.stacked, {key: array[index, ...] for key, array in arrays.items()}, prefix)
            for index in range(plan.length)
        ]
        # A tuple of equal spaces takes an array for its tuple, and torchrl's wrapper passes one.
        gather: Callable[[list[Any]], Any] = tuple if plan.stacked.encoding is None else np.stack
        return lambda: gather([reader() for reader in readers])
    parts = [
        (plan.sources[child], make_reader(sub, below(arrays, (*prefix, child)), (*prefix, child)))
        for child, sub in plan.children.items()
    ]
    if plan.is_tuple:
        return lambda: tuple([reader() for _, reader in parts])
    # Inside of a dict torchrl's wrapper leaves a discrete action an array of no dimension.
    boxed = [
        (source, (lambda reader=reader: np.asarray(reader())) if sub.encoding is not None else reader)
        for (source, reader), sub in zip(parts, plan.children.values(), strict=True)
    ]
    return lambda: {source: reader() for source, reader in boxed}


def _leaf_reader(encoding: Encoding, array: Array) -> Reader:
    read: Reader
    start = encoding.start
    if encoding.kind == ONE_HOT and array.ndim == 1:
        argmax = array.argmax
        read = lambda: int(argmax())  # noqa: E731
    elif encoding.kind == ONE_HOT:
        read = lambda: array.argmax(-1)  # noqa: E731
    elif encoding.kind == MULTI_ONE_HOT:
        bounds = np.cumsum((0, *encoding.sizes))
        parts = [array[bounds[i] : bounds[i + 1]] for i in range(len(encoding.sizes))]
        read = lambda: np.array([part.argmax() for part in parts])  # noqa: E731
    elif encoding.kind == CATEGORICAL:
        read = array.item
    else:
        read = array.copy
    return (lambda: read() + start) if np.any(start) else read


def loose_value(encoding: Encoding, value: Any) -> Any:
    """A value without a fixed shape, in memory of its own."""
    return value if encoding.kind == TEXT else np.array(value, dtype=encoding.dtype).reshape(encoding.shape)
