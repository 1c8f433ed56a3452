"""Drives a `gymnasium.Env` with plain numpy writes. This module never imports torch.

What it writes is, bit for bit, what torchrl's ``GymWrapper`` around the same environment would give. The wrapper's
rules, as far as data goes:

- an observation that is no dict is the leaf ``"observation"`` (or ``"pixels"`` if it looks like an image); a dict's
  entry ``"state"`` is renamed to ``"observation"`` if there is no such entry;
- ``Discrete`` and ``MultiDiscrete`` values are one-hot int64 vectors (categorical ones if asked for), in actions too;
- a tuple of equal spaces is one array with a leading dimension;
- the reward is float32 with shape ``[1]`` unless the environment has a ``reward_space``;
- ``terminated``, ``truncated`` and their union ``done`` are bool with shape ``[1]``, all false after a reset.

Where the wrapper raises (tuples of unequal spaces, ``MultiBinary`` and ``MultiDiscrete`` of several dimensions,
``Discrete`` that does not start at 0), a natural extension takes its place, described at `plan_space`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from shoal.drivers.base import Description, Driver, Messages
from shoal.engine.layout import Array
from shoal.engine.protocol import ResetInput, StepInput
from shoal.engine.schema import ACTION, DONE, INPUT, NEXT, OBSERVATION, REWARD, ROOT, Key, Leaf, Schema

ARRAY = "array"
ONE_HOT = "one_hot"
MULTI_ONE_HOT = "multi_one_hot"
CATEGORICAL = "categorical"
MULTI_CATEGORICAL = "multi_categorical"
TEXT = "text"
SEQUENCE = "sequence"
_LOOSE = (TEXT, SEQUENCE)

DONE_KEYS = (("done",), ("terminated",), ("truncated",))


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
    return Plan(encoding=_encoding(space, categorical))


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
    ) and not any(leaf.kind in _LOOSE for leaf in first.values()):
        return Plan(stacked=plans[0], length=len(plans), is_tuple=True)
    names = [str(index) for index in range(len(plans))]
    return Plan(children=dict(zip(names, plans, strict=True)), sources={n: int(n) for n in names}, is_tuple=True)


def _encoding(space: Any, categorical: bool) -> Encoding:
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
        inner = _encoding(space.feature_space, categorical)
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


def _writer(plan: Plan, arrays: dict[Key, Array], prefix: Key, name: Callable[[Key], str]) -> Writer:
    """What writes one value of a space to its arrays."""
    if plan.encoding is not None:
        return _leaf_writer(plan.encoding, arrays[prefix], name(prefix))
    if plan.stacked is not None:
        writers = [
            _writer(plan.stacked, {key: array[index, ...] for key, array in arrays.items()}, prefix, name)
            for index in range(plan.length)
        ]

        def write_stack(value: Any) -> None:
            for writer, item in zip(writers, value, strict=True):
                writer(item)

        return write_stack
    parts = [
        (plan.sources[child], _writer(sub, _below(arrays, (*prefix, child)), (*prefix, child), name))
        for child, sub in plan.children.items()
        if _below(arrays, (*prefix, child))
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


def _below(arrays: dict[Key, Array], prefix: Key) -> dict[Key, Array]:
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

    def write_array(value: Any) -> None:
        value = np.asarray(value)
        if value.shape != source_shape:
            value = _reshaped(value, shape, name)
        elif source_shape != shape:
            value = value.reshape(shape)
        array[...] = value

    def write_from_start(value: Any) -> None:
        write_array(np.asarray(value) - start)

    return write_from_start if np.any(start) else write_array


def _one_hot_writer(array: Array, size: int, start: Any, name: str) -> Writer:
    several = array.ndim > 1
    rows = np.arange(array.shape[0]) if several else None

    def write_one_hot(value: Any) -> None:
        index = np.asarray(value) - start
        if (index >= size).any() or (index < 0).any():
            raise ValueError(f"{name}: the value {value!r} is outside of its discrete space of {size} values")
        array[...] = 0
        if several:
            array[rows, index] = 1
        else:
            array[index.reshape(())] = 1

    return write_one_hot


def _reshaped(value: Array, shape: tuple[int, ...], name: str) -> Array:
    try:
        return value.reshape(shape)
    except ValueError:
        raise ValueError(f"{name}: expected shape {shape} by the space, found {value.shape}") from None


def _reader(plan: Plan, arrays: dict[Key, Array], prefix: Key) -> Reader:
    """What reads one action for the environment from its arrays, in memory of its own."""
    if plan.encoding is not None:
        return _leaf_reader(plan.encoding, arrays[prefix])
    if plan.stacked is not None:
        readers = [
            _reader(plan.stacked, {key: array[index, ...] for key, array in arrays.items()}, prefix)
            for index in range(plan.length)
        ]
        # A tuple of equal spaces takes an array for its tuple, and torchrl's wrapper passes one.
        gather: Callable[[list[Any]], Any] = tuple if plan.stacked.encoding is None else np.stack
        return lambda: gather([reader() for reader in readers])
    parts = [
        (plan.sources[child], _reader(sub, _below(arrays, (*prefix, child)), (*prefix, child)))
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


def _plain_spaces(env: gymnasium.Env[Any, Any], categorical: bool) -> tuple[Plan, Plan]:
    observation = plan_space(env.observation_space, categorical)
    if observation.encoding is not None or observation.stacked is not None or observation.is_tuple:
        name = "pixels" if looks_like_pixels(env.observation_space) else "observation"
        observation = Plan(children={name: observation}, sources={name: None})
    return observation, _plan_action(env, observation, categorical)


def _plan_action(env: gymnasium.Env[Any, Any], observation: Plan, categorical: bool) -> Plan:
    """The plan of the actions. Several choices under one mask of all their combinations are one choice among these."""
    space, mask = env.action_space, observation.children.get("action_mask")
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1 and mask is not None and mask.encoding:
        sizes = tuple(int(n) for n in space.nvec)
        if mask.encoding.shape == sizes:
            size = (int(np.prod(sizes)),)
            if categorical:
                return Plan(encoding=Encoding(CATEGORICAL, space.dtype.name, (), size, space=space))
            return Plan(encoding=Encoding(ONE_HOT, "bool", size, size, space=space))
    return plan_space(space, categorical)


def looks_like_pixels(space: Any) -> bool:
    """Whether torchrl's wrapper takes a box for an image: values 0 to 255 and three channels at the end."""
    return bool(
        isinstance(space, spaces.Box)
        and len(space.shape) == 3
        and space.shape[-1] == 3
        and (space.low == 0).all()
        and (space.high == 255).all()
    )


