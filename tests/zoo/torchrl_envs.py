"""torchrl environments with every shape of spec, and every habit that a batched engine could trip over.

Most are one class, `DescribedEnv`, whose leaves are given as data; the fuzz test draws such descriptions at random.
Values follow from the seed, the step count and all past actions by integer arithmetic, so they are the same in every
process. Episodes are short, so that 30 steps hold several resets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NonTensorData, TensorClass, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiOneHot, NonTensor, OneHot, TensorSpec, Unbounded
from torchrl.envs import (
    CatFrames,
    Compose,
    DoubleToFloat,
    EnvBase,
    GymWrapper,
    InitTracker,
    RenameTransform,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
)

from tests.zoo import gymnasium_envs
from tests.zoo.case import ZooCase

Key = tuple[str, ...]


@dataclass(frozen=True)
class Leaf:
    """One leaf of a described environment.

    Args:
        key: its nested key.
        dtype: the name of a torch dtype; ``"text"`` is a string, ``"object"`` a Python object.
        shape: what follows the batch dimensions; ``-1`` is a length that changes from step to step.
        kind: for actions, ``"unbounded"``, ``"bounded"``, ``"onehot"``, ``"categorical"``, ``"binary"`` or
            ``"multionehot"``.
    """

    key: Key
    dtype: str = "float32"
    shape: tuple[int, ...] = (3,)
    kind: str = "unbounded"

    @property
    def is_tensor(self) -> bool:
        return self.dtype not in ("text", "object")


@dataclass(frozen=True)
class Ends:
    """One group of end signals, side by side at one level.

    Args:
        level: the key of the nested TensorDict that holds them; empty for the root.
        shape: what follows the batch dimensions: ``(3, 1)`` for three agents that end one by one.
        names: which of ``done``, ``terminated`` and ``truncated`` the environment's step returns and declares.
    """

    level: Key = ()
    shape: tuple[int, ...] = (1,)
    names: tuple[str, ...] = ("done", "terminated", "truncated")


@dataclass(frozen=True)
class Description:
    """All that a `DescribedEnv` is.

    Args:
        observations: observation leaves.
        actions: action leaves.
        rewards: reward leaves.
        states: keys of observation leaves that are also state: read from the input of step and reset.
        ends: groups of end signals.
        levels: nested TensorDicts that have batch dimensions of their own, such as ``((("agents",), (3,)),)``.
        batch: the batch size of one environment.
        shortest: the fewest steps in an episode; the longest is four more.
    """

    observations: tuple[Leaf, ...] = (Leaf(("observation",)),)
    actions: tuple[Leaf, ...] = (Leaf(("action",), shape=(2,)),)
    rewards: tuple[Leaf, ...] = (Leaf(("reward",), shape=(1,)),)
    states: tuple[Key, ...] = ()
    ends: tuple[Ends, ...] = (Ends(),)
    levels: tuple[tuple[Key, tuple[int, ...]], ...] = ()
    batch: tuple[int, ...] = ()
    shortest: int = 3


def fold(value: Any, batch: tuple[int, ...]) -> Tensor:
    """One integer for each entry of the batch that changes with the value."""
    if not isinstance(value, Tensor):
        number = sum((index + 1) * ord(letter) for index, letter in enumerate(str(value)))
        return torch.full(batch, number % 9973, dtype=torch.int64)
    flat = value.detach().to(torch.float64).reshape((*batch, -1))
    weights = torch.arange(1, flat.shape[-1] + 1, dtype=torch.float64)
    return (flat * weights * 64).floor().sum(-1).to(torch.int64) % 9973


def make_spec(leaf: Leaf, batch: tuple[int, ...]) -> TensorSpec:
    """The spec of one leaf."""
    shape = (*batch, *leaf.shape)
    if leaf.dtype == "text":
        return NonTensor(shape=batch, example_data="text")
    if leaf.dtype == "object":
        return NonTensor(shape=batch, example_data={"kind": "object"})
    dtype: torch.dtype = getattr(torch, leaf.dtype)
    if leaf.kind == "bounded":
        return Bounded(-1, 1, shape=shape, dtype=dtype)
    if leaf.kind == "onehot":
        return OneHot(leaf.shape[-1], shape=shape, dtype=dtype)
    if leaf.kind == "categorical":
        return Categorical(5, shape=shape, dtype=dtype)
    if leaf.kind == "binary":
        return Binary(leaf.shape[-1], shape=shape, dtype=dtype)
    if leaf.kind == "multionehot":
        return MultiOneHot([2, 3], shape=shape, dtype=dtype)
    if dtype is torch.bool:
        return Categorical(2, shape=shape, dtype=dtype)
    return Unbounded(shape=shape, dtype=dtype)


class DescribedEnv(EnvBase):
    """An environment whose leaves, batch and ways to end are given as data.

    Each entry of each group of end signals has an age and an episode number of its own, so agents may end and be
    reset one by one. With a group at the root, that group rules: its entry is done once all nested ones are (or, if
    there are none, at its own age), and resetting it resets everything below.

    Args:
        description: what the environment looks like.
        offset: shifts all values, to tell rows apart without a seed.
    """

    def __init__(self, description: Description | None = None, offset: int = 0) -> None:
        self.description = description or Description()
        super().__init__(batch_size=self.description.batch)
        self.seed_value = offset
        self.memory = torch.zeros(self.description.batch, dtype=torch.int64)
        self.count = torch.zeros_like(self.memory)
        self.ages = [torch.zeros((*self.description.batch, *group.shape), dtype=torch.int64) for group in self._ends]
        self.episodes = [torch.zeros_like(age) for age in self.ages]
        self.observation_spec = self._compose(self.description.observations)
        self.action_spec = self._compose(self.description.actions)
        self.reward_spec = self._compose(self.description.rewards)
        self.state_spec = self._compose(
            tuple(leaf for leaf in self.description.observations if leaf.key in self.description.states)
        )
        done = tuple(Leaf((*group.level, name), "bool", group.shape) for group in self._ends for name in group.names)
        self.full_done_spec = self._compose(
            done, lambda leaf, batch: Categorical(2, shape=(*batch, *leaf.shape), dtype=torch.bool)
        )

    @property
    def _ends(self) -> tuple[Ends, ...]:
        return self.description.ends

    def _level_shape(self, level: Key) -> tuple[int, ...]:
        """The batch size of a nested TensorDict: that of the deepest declared level above it."""
        shape = self.description.batch
        for prefix, extra in self.description.levels:
            if level[: len(prefix)] == prefix:
                shape = (*self.description.batch, *extra)
        return shape

    def _compose(
        self, leaves: tuple[Leaf, ...], make: Callable[[Leaf, tuple[int, ...]], TensorSpec] = make_spec
    ) -> Composite:
        spec = Composite(shape=self.description.batch)
        for leaf in leaves:
            for depth in range(1, len(leaf.key)):
                level = leaf.key[:depth]
                if level not in spec.keys(True):
                    spec[level] = Composite(shape=self._level_shape(level))
            spec[leaf.key] = make(leaf, self.description.batch)
        return spec

    def _write(self, out: TensorDict, key: Key, value: Any) -> None:
        for depth in range(1, len(key)):
            level = key[:depth]
            if level not in out.keys(True):
                out[level] = TensorDict(batch_size=self._level_shape(level))
        out[key] = value

    def _value(self, leaf: Leaf, index: int) -> Any:
        batch = self.description.batch
        base = (self.seed_value * 1009 + self.count * 13 + self.memory) % 9973 + 17 * index
        if not leaf.is_tensor:
            number = int(base.sum())
            text = f"{leaf.key[-1]} {number} " + "é" * (number % 40)
            data = text if leaf.dtype == "text" else {"number": number, "text": text, "items": [number, None]}
            return NonTensorData(data, batch_size=batch)
        shape = tuple(1 + int(base.sum()) % 4 if size == -1 else size for size in leaf.shape)
        size = torch.Size(shape).numel()
        whole = (base.unsqueeze(-1) * (2 * index + 1) + 7 * torch.arange(size)) % 251
        whole = whole.reshape((*batch, *shape))
        dtype: torch.dtype = getattr(torch, leaf.dtype)
        if dtype is torch.bool:
            return whole % 2 == 0
        if dtype.is_floating_point:
            return ((whole - 125) / 8).to(dtype)
        return (whole // 2).to(dtype)

    def _ended(self) -> list[tuple[Tensor, Tensor]]:
        """For each group of end signals, what is terminated and what is truncated."""
        result = []
        for number, (age, episode) in enumerate(zip(self.ages, self.episodes, strict=True)):
            place = torch.arange(torch.Size(self._ends[number].shape).numel()).reshape(self._ends[number].shape)
            length = self.description.shortest + (self.seed_value + 2 * episode + place + number) % 5
            over = age >= length
            by_time = length % 2 == 1
            result.append((over & ~by_time, over & by_time))
        nested = [number for number, group in enumerate(self._ends) if group.level]
        for number, group in enumerate(self._ends):
            if not group.level and nested:
                flat = [(result[one][0] | result[one][1]).reshape(*self.description.batch, -1) for one in nested]
                everything = torch.cat(flat, -1).all(-1).reshape(*self.description.batch, *(1 for _ in group.shape))
                everything = everything.expand(*self.description.batch, *group.shape)
                result[number] = (everything, torch.zeros_like(everything))
        return result

    def _observe(self) -> TensorDict:
        out = TensorDict(batch_size=self.description.batch)
        for index, leaf in enumerate(self.description.observations):
            self._write(out, leaf.key, self._value(leaf, index))
        for group, (terminated, truncated) in zip(self._ends, self._ended(), strict=True):
            signals = {"done": terminated | truncated, "terminated": terminated, "truncated": truncated}
            for name in group.names:
                only = name == "terminated" and "done" not in group.names and "truncated" not in group.names
                self._write(out, (*group.level, name), signals["done" if only else name].clone())
        return out

    def _read(self, tensordict: TensorDictBase, keys: tuple[Key, ...]) -> None:
        for index, key in enumerate(keys):
            value = tensordict.get(key, None)
            if value is None:
                continue
            data = value.tolist() if not isinstance(value, Tensor) else value
            self.memory = (self.memory * 31 + fold(data, self.description.batch) * (index + 1)) % 9973

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        for leaf in self.description.actions:
            if tensordict.get(leaf.key, None) is None:
                raise KeyError(f"no action {leaf.key}")
        self._read(tensordict, tuple(leaf.key for leaf in self.description.actions))
        self._read(tensordict, self.description.states)
        self.count = self.count + 1
        self.ages = [age + 1 for age in self.ages]
        out = self._observe()
        for index, leaf in enumerate(self.description.rewards):
            self._write(out, leaf.key, self._value(leaf, 100 + index))
        return out

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        batch = self.description.batch
        masks: list[Tensor | None] = []
        for group in self._ends:
            mask = None if tensordict is None else tensordict.get((*group.level, "_reset"), None)
            masks.append(mask)
        root = [mask for group, mask in zip(self._ends, masks, strict=True) if not group.level and mask is not None]
        touched = torch.zeros(batch, dtype=torch.bool)
        for number, mask in enumerate(masks):
            if root:
                wide = root[0].reshape((*batch, -1)).any(-1)
                mask = wide.reshape(*batch, *(1 for _ in self._ends[number].shape))
            elif mask is None:
                missing = all(other is None for other in masks)
                mask = torch.full_like(self.ages[number], missing, dtype=torch.bool)
            mask = mask.reshape(*batch, *(mask.shape[len(batch) :])).expand_as(self.ages[number])
            self.ages[number] = torch.where(mask, 0, self.ages[number])
            self.episodes[number] = self.episodes[number] + mask
            touched = touched | mask.reshape((*batch, -1)).any(-1)
        before = self.memory.clone()
        self.count = torch.where(touched, 0, self.count)
        self.memory = torch.where(touched, self.memory % 101, self.memory)
        if tensordict is not None:
            self._read(tensordict, self.description.states)
        for value in kwargs.values():
            self.memory = (self.memory + fold(value, batch)) % 9973
        self.memory = torch.where(touched, self.memory, before)
        return self._observe()

    def _set_seed(self, seed: int | None) -> None:
        self.seed_value = 0 if seed is None else int(seed) % 9973
        self.episodes = [torch.zeros_like(episode) for episode in self.episodes]
        self.memory = torch.zeros_like(self.memory)


class CountingEnv(EnvBase):
    """Observes how many steps the episode has lasted; has attributes and methods to be asked for from afar.

    Args:
        max_steps: the episode terminates after this many steps.
        start: the count right after a reset; ``reset(start=s)`` overrides it.
        dtype: the dtype of the observation.
    """

    colour = "blue"
    count: Tensor

    def __init__(self, max_steps: int = 5, start: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.max_steps = max_steps
        self.start = start
        self.register_buffer("count", torch.zeros((1,), dtype=torch.int64))
        self.observation_spec = Composite(observation=Unbounded((1,), dtype=dtype))
        self.action_spec = OneHot(2)
        self.reward_spec = Unbounded((1,))
        self.done_spec = Categorical(2, shape=(1,), dtype=torch.bool)
        self.note: dict[str, Any] = {"maker": "zoo", "tags": ["a", "b"]}
        self.resets = 0

    def add(self, left: float, right: float = 1.0) -> float:
        """A method with an argument and a keyword argument."""
        return left + right + int(self.count)

    def fail(self) -> None:
        """A method that raises."""
        raise ValueError("asked to fail")

    def _observe(self) -> TensorDict:
        spec = self.observation_spec["observation"]
        over = self.count - self.start >= self.max_steps
        return TensorDict({"observation": self.count.to(spec.dtype), "done": over, "terminated": over.clone()})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count = self.count + 1
        out = self._observe()
        out["reward"] = tensordict["action"].to(torch.float32).argmax(-1, keepdim=True).to(torch.float32)
        return out

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.resets += 1
        self.count = torch.full((1,), int(kwargs.get("start", self.start)), dtype=torch.int64)
        return self._observe()

    def _set_seed(self, seed: int | None) -> None:
        pass


class InPlaceEnv(CountingEnv):
    """Returns the very same tensors from every call, changed in place."""

    def __init__(self, max_steps: int = 5) -> None:
        super().__init__(max_steps)
        self.out = TensorDict(
            {
                "observation": torch.zeros(1),
                "done": torch.zeros(1, dtype=torch.bool),
                "terminated": torch.zeros(1, dtype=torch.bool),
            }
        )
        self.reward = torch.zeros(1)

    def _observe(self) -> TensorDict:
        self.out["observation"].copy_(self.count)
        self.out["done"].copy_(self.count >= self.max_steps)
        self.out["terminated"].copy_(self.count >= self.max_steps)
        return self.out.copy()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count += 1
        self.reward.copy_(tensordict["action"].to(torch.float32).argmax(-1, keepdim=True) + self.count)
        return self._observe().set("reward", self.reward)


class StatelessPendulum(EnvBase):
    """A pendulum whose whole state, parameters included, is input: any batch size steps at once.

    Args:
        max_angle_sum: the episode terminates once the sum of all angles passed exceeds it.
    """

    def __init__(self, max_angle_sum: float = 6.0) -> None:
        super().__init__()
        self._batch_locked = False
        self.max_angle_sum = max_angle_sum
        moving = {name: Unbounded((), dtype=torch.float32) for name in ("angle", "speed", "travelled")}
        params = Composite(gravity=Unbounded(()), step_size=Unbounded(()))
        self.observation_spec = Composite(**moving, params=params)
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Bounded(-2.0, 2.0, (1,))
        self.reward_spec = Unbounded((1,))
        self.generator = torch.Generator()
        self.generator.manual_seed(0)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        angle, speed, params = tensordict["angle"], tensordict["speed"], tensordict["params"]
        torque = tensordict["action"].squeeze(-1).clamp(-2.0, 2.0)
        pull = 1.5 * params["gravity"] * angle.sin() + 3.0 * torque
        new_speed = (speed + pull * params["step_size"]).clamp(-8.0, 8.0)
        new_angle = angle + new_speed * params["step_size"]
        travelled = tensordict["travelled"] + new_angle.abs()
        reward = -(angle**2 + 0.1 * speed**2 + 0.001 * torque**2)
        return TensorDict(
            {
                "angle": new_angle,
                "speed": new_speed,
                "travelled": travelled,
                "params": params,
                "reward": reward.unsqueeze(-1),
                "done": (travelled > self.max_angle_sum).unsqueeze(-1),
                "terminated": (travelled > self.max_angle_sum).unsqueeze(-1),
            },
            batch_size=tensordict.shape,
        )

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        shape = torch.Size(()) if tensordict is None else tensordict.shape
        params = None if tensordict is None else tensordict.get("params", None)
        if params is None or params.is_empty():
            params = TensorDict(
                {"gravity": torch.full(shape, 10.0), "step_size": torch.full(shape, 0.05)}, batch_size=shape
            )
        draw = torch.rand((2, *shape), generator=self.generator) * 2 - 1
        return TensorDict(
            {"angle": draw[0] * torch.pi, "speed": draw[1], "travelled": torch.zeros(shape), "params": params},
            batch_size=shape,
        )

    def _set_seed(self, seed: int | None) -> None:
        self.generator.manual_seed(0 if seed is None else int(seed))


class DifferentiableEnv(EnvBase):
    """Its next observation and reward are differentiable functions of the state and the action."""

    def __init__(self, max_steps: int = 4) -> None:
        super().__init__()
        self.max_steps = max_steps
        self.count = 0
        self.position = torch.zeros(2)
        self.observation_spec = Composite(observation=Unbounded((2,)))
        self.action_spec = Unbounded((2,))
        self.reward_spec = Unbounded((1,))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count += 1
        self.position = self.position * 0.9 + tensordict["action"]
        reward = -(self.position**2).sum(-1, keepdim=True)
        done = torch.tensor([self.count >= self.max_steps])
        return TensorDict({"observation": self.position, "reward": reward, "done": done, "terminated": done.clone()})

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.count = 0
        self.position = torch.ones(2)
        return TensorDict({"observation": self.position})

    def _set_seed(self, seed: int | None) -> None:
        pass


class RecurrentEnv(CountingEnv):
    """Knows a recurrent state: what a policy writes in the input's next comes back in next, plus a little."""

    def __init__(self, max_steps: int = 5) -> None:
        super().__init__(max_steps)
        self.observation_spec = Composite(observation=Unbounded((1,)), hidden=Unbounded((2,)))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        hidden = tensordict.get(("next", "hidden"), None)
        out["hidden"] = torch.zeros(2) if hidden is None else hidden + 1
        return out

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return super()._reset(tensordict, **kwargs).set("hidden", torch.zeros(2))


