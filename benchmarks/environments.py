"""The environments that every contender is measured with, as factories that any worker process can import.

Their torchrl twins are in `torchrl_environments.py`, so that who imports this module need not import torch.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

SLOW_ENV = "slow"
"""The name of `SlowEnv`, next to the ids that `gymnasium.make` knows."""

SLOW_STEP_SECONDS = 0.05


class SlowEnv(gymnasium.Env[np.ndarray, np.int64]):
    """An environment whose step costs no processor time and 50 ms of waiting."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(SLOW_STEP_SECONDS)
        return np.zeros(4, np.float32), 0.0, False, False, {}


def make_gymnasium(name: str) -> gymnasium.Env[Any, Any]:
    """Build one plain Gymnasium environment."""
    return SlowEnv() if name == SLOW_ENV else gymnasium.make(name)


def gymnasium_factory(name: str) -> Callable[[], gymnasium.Env[Any, Any]]:
    """Return a picklable factory of plain Gymnasium environments."""
    return partial(make_gymnasium, name)


class PixelEnv(gymnasium.Env[np.ndarray, np.int64]):
    """Shows four stacked frames of 84 by 84 bytes, which cost it nothing."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gymnasium.spaces.Discrete(6)

    def __init__(self) -> None:
        self.frames = np.random.default_rng(0).integers(0, 255, (8, 84, 84, 4), dtype=np.uint8)
        self.steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.frames[0], {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.frames[self.steps % 8], 1.0, self.steps >= 200, False, {}