def reward_space(env: Any) -> Any:
    """The environment's own ``reward_space``, or None: few have one."""
    try:
        return env.get_wrapper_attr("reward_space")
    except AttributeError:
        return None


@dataclass(frozen=True)
class Details:
    """What a face needs to know of a Gymnasium environment.

    Attributes:
        observation_space: its space of observations.
        action_space: its space of actions.
        observation: plan of its observations.
        action: plan of its actions.
        reward: encoding of its rewards.
        action_key: key below which the action's leaves lie: ``("action",)``, or ``()`` for a dict of actions.
    """

    observation_space: Any
    action_space: Any
    observation: Plan
    action: Plan
    reward: Encoding
    action_key: Key


class GymnasiumDriver(Driver):
    """Drives one Gymnasium environment.

    Args:
        env: the environment; the driver owns it.
        row: its index in the batch, for messages.
        categorical: whether discrete values stay numbers.
        frame_skip: how often an action is repeated; rewards are summed.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], row: int, *, categorical: bool = False, frame_skip: int = 1
    ) -> None:
        self.env = env
        self._inner: Any = env
        self._row = row
        self._frame_skip = frame_skip
        observation, action = _plain_spaces(env, categorical)
        space = reward_space(env)
        reward = Encoding(ARRAY, "float32", (1,)) if space is None else _encoding(space, categorical)
        named = bool(action.children) and not action.is_tuple
        self._details = Details(
            env.observation_space, env.action_space, observation, action, reward, () if named else ("action",)
        )
        self._seeds_by_reset = True

    def schema(self) -> Schema:
        """The leaves of the environment."""
        details = self._details
        leaves = [Leaf(key, ACTION, e.dtype, e.shape, e.kind not in _LOOSE) for key, e in self._action_leaves().items()]
        for key, encoding in details.observation.leaves().items():
            leaves.append(Leaf(key, OBSERVATION, encoding.dtype, encoding.shape, encoding.kind not in _LOOSE))
        leaves.append(Leaf(("reward",), REWARD, details.reward.dtype, details.reward.shape))
        leaves.extend(Leaf(key, DONE, "bool", (1,)) for key in DONE_KEYS)
        return Schema(tuple(leaves))

    def as_wrapped(self) -> bool:
        """Whether torchrl's wrapper takes all of the environment's spaces, so that nothing is an extension of ours."""
        details = self._details
        encodings = [*details.observation.leaves().values(), *self._action_leaves().values()]
        lonely = details.action_key == () and len(self._action_leaves()) == 1
        return not lonely and not any(np.any(encoding.start) for encoding in encodings)

    def describe(self) -> Description:
        return Description("gymnasium", self.schema(), self._details, _text(self.env), chains_seed=True, native=True)

    def _action_leaves(self) -> dict[Key, Encoding]:
        return self._details.action.leaves(self._details.action_key)

    def attach(self, schema: Schema, arrays: dict[str, dict[Key, Array]], *, sent: bool) -> None:
        # Leaves by message get arrays of the driver's own; what is written there is sent.
        self._sent: dict[str, dict[Key, Array]] = {NEXT: {}, ROOT: {}}
        self._loose = [key for key, e in self._details.observation.leaves().items() if e.kind in _LOOSE]
        areas = {area: dict(slots) for area, slots in arrays.items()}
        self._given: dict[Key, Array] = {}
        for area, slots in areas.items():
            for leaf in schema.by_area[area].values():
                if leaf.key not in slots and leaf.key not in self._loose:
                    slots[leaf.key] = np.zeros(leaf.shape, leaf.dtype)
                    self._sent.get(area, self._given)[leaf.key] = slots[leaf.key]
        self._messages = bool(self._loose or self._sent[NEXT] or self._sent[ROOT])
        self._read_action = _reader(self._details.action, areas[INPUT], self._details.action_key)
        self._write_next = self._observation_writer(areas[NEXT])
        self._write_root = self._observation_writer(areas[ROOT])
        self._write_reward = self._reward_writer(areas[NEXT][("reward",)])
        self._next_flags = [memoryview(areas[NEXT][key].data) for key in DONE_KEYS]
        self._root_flags = [memoryview(areas[ROOT][key].data) for key in DONE_KEYS]
        self._observation_pairs = [
            (areas[ROOT][key], areas[NEXT][key]) for key in self._details.observation.leaves() if key in areas[NEXT]
        ]

    def _observation_writer(self, arrays: dict[Key, Array]) -> Writer:
        plan = self._details.observation

        def name(key: Key) -> str:
            return f"row {self._row}, observation {'.'.join(key)!r}"

        if len(plan.children) == 1 and next(iter(plan.sources.values())) is None:
            ((child, inner),) = plan.children.items()
            if inner.encoding is not None and inner.encoding.kind in _LOOSE:
                return lambda value: None
            return _writer(inner, _below(arrays, (child,)), (child,), name)
        return _writer(plan, arrays, (), name)

    def _reward_writer(self, array: Array) -> Writer:
        if array.dtype == np.float32 and array.shape == (1,):
            cell: Any = memoryview(array.data)

            def write_cell(value: Any) -> None:
                if isinstance(value, np.ndarray):
                    value = value.reshape(()).item()
                cell[0] = 0.0 if value is None else value

            return write_cell
        shape, name = array.shape, f"row {self._row}, reward"

        def write_reward(value: Any) -> None:
            value = np.asarray(value)
            array[...] = value if value.shape == shape else _reshaped(value, shape, name)

        return write_reward

    def reset(self, given: ResetInput | None) -> Messages | None:
        observation = self._reset(given.kwargs if given is not None else {})
        if self._messages:
            return self._collect(ROOT, observation)
        return None

    def _reset(self, kwargs: dict[str, Any]) -> Any:
        observation, _ = self._inner.reset(**kwargs)
        self._write_root(observation)
        done, terminated, truncated = self._root_flags
        done[0] = terminated[0] = truncated[0] = False
        return observation

    def step(self, given: StepInput | None) -> Messages | None:
        if self._given and given is not None:
            self._take(given)
        observation, done = self._step()
        if self._messages:
            return self._collect(NEXT, observation)
        return None

    def _step(self) -> tuple[Any, bool]:
        observation, reward, terminated, truncated, _ = self._inner.step(self._read_action())
        if self._frame_skip > 1:
            for _ in range(self._frame_skip - 1):
                if terminated or truncated:
                    break
                observation, more, terminated, truncated, _ = self._inner.step(self._read_action())
                reward = reward + more
        done = bool(terminated or truncated)
        self._write_next(observation)
        self._write_reward(reward)
        flags = self._next_flags
        flags[0][0] = done
        flags[1][0] = terminated
        flags[2][0] = truncated
        return observation, done

    def step_and_maybe_reset(self, given: StepInput | None) -> Messages | None:
        if self._given and given is not None:
            self._take(given)
        observation, done = self._step()
        messages = self._collect(NEXT, observation) if self._messages else None
        if done:
            observation = self._reset({})
        else:
            for root, following in self._observation_pairs:
                root[...] = following
            flags = self._root_flags
            flags[0][0] = flags[1][0] = flags[2][0] = False
        if messages is not None:
            messages.update(self._collect(ROOT, observation))
        return messages

    def _take(self, given: StepInput) -> None:
        for key, array in self._given.items():
            array[...] = given.leaves[key]

    def _collect(self, area: str, observation: Any) -> Messages:
        """What travels by message of the values just written."""
        messages: Messages = {(area, key): array.copy() for key, array in self._sent[area].items()}
        for key in self._loose:
            value = observation
            plan = self._details.observation
            for name in key:
                source = plan.sources[name]
                value = value if source is None else value[source]
                plan = plan.children[name]
            messages[area, key] = value if plan.encoding is None else _loose_value(plan.encoding, value)
        return messages

    def seed(self, seed: int | None, static: bool) -> int | None:
        if self._seeds_by_reset:
            try:
                self._reset({"seed": seed})
            except TypeError:
                if not hasattr(self._inner, "seed"):
                    raise
                self._seeds_by_reset = False
        if not self._seeds_by_reset:
            self._inner.seed(seed)
        return seed if static or seed is None else next_seed(seed)

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any, kwargs: dict[str, Any]) -> None:
        return None

    def get_attr(self, path: tuple[str, ...]) -> Any:
        first, *rest = path
        value = self.env.get_wrapper_attr(first)
        for name in rest:
            value = getattr(value, name)
        return value

    def set_attr(self, name: str, value: Any) -> None:
        if not self.env.has_wrapper_attr(name):
            raise AttributeError(f"the environment of row {self._row} ({_text(self.env)}) has no attribute {name!r}")
        self.env.set_wrapper_attr(name, value, force=False)

    def close(self) -> None:
        self.env.close()


def _loose_value(encoding: Encoding, value: Any) -> Any:
    """A value without a fixed shape, in memory of its own."""
    return value if encoding.kind == TEXT else np.array(value, dtype=encoding.dtype).reshape(encoding.shape)


def next_seed(seed: int) -> int:
    """The value after ``seed`` in torchrl's chain of seeds (``torchrl._utils.seed_generator``)."""
    return int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % (2**32 - 1)


def _text(env: Any) -> str:
    try:
        return str(env)
    except Exception:
        return f"{type(env).__name__}()"