class Pose(TensorClass):
    """A tensorclass to observe."""

    position: Tensor
    label: str = "none"


class TensorclassEnv(CountingEnv):
    """Observes a tensorclass, whose string is not a tensor."""

    def __init__(self, max_steps: int = 5) -> None:
        super().__init__(max_steps)
        pose = Composite(position=Unbounded((2,)), label=NonTensor((), example_data="a"), data_cls=Pose)
        self.observation_spec = Composite(observation=Unbounded((1,)), pose=pose)

    def _observe(self) -> TensorDict:
        out = super()._observe()
        out["pose"] = Pose(position=self.count.repeat(2).to(torch.float32), label=f"pose {int(self.count)}")
        return out


class TensorPoint(TensorClass):
    """A tensorclass of tensors alone."""

    position: Tensor
    height: Tensor


class TensorPointEnv(CountingEnv):
    """Observes a tensorclass that holds nothing but tensors."""

    def __init__(self, max_steps: int = 5) -> None:
        super().__init__(max_steps)
        point = Composite(position=Unbounded((2,)), height=Unbounded((), dtype=torch.float64), data_cls=TensorPoint)
        self.observation_spec = Composite(observation=Unbounded((1,)), point=point)

    def _observe(self) -> TensorDict:
        out = super()._observe()
        out["point"] = TensorPoint(
            position=self.count.repeat(2).to(torch.float32), height=self.count[0].to(torch.float64) / 2
        )
        return out


