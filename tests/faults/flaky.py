"""An environment that fails at random, without torch, and the plain one that it would be if it did not."""

from __future__ import annotations

import itertools
import os
import random
import time
from typing import Any

import gymnasium as gym
import numpy as np


class Steady(gym.Env):
    """Observes (steps since the reset, steps since it was built, all that it was ever told, folded into one number)."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, row: int) -> None:
        self.row = row
        self.length = 7 + 5 * row
        self.steps = self.total = self.memory = 0

    def observe(self) -> np.ndarray:
        return np.array([self.steps, self.total, self.memory], np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return self.observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps, self.total = self.steps + 1, self.total + 1
        self.memory = (31 * self.memory + int(action) + self.row) % 1_000_003
        return self.observe(), float(self.memory % 97), self.steps >= self.length, False, {}

    def told(self) -> int:
        return self.memory


class Flaky(Steady):
    """Fails at random, in random ways, before or after it has moved.

    Args:
        row: index of the row.
        seed: of what is random; the process, and how many it has built, take part in it, so that no
            two lives are alike.
        rate: how likely a call fails.
    """

    built = itertools.count()

    def __init__(self, row: int, seed: int, rate: float) -> None:
        super().__init__(row)
        self.chance = random.Random(f"{seed} {row} {os.getpid()} {next(self.built)}")
        self.rate = rate

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.perhaps_fail()
        return super().reset(**kwargs)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.perhaps_fail()
        result = super().step(action)
        self.perhaps_fail()
        return result

    def perhaps_fail(self) -> None:
        if self.chance.random() >= self.rate:
            return
        how = self.chance.random()
        if how < 0.6:
            raise ValueError(f"row {self.row} fails by chance")
        if how < 0.75:
            os._exit(5)
        if how < 0.95:
            os.kill(os.getpid(), 9)
        while True:
            time.sleep(0.05)
