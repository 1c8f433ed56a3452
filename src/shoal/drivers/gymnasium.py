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
``Discrete`` that does not start at 0), a natural extension takes its place: see `shoal.drivers.spaces.plan_space`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from shoal.drivers.base import Description, Driver, Messages
from shoal.drivers.spaces import (
    ARRAY,
    CATEGORICAL,
    LOOSE,
    ONE_HOT,
    Encoding,
    Plan,
    Writer,
    below,
    encode_space,
    loose_value,
    make_reader,
    make_writer,
    plan_space,
    reshaped,
)
from shoal.engine.layout import Array
from shoal.engine.protocol import ResetInput, StepInput
from shoal.engine.schema import ACTION, DONE, INPUT, NEXT, OBSERVATION, REWARD, ROOT, Key, Leaf, Schema

DONE_KEYS = (("done",), ("terminated",), ("truncated",))


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
        reward = Encoding(ARRAY, "float32", (1,)) if space is None else encode_space(space, categorical)
        named = bool(action.children) and not action.is_tuple
        self._details = Details(
            env.observation_space, env.action_space, observation, action, reward, () if named else ("action",)
        )
        self._seeds_by_reset = True

    def schema(self) -> Schema:
        """The leaves of the environment."""
        details = self._details
        leaves = [Leaf(key, ACTION, e.dtype, e.shape, e.kind not in LOOSE) for key, e in self._action_leaves().items()]
        for key, encoding in details.observation.leaves().items():
            leaves.append(Leaf(key, OBSERVATION, encoding.dtype, encoding.shape, encoding.kind not in LOOSE))
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
        self._loose = [key for key, e in self._details.observation.leaves().items() if e.kind in LOOSE]
        areas = {area: dict(slots) for area, slots in arrays.items()}
        self._given: dict[Key, Array] = {}
        for area, slots in areas.items():
            for leaf in schema.by_area[area].values():
                if leaf.key not in slots and leaf.key not in self._loose:
                    slots[leaf.key] = np.zeros(leaf.shape, leaf.dtype)
                    self._sent.get(area, self._given)[leaf.key] = slots[leaf.key]
        self._messages = bool(self._loose or self._sent[NEXT] or self._sent[ROOT])
        reward = areas[NEXT][("reward",)]
        self._simple_reward = reward.shape == (1,) and reward.dtype.kind == "f"
        self._read_action = make_reader(self._details.action, areas[INPUT], self._details.action_key)
        self._write_next = self._observation_writer(areas[NEXT])
        self._write_root = self._observation_writer(areas[ROOT])
        self._write_reward = self._reward_writer(areas[NEXT][("reward",)])
        self._next_flags = [memoryview(areas[NEXT][key].data) for key in DONE_KEYS]
        self._root_flags = [memoryview(areas[ROOT][key].data) for key in DONE_KEYS]

    def _observation_writer(self, arrays: dict[Key, Array]) -> Writer:
        plan = self._details.observation

        def name(key: Key) -> str:
            return f"row {self._row}, observation {'.'.join(key)!r}"

        if len(plan.children) == 1 and next(iter(plan.sources.values())) is None:
            ((child, inner),) = plan.children.items()
            if inner.encoding is not None and inner.encoding.kind in LOOSE:
                return lambda value: None
            return make_writer(inner, below(arrays, (child,)), (child,), name)
        return make_writer(plan, arrays, (), name)

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
            value = np.asarray(0.0 if value is None else value)
            array[...] = value if value.shape == shape else reshaped(value, shape, name)

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
        self.was_reset = done
        if done:
            observation = self._reset({})
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
            messages[area, key] = value if plan.encoding is None else loose_value(plan.encoding, value)
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


def next_seed(seed: int) -> int:
    """The value after ``seed`` in torchrl's chain of seeds (``torchrl._utils.seed_generator``)."""
    return int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % (2**32 - 1)


def _text(env: Any) -> str:
    try:
        return str(env)
    except Exception:
        return f"{type(env).__name__}()"
