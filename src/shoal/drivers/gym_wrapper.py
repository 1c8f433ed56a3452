"""Drives torchrl's own `GymEnv` and `GymWrapper` natively: the Gymnasium environment inside of them."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import GymEnv, GymWrapper
from torchrl.envs.common import EnvBase

from shoal.drivers.base import Description, Driver
from shoal.drivers.gymnasium import GymnasiumDriver
from shoal.drivers.torchrl_common import details_of, schema_of, set_where_defined, text_of, without_locks
from shoal.engine.layout import Array
from shoal.engine.schema import AREAS, INPUT, NEXT, Key, Schema


class GymWrapperDriver(GymnasiumDriver):
    """Drives a torchrl `GymEnv` or `GymWrapper` natively: the environment inside of it, with plain numpy writes.

    Gives, bit for bit, what the wrapper would give; only for environments that `drives_natively` accepts.

    Args:
        env: the wrapper; the driver owns it.
        row: its index in the batch, for messages.
    """

    def __init__(self, env: GymWrapper, row: int) -> None:
        super().__init__(env._env, row, categorical=env._categorical_action_encoding, frame_skip=env.wrapper_frame_skip)
        env.set_spec_lock_()
        self.env = env
        self._seeds_torch = False

    def describe(self) -> Description:
        details = details_of(self.env)
        return Description(
            "torchrl", schema_of(details.specs), details, text_of(self.env), chains_seed=True, native=True
        )

    def attach(self, schema: Schema, arrays: dict[str, dict[Key, Array]], *, sent: bool) -> None:
        super().attach(schema, arrays, sent=sent)
        self._seeds_torch = sent

    def seed(self, seed: int | None, static: bool) -> int | None:
        if self._seeds_torch and seed is not None:
            torch.manual_seed(seed % 2**63)
        return super().seed(seed, static)

    def state_dict(self) -> Any:
        return without_locks(self.env.state_dict())

    def load_state_dict(self, state: Any, kwargs: dict[str, Any]) -> None:
        self.env.load_state_dict(state, **kwargs)

    def get_attr(self, path: tuple[str, ...]) -> Any:
        return Driver.get_attr(self, path)

    def set_attr(self, name: str, value: Any) -> None:
        set_where_defined(self.env, name, value, self._row)


_OWN_METHODS = ("_step", "_reset", "_set_seed", "read_obs", "read_reward", "read_done", "read_action")


def drives_natively(env: EnvBase) -> bool:
    """Whether an environment is exactly torchrl's own wrapper, with nothing overridden and no reader added."""
    return (
        type(env) in (GymEnv, GymWrapper)
        and isinstance(env._env, gymnasium.Env)
        and env.batch_size == ()
        and (env.device is None or env.device.type == "cpu")
        and not env.info_dict_reader
        and not env.run_type_checks
        and env._convert_actions_to_numpy
        and not any(name in env.__dict__ for name in _OWN_METHODS)
        and _spaces_agree(env)
    )


def _driver_inside(env: GymWrapper, row: int) -> GymnasiumDriver:
    """A native driver of the environment inside of a wrapper."""
    return GymnasiumDriver(
        env._env, row, categorical=env._categorical_action_encoding, frame_skip=env.wrapper_frame_skip
    )


def _spaces_agree(env: GymWrapper) -> bool:
    """Whether the wrapper's specs are what the spaces of the environment inside of it give."""
    try:
        inner = _driver_inside(env, -1)
    except TypeError:
        return False
    return inner.as_wrapped() and set(inner.schema().leaves) == set(schema_of(env.specs).leaves)


class NativeStep:
    """What a wrapper's ``_step`` gives, by way of the native driver, for those who need it as a TensorDict: transforms.

    Args:
        env: the wrapper; `steps_natively` has said yes.
        row: its index in the batch, for messages.
    """

    def __init__(self, env: GymWrapper, row: int) -> None:
        self._env = env
        self._driver = _driver_inside(env, row)
        schema = self._driver.schema()
        arrays = {
            area: {leaf.key: np.zeros(leaf.shape, leaf.dtype) for leaf in schema.by_area[area].values()}
            for area in AREAS
        }
        self._driver.attach(schema, arrays, sent=False)
        self._inputs = [(key[0], torch.from_numpy(array)) for key, array in arrays[INPUT].items()]
        self._outputs = [(key[0], array) for key, array in arrays[NEXT].items()]

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Steps; an action that does not fit its leaf is left to torchrl, which converts it or says what is wrong."""
        given = [(tensordict.get(name, None), buffer) for name, buffer in self._inputs]
        for value, buffer in given:
            if (
                type(value) is not torch.Tensor
                or value.shape != buffer.shape
                or value.dtype is not buffer.dtype
                or value.requires_grad
            ):
                return self._env._step(tensordict)
        for value, buffer in given:
            buffer.copy_(value)
        self._driver._step()
        from_numpy, env = torch.from_numpy, self._env
        result: TensorDictBase = TensorDict._new_unsafe(
            source={name: from_numpy(array.copy()) for name, array in self._outputs},
            batch_size=env.batch_size,
            device=env.device,
            nested=False,
        )
        return result


def steps_natively(env: EnvBase) -> bool:
    """Whether `NativeStep` can stand in for an environment's ``_step``."""
    return drives_natively(env) and all(leaf.fixed and len(leaf.key) == 1 for leaf in schema_of(env.specs).leaves)
