"""Gymnasium environments that between them use every space, and every habit that a batched engine could trip over.

Each is deterministic given its seed and its actions. Episodes last 3 to 8 steps and end by termination or truncation,
so that 30 steps hold several resets. What an action looked like when it arrived (its type, dtype, shape and bytes) is
folded into the next observation, so that an engine that hands over another encoding gives other values.

Never imports torch: worker processes that only carry Gymnasium environments must not load it.
"""

from __future__ import annotations

import functools
import time
import zlib
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from tests.zoo.case import ZooCase


def digest(value: Any) -> int:
    """A number that changes with the type, dtype, shape or bytes of an action, and is the same in every process."""
    if isinstance(value, dict):
        text = "|".join(f"{key}:{digest(value[key])}" for key in sorted(value))
        return zlib.crc32(text.encode())
    if isinstance(value, (tuple, list)):
        return zlib.crc32("|".join(f"{digest(item)}" for item in value).encode())
    if isinstance(value, (str, int, float)) and not isinstance(value, np.generic):
        return zlib.crc32(f"{type(value).__name__}:{value}".encode())
    array = np.asarray(value)
    head = f"{array.dtype}:{array.shape}:".encode()
    return zlib.crc32(head + np.ascontiguousarray(array).tobytes())


class SampledEnv(gymnasium.Env[Any, Any]):
    """Observations drawn from any space, by a seed made of the episode's seed, the step count and all past actions.

    Args:
        observation_space: what to draw observations from.
        action_space: what actions are taken; they are digested, not checked.
        max_length: the longest episode, in steps.
        info: whether ``info`` dicts are non-empty (nothing must read them).
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
        max_length: int = 8,
        info: bool = False,
    ) -> None:
        self.observation_space = observation_space or spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = action_space or spaces.Discrete(3)
        self.max_length = max_length
        self.info = info
        self.count = 0
        self.length = max_length
        self.memory = 0

    def observe(self) -> Any:
        """The observation of the present state."""
        self.observation_space.seed((self.memory + 7919 * self.count) % (2**31))
        return self.observation_space.sample()

    def reward(self) -> Any:
        """The reward of the step just taken."""
        return float(self.memory % 1000) / 8.0

    def ends(self) -> tuple[Any, Any]:
        """Whether the episode is terminated, and whether it is truncated."""
        over = self.count >= self.length
        by_time = self.length % 3 == 0
        return over and not by_time, over and by_time

    def describe(self) -> dict[str, Any]:
        """The ``info`` dict."""
        return (
            {"count": np.int64(self.count), "memory": np.full((2,), self.memory % 5, np.float32)} if self.info else {}
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        self.length = int(self.np_random.integers(3, self.max_length + 1))
        self.memory = int(self.np_random.integers(0, 2**20))
        if options:
            self.memory = digest(options)
        return self.observe(), self.describe()

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.count += 1
        self.memory = (self.memory * 31 + digest(action)) % (2**31)
        terminated, truncated = self.ends()
        return self.observe(), self.reward(), terminated, truncated, self.describe()


class CountingEnv(gymnasium.Env[Any, Any]):
    """Observes how many steps the episode has lasted; has attributes and methods to be asked for from afar.

    Args:
        max_steps: the episode terminates after this many steps.
        start: the count right after a reset; ``reset(options={"start": s})`` overrides it.
        dtype: the dtype of the observation.
    """

    colour = "blue"

    def __init__(self, max_steps: int = 5, start: int = 0, dtype: str = "float32") -> None:
        bound = 10_000
        self.observation_space = spaces.Box(0, bound, (1,), np.dtype(dtype).type)
        self.action_space = spaces.Discrete(2)
        self.max_steps = max_steps
        self.start = start
        self.count = start
        self.resets = 0
        self.steps = 0
        self.note: dict[str, Any] = {"maker": "zoo", "tags": ["a", "b"]}

    def observe(self) -> Any:
        return np.full((1,), self.count, self.observation_space.dtype)

    def add(self, left: float, right: float = 1.0) -> float:
        """A method with an argument and a keyword argument."""
        return left + right + self.count

    def fail(self) -> None:
        """A method that raises."""
        raise ValueError("asked to fail")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.resets += 1
        self.count = (options or {}).get("start", self.start)
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.steps += 1
        self.count += 1
        return self.observe(), float(action), self.count - self.start >= self.max_steps, False, {}


class InPlaceEnv(SampledEnv):
    """Returns the very same observation array from every call, changed in place (field case 4)."""

    def __init__(self, max_length: int = 8) -> None:
        super().__init__(spaces.Box(-np.inf, np.inf, (4,), np.float32), spaces.Discrete(3), max_length)
        self.array = np.zeros((4,), np.float32)

    def observe(self) -> Any:
        self.array[:] = self.memory % 1000
        self.array[0] = self.count
        return self.array


class InPlaceDictEnv(SampledEnv):
    """A new dict each time, but holding the very same arrays, changed in place."""

    def __init__(self, max_length: int = 8) -> None:
        box = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        super().__init__(spaces.Dict({"left": box, "right": box}), spaces.Discrete(3), max_length)
        self.left = np.zeros((2,), np.float64)
        self.right = np.zeros((2,), np.float64)

    def observe(self) -> Any:
        self.left[:] = self.count
        self.right[:] = self.memory % 1000
        return {"left": self.left, "right": self.right}


class ScalarEnv(SampledEnv):
    """Rewards and end signals of a chosen Python or NumPy type.

    Args:
        reward_type: one of ``REWARDS``; ``"zero_int"`` gives the Python integer 0 now and then.
        end_type: ``"bool"`` or ``"np_bool"``.
    """

    def __init__(self, reward_type: str = "float", end_type: str = "bool", max_length: int = 8) -> None:
        super().__init__(spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2), max_length)
        self.reward_type = reward_type
        self.end_type = end_type

    def reward(self) -> Any:
        value = (self.memory % 4001) / 7.0 - 200.0
        if self.reward_type == "float":
            return value
        if self.reward_type == "int":
            return int(value)
        if self.reward_type == "zero_int":
            return 0 if self.count % 2 else int(value)
        if self.reward_type == "np_float64":
            return np.float64(value)
        if self.reward_type == "np_float32":
            return np.float32(value)
        if self.reward_type == "np_int64":
            return np.int64(value)
        if self.reward_type == "array_0d":
            return np.array(value)
        if self.reward_type == "array_1d":
            return np.array([value], np.float64)
        if self.reward_type == "bool":
            return value > 0
        if self.reward_type == "nan":
            return float("nan") if self.count % 2 else float("-inf")
        raise ValueError(f"unknown reward type {self.reward_type!r}")

    def ends(self) -> tuple[Any, Any]:
        terminated, truncated = super().ends()
        if self.end_type == "bool":
            return terminated, truncated
        if self.end_type == "np_bool":
            return np.bool_(terminated), np.bool_(truncated)
        if self.end_type == "mixed":
            return np.bool_(terminated), truncated
        if self.end_type == "int":
            return int(terminated), int(truncated)
        if self.end_type == "array_0d":
            return np.array(terminated), np.array(truncated)
        if self.end_type == "array_1d":
            return np.array([terminated]), np.array([truncated])
        raise ValueError(f"unknown end type {self.end_type!r}")


class BothEndsEnv(SampledEnv):
    """Terminated, truncated, or both at once, by turns."""

    def ends(self) -> tuple[Any, Any]:
        over = self.count >= self.length
        kind = self.length % 3
        return over and kind != 0, over and kind != 1


class VectorRewardEnv(SampledEnv):
    """Declares a ``reward_space`` of two entries, as multi-objective environments do."""

    reward_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def reward(self) -> Any:
        return np.array([self.memory % 100, self.count], np.float32)


class PixelEnv(gymnasium.Env[Any, Any]):
    """Pixels of 84 x 84 x 4 bytes, cheaply: one row and one column change."""

    def __init__(self, max_length: int = 8) -> None:
        self.observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
        self.action_space = spaces.Discrete(6)
        self.max_length = max_length
        self.count = 0
        self.length = max_length
        self.base = np.zeros((84, 84, 4), np.uint8)

    def observe(self) -> Any:
        frame = self.base.copy()
        frame[self.count % 84] = 255
        return frame

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        self.length = int(self.np_random.integers(3, self.max_length + 1))
        self.base[:] = self.np_random.integers(0, 200, (84, 1, 4), np.uint8)
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.count += 1
        self.base[:, int(action)] += 1
        return self.observe(), float(action), self.count >= self.length, False, {}


class SlowEnv(SampledEnv):
    """Takes a while to step.

    Args:
        seconds: how long a step sleeps.
    """

    def __init__(self, seconds: float = 0.002, max_length: int = 8) -> None:
        super().__init__(max_length=max_length)
        self.seconds = seconds

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        time.sleep(self.seconds)
        return super().step(action)


class MaskedActionEnv(SampledEnv):
    """A MultiDiscrete action whose mask is observed: torchrl flattens such an action into one choice."""

    def __init__(self, max_length: int = 8) -> None:
        mask = spaces.Box(0, 1, (3, 4), np.int8)
        observation = spaces.Dict({"board": spaces.Box(0, 9, (3, 4), np.float32), "action_mask": mask})
        super().__init__(observation, spaces.MultiDiscrete([3, 4]), max_length)


def time_limited(max_episode_steps: int = 4) -> gymnasium.Env[Any, Any]:
    """A counting env truncated by Gymnasium's own wrapper."""
    return gymnasium.wrappers.TimeLimit(CountingEnv(max_steps=1000), max_episode_steps)