class LongTextEnv(CountingEnv):
    """A string that grows to many kilobytes, to fill any pipe.

    Args:
        size: how many characters the longest string has.
    """

    def __init__(self, max_steps: int = 5, size: int = 300_000) -> None:
        super().__init__(max_steps)
        self.size = size
        self.observation_spec = Composite(observation=Unbounded((1,)), text=NonTensor((), example_data=""))

    def _observe(self) -> TensorDict:
        out = super()._observe()
        letter = chr(ord("a") + int(self.count) % 26)
        out["text"] = letter * (self.size if int(self.count) % 2 else 3)
        return out


def step_counted(max_steps: int = 3) -> EnvBase:
    """A transform in the factory that truncates, counts and needs the root to be right."""
    return TransformedEnv(CountingEnv(max_steps=50), StepCounter(max_steps=max_steps))


def transformed() -> EnvBase:
    """Several transforms with state of their own in the factory."""
    stack = CatFrames(N=3, dim=-1, in_keys=["observation"])
    return TransformedEnv(CountingEnv(max_steps=4), Compose(InitTracker(), RewardSum(), StepCounter(), stack))


def primed() -> EnvBase:
    """A recurrent state declared by a transform."""
    return TransformedEnv(CountingEnv(max_steps=4), TensorDictPrimer(hidden=Unbounded((2,)), default_value=0.5))


