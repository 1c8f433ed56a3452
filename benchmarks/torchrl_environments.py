"""The environments of `environments.py` as a torchrl user would build them. Importing this module imports torch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from environments import SLOW_ENV, SlowEnv
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    EnvBase,
    GymEnv,
    GymWrapper,
    RewardSum,
    StepCounter,
    TransformedEnv,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def make_torchrl(name: str) -> EnvBase:
    """Build one torchrl environment."""
    return GymWrapper(SlowEnv()) if name == SLOW_ENV else GymEnv(name)


def torchrl_factory(name: str) -> Callable[[], EnvBase]:
    """Return a picklable factory of torchrl environments."""
    return partial(make_torchrl, name)


def transformed() -> EnvBase:
    """Build a `GymEnv` behind transforms, as training scripts do."""
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(200), RewardSum(), DoubleToFloat()))


class OwnEnv(EnvBase):
    """An environment as a user writes one: three leaves of observation, and next to no work of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(
            position=Unbounded((3,)), velocity=Unbounded((3,)), goal=Unbounded((2,), dtype=torch.float64)
        )
        self.action_spec = Bounded(-1.0, 1.0, (2,))
        self.reward_spec = Unbounded((1,))
        self.steps = 0

    def _observe(self) -> TensorDict:
        return TensorDict(
            {
                "position": torch.full((3,), float(self.steps)),
                "velocity": torch.zeros(3),
                "goal": torch.ones(2, dtype=torch.float64),
            }
        )

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        self.steps = 0
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        self.steps += 1
        result = self._observe()
        result["reward"] = tensordict["action"].sum().reshape(1)
        result["done"] = torch.tensor([self.steps >= 100])
        return result

    def _set_seed(self, seed: int | None) -> None:
        """Draws nothing."""