def transformed_observation() -> gymnasium.Env[Any, Any]:
    """A wrapper that changes the space and the dtype of what it wraps."""
    inner = SampledEnv(spaces.Box(-1.0, 1.0, (2, 3), np.float32), spaces.Box(-2.0, 2.0, (2,), np.float32))
    return gymnasium.wrappers.FlattenObservation(inner)


def rescaled_action() -> gymnasium.Env[Any, Any]:
    """A continuous action rescaled by a wrapper."""
    inner = SampledEnv(action_space=spaces.Box(-2.0, 5.0, (2,), np.float32))
    return gymnasium.wrappers.RescaleAction(inner, np.float32(-1.0), np.float32(1.0))


def cartpole(max_episode_steps: int = 9) -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1", max_episode_steps=max_episode_steps)


def pendulum(max_episode_steps: int = 7) -> gymnasium.Env[Any, Any]:
    return gymnasium.make("Pendulum-v1", max_episode_steps=max_episode_steps)


def halfcheetah(max_episode_steps: int = 6) -> gymnasium.Env[Any, Any]:
    return gymnasium.make("HalfCheetah-v5", max_episode_steps=max_episode_steps)


_box = functools.partial(spaces.Box, -1.0, 1.0)
_discrete = spaces.Discrete(3)