def renamed() -> EnvBase:
    return TransformedEnv(
        CountingEnv(max_steps=4),
        RenameTransform(in_keys=["observation"], out_keys=[("nested", "position")], in_keys_inv=[], out_keys_inv=[]),
    )


def wrapped_gymnasium() -> EnvBase:
    return GymWrapper(gymnasium_envs.CountingEnv())


def categorical_gymnasium() -> EnvBase:
    """The same Gymnasium env with another action encoding: not what a plain Gymnasium factory gives."""
    return GymWrapper(gymnasium_envs.GYM_ZOO["discrete"](), categorical_action_encoding=True)


def skipping_gymnasium() -> EnvBase:
    return GymWrapper(gymnasium_envs.GYM_ZOO["action_box"](), frame_skip=2)


def informed_gymnasium() -> EnvBase:
    """A Gymnasium env with a reader of its ``info`` dict."""
    return GymWrapper(gymnasium_envs.GYM_ZOO["info"]()).auto_register_info_dict()


def float_gymnasium() -> EnvBase:
    return TransformedEnv(GymWrapper(gymnasium_envs.GYM_ZOO["box_float64"]()), DoubleToFloat())


def described(**fields: Any) -> functools.partial[DescribedEnv]:
    """A picklable factory of a `DescribedEnv`."""
    return functools.partial(DescribedEnv, Description(**fields))