def _sampled(observation: Any = None, action: Any = None, **kwargs: Any) -> functools.partial[SampledEnv]:
    return functools.partial(SampledEnv, observation, action, **kwargs)


GYM_ZOO: dict[str, ZooCase] = {
    # observations
    "box_float32": ZooCase(_sampled(_box((3,), np.float32))),
    "box_float64": ZooCase(_sampled(_box((2, 3), np.float64))),
    "box_float16": ZooCase(_sampled(_box((3,), np.float16))),
    "box_uint8": ZooCase(_sampled(spaces.Box(0, 255, (5,), np.uint8))),
    "box_int8": ZooCase(_sampled(spaces.Box(-5, 5, (5,), np.int8))),
    "box_int64": ZooCase(_sampled(spaces.Box(-(2**40), 2**40, (2,), np.int64))),
    "box_unbounded": ZooCase(_sampled(spaces.Box(-np.inf, np.inf, (3,), np.float32))),
    "box_half_bounded": ZooCase(
        _sampled(spaces.Box(np.array([0, -np.inf], np.float32), np.array([np.inf, 1], np.float32), dtype=np.float32))
    ),
    "box_0d": ZooCase(_sampled(_box((), np.float32))),
    "box_0d_in_dict": ZooCase(_sampled(spaces.Dict({"level": _box((), np.float64), "rest": _box((2,), np.float32)}))),
    "box_empty": ZooCase(_sampled(_box((0,), np.float32))),
    "discrete": ZooCase(_sampled(spaces.Discrete(5))),
    "multidiscrete_unequal": ZooCase(_sampled(spaces.MultiDiscrete([2, 3, 4]))),
    "multidiscrete_equal": ZooCase(_sampled(spaces.MultiDiscrete([3, 3]))),
    "multibinary": ZooCase(_sampled(spaces.MultiBinary(4))),
    "multibinary_2d": ZooCase(_sampled(spaces.MultiBinary((2, 3))), wrapper_fault="needs an integer n"),
    "dict": ZooCase(
        _sampled(
            spaces.Dict(
                {
                    "position": _box((3,), np.float32),
                    "pixels": spaces.Box(0, 255, (4, 4, 3), np.uint8),
                    "room": spaces.Discrete(4),
                    "doors": spaces.MultiBinary(3),
                }
            )
        )
    ),
    "dict_nested": ZooCase(
        _sampled(
            spaces.Dict(
                {
                    "body": spaces.Dict(
                        {"arm": spaces.Dict({"angle": _box((2,), np.float64)}), "mass": _box((1,), np.float32)}
                    ),
                    "clock": spaces.Discrete(6),
                }
            )
        )
    ),
    "dict_state": ZooCase(_sampled(spaces.Dict({"state": _box((3,), np.float32), "extra": _box((2,), np.float64)}))),
    "dict_state_and_observation": ZooCase(
        _sampled(spaces.Dict({"state": _box((3,), np.float32), "observation": _box((2,), np.float32)}))
    ),
    "dict_state_nested": ZooCase(
        _sampled(spaces.Dict({"body": spaces.Dict({"state": _box((3,), np.float32)})})),
        wrapper_fault="renames a nested state in the spec, not in the data",
    ),
    "tuple_equal": ZooCase(_sampled(spaces.Tuple((_box((3,), np.float32), _box((3,), np.float32))))),
    "tuple_in_dict": ZooCase(
        _sampled(spaces.Dict({"pair": spaces.Tuple((_box((2,), np.float64), _box((2,), np.float64)))}))
    ),
    "text": ZooCase(_sampled(spaces.Text(12, min_length=0)), non_tensor=True),
    "text_in_dict": ZooCase(
        _sampled(spaces.Dict({"mission": spaces.Text(20), "position": _box((2,), np.float32)})), non_tensor=True
    ),
    "sequence": ZooCase(_sampled(spaces.Sequence(_box((2,), np.float32), stack=True, seed=0)), dynamic=True),
    "sequence_in_dict": ZooCase(
        _sampled(
            spaces.Dict({"path": spaces.Sequence(_box((2,), np.float32), stack=True), "here": _box((2,), np.float32)})
        ),
        dynamic=True,
    ),
    "pixels": ZooCase(PixelEnv),
    # actions
    "action_box": ZooCase(_sampled(action=spaces.Box(-2.0, 2.0, (2,), np.float32))),
    "action_box_float64": ZooCase(_sampled(action=spaces.Box(-2.0, 2.0, (2,), np.float64))),
    "action_box_2d": ZooCase(_sampled(action=spaces.Box(-2.0, 2.0, (2, 2), np.float32))),
    "action_box_0d": ZooCase(_sampled(action=spaces.Box(-2.0, 2.0, (), np.float32))),
    "action_box_one": ZooCase(_sampled(action=spaces.Box(-2.0, 2.0, (1,), np.float32))),
    "action_box_uint8": ZooCase(_sampled(action=spaces.Box(0, 255, (2,), np.uint8))),
    "action_box_unbounded": ZooCase(_sampled(action=spaces.Box(-np.inf, np.inf, (2,), np.float32))),
    "action_discrete": ZooCase(_sampled(action=spaces.Discrete(4))),
    "action_discrete_one": ZooCase(_sampled(action=spaces.Discrete(1))),
    "action_multidiscrete_unequal": ZooCase(_sampled(action=spaces.MultiDiscrete([2, 3, 4]))),
    "action_multidiscrete_equal": ZooCase(_sampled(action=spaces.MultiDiscrete([3, 3]))),
    "action_multibinary": ZooCase(_sampled(action=spaces.MultiBinary(3))),
    "action_multibinary_one": ZooCase(
        _sampled(action=spaces.MultiBinary(1)), wrapper_fault="int() of an array of one entry"
    ),
    "action_dict": ZooCase(
        _sampled(
            action=spaces.Dict({"steer": spaces.Box(-1.0, 1.0, (2,), np.float32), "gear": spaces.Discrete(3)}),
        )
    ),
    "action_dict_one": ZooCase(
        _sampled(action=spaces.Dict({"steer": spaces.Box(-1.0, 1.0, (2,), np.float32)})),
        wrapper_fault="hands the env the bare array where its space says a dict",
    ),
    "action_tuple": ZooCase(_sampled(action=spaces.Tuple((_box((2,), np.float32), _box((2,), np.float32))))),
    "action_masked": ZooCase(MaskedActionEnv),
    # habits
    "counting": ZooCase(CountingEnv),
    "counting_int64": ZooCase(functools.partial(CountingEnv, dtype="int64")),
    "in_place": ZooCase(InPlaceEnv),
    "in_place_dict": ZooCase(InPlaceDictEnv),
    "info": ZooCase(_sampled(info=True)),
    "both_ends": ZooCase(BothEndsEnv),
    "vector_reward": ZooCase(VectorRewardEnv),
    "slow": ZooCase(SlowEnv),
    "time_limit": ZooCase(time_limited),
    "flatten_observation": ZooCase(transformed_observation),
    "rescale_action": ZooCase(rescaled_action),
    "one_step_episodes": ZooCase(functools.partial(CountingEnv, max_steps=1)),
    **{
        f"reward_{kind}": ZooCase(functools.partial(ScalarEnv, reward_type=kind))
        for kind in (
            "float",
            "int",
            "zero_int",
            "np_float64",
            "np_float32",
            "np_int64",
            "array_0d",
            "array_1d",
            "bool",
            "nan",
        )
    },
    **{
        f"end_{kind}": ZooCase(
            functools.partial(ScalarEnv, end_type=kind),
            wrapper_fault="end signals must be bool or have .any()" if kind == "int" else "",
        )
        for kind in ("np_bool", "mixed", "int", "array_0d", "array_1d")
    },
}
"""Every Gymnasium environment of the zoo, by name."""