_agents = ((("agents",), (3,)),)
_agent_leaves: dict[str, Any] = {
    "observations": (
        Leaf(("agents", "observation"), shape=(3, 2)),
        Leaf(("agents", "id"), "int64", (3,)),
        Leaf(("map",)),
    ),
    "actions": (Leaf(("agents", "action"), shape=(3, 2), kind="bounded"),),
    "rewards": (Leaf(("agents", "reward"), shape=(3, 1)),),
    "levels": _agents,
}
_dtypes = ("float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64", "bfloat16", "float16")

TORCHRL_ZOO: dict[str, ZooCase] = {
    # specs
    "plain": ZooCase(described()),
    "dtypes": ZooCase(described(observations=tuple(Leaf((name,), name) for name in _dtypes))),
    "scalar_leaves": ZooCase(described(observations=(Leaf(("level",), shape=()), Leaf(("flag",), "bool", ())))),
    "empty_leaf": ZooCase(described(observations=(Leaf(("observation",)), Leaf(("none",), shape=(0,))))),
    "nested": ZooCase(
        described(
            observations=(
                Leaf(("body", "arm", "angle"), "float64", (2,)),
                Leaf(("body", "mass"), shape=()),
                Leaf(("clock",), "int64", (1,)),
            ),
            actions=(Leaf(("control", "arm"), shape=(2,)),),
            rewards=(Leaf(("score", "reward"), shape=(1,)),),
        )
    ),
    "two_rewards": ZooCase(
        described(rewards=(Leaf(("reward",), shape=(1,)), Leaf(("bonus", "reward"), "float64", (2, 1))))
    ),
    "two_actions": ZooCase(
        described(
            actions=(
                Leaf(("steer",), shape=(2,), kind="bounded"),
                Leaf(("gear",), "int64", (), kind="categorical"),
                Leaf(("hand", "grip"), "int64", (3,), kind="onehot"),
                Leaf(("hand", "switch"), "int8", (4,), kind="binary"),
                Leaf(("pair",), "int64", (5,), kind="multionehot"),
            )
        )
    ),
    "state": ZooCase(
        described(
            observations=(Leaf(("observation",)), Leaf(("inner", "state"), "float64", (2,))),
            states=(("inner", "state"),),
        )
    ),
    # ways to end
    "done_only": ZooCase(described(ends=(Ends(names=("done",)),))),
    "terminated_only": ZooCase(described(ends=(Ends(names=("terminated",)),))),
    "done_terminated": ZooCase(described(ends=(Ends(names=("done", "terminated")),))),
    "wide_done": ZooCase(described(ends=(Ends(shape=(2,)),))),
    "agents_root_done": ZooCase(described(ends=(Ends(),), **_agent_leaves)),
    "agents_done_alone": ZooCase(described(ends=(Ends(("agents",), (3, 1)),), **_agent_leaves)),
    "agents_and_root_done": ZooCase(described(ends=(Ends(), Ends(("agents",), (3, 1))), **_agent_leaves)),
    "two_teams": ZooCase(
        described(
            observations=(Leaf(("red", "observation"), shape=(2, 3)), Leaf(("blue", "observation"), shape=(1, 3))),
            actions=(Leaf(("red", "action"), shape=(2, 1)), Leaf(("blue", "action"), "int64", (1, 4), kind="onehot")),
            rewards=(Leaf(("red", "reward"), shape=(2, 1)), Leaf(("blue", "reward"), shape=(1, 1))),
            ends=(Ends(("red",), (2, 1)), Ends(("blue",), (1, 1))),
            levels=((("red",), (2,)), (("blue",), (1,))),
        )
    ),
    # batches
    "batched": ZooCase(described(batch=(4,))),
    "batched_twice": ZooCase(described(batch=(2, 3))),
    "batched_agents": ZooCase(described(batch=(2,), ends=(Ends(), Ends(("agents",), (3, 1))), **_agent_leaves)),
    "batched_state": ZooCase(
        described(batch=(4,), observations=(Leaf(("observation",)), Leaf(("state",), shape=(1,))), states=(("state",),))
    ),
    "pendulum": ZooCase(StatelessPendulum),
    # what has no fixed shape, or is no tensor
    "text": ZooCase(described(observations=(Leaf(("observation",)), Leaf(("message",), "text"))), non_tensor=True),
    "text_alone": ZooCase(described(observations=(Leaf(("message",), "text"),)), non_tensor=True),
    "text_nested": ZooCase(
        described(observations=(Leaf(("observation",)), Leaf(("chat", "message"), "text"))), non_tensor=True
    ),
    "text_long": ZooCase(LongTextEnv, non_tensor=True),
    "object": ZooCase(described(observations=(Leaf(("observation",)), Leaf(("thing",), "object"))), non_tensor=True),
    "text_action": ZooCase(
        described(actions=(Leaf(("action",), shape=(2,)), Leaf(("command",), "text"))), non_tensor=True
    ),
    "text_batched": ZooCase(
        described(batch=(2,), observations=(Leaf(("observation",)), Leaf(("message",), "text"))), non_tensor=True
    ),
    "tensorclass": ZooCase(TensorclassEnv, non_tensor=True),
    "tensorclass_of_tensors": ZooCase(TensorPointEnv),
    "dynamic": ZooCase(described(observations=(Leaf(("path",), shape=(-1, 2)), Leaf(("observation",)))), dynamic=True),
    "dynamic_alone": ZooCase(described(observations=(Leaf(("path",), shape=(-1,)),)), dynamic=True),
    "dynamic_text": ZooCase(
        described(observations=(Leaf(("path",), shape=(-1, 2)), Leaf(("message",), "text"))),
        dynamic=True,
        non_tensor=True,
    ),
    # habits
    "counting": ZooCase(CountingEnv),
    "counting_int": ZooCase(functools.partial(CountingEnv, dtype=torch.int64)),
    "one_step_episodes": ZooCase(functools.partial(CountingEnv, max_steps=1)),
    "in_place": ZooCase(InPlaceEnv),
    "differentiable": ZooCase(DifferentiableEnv),
    "recurrent": ZooCase(RecurrentEnv),
    # transforms inside
    "step_counted": ZooCase(step_counted),
    "transformed": ZooCase(transformed),
    "primed": ZooCase(primed),
    "renamed": ZooCase(renamed),
    # Gymnasium through torchrl's wrapper
    "gymnasium": ZooCase(wrapped_gymnasium),
    "gymnasium_categorical": ZooCase(categorical_gymnasium),
    "gymnasium_frame_skip": ZooCase(skipping_gymnasium),
    "gymnasium_info": ZooCase(informed_gymnasium),
    "gymnasium_transformed": ZooCase(float_gymnasium),
}
"""Every torchrl environment of the zoo, by name."""
