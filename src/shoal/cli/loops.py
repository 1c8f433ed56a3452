"""The stepping itself: what one environment or one batch does while the clock runs."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from typing import Any

from shoal.cli.failures import CommandError

PLAIN_ACTIONS = 1024
BATCHES_OF_ACTIONS = 128
"""Actions are drawn before the clock starts and then used round and round."""


class Loop(ABC):
    """An environment that is open and reset.

    Attributes:
        env: the environment.
        family: ``"gymnasium"`` or ``"torchrl"``.
    """

    family: str

    def __init__(self, env: Any) -> None:
        self.env = env

    @abstractmethod
    def prepare(self) -> None:
        """Draws the actions."""

    @abstractmethod
    def step(self) -> None:
        """Takes one step, and resets what is done by then."""

    def run(self, seconds: float) -> float:
        """Steps for that long, above zero, so at least once; returns the steps per second."""
        step, clock, calls = self.step, time.perf_counter, 0
        start = now = clock()
        while now - start < seconds:
            step()
            calls += 1
            now = clock()
        return calls / max(now - start, 1e-9)


class GymnasiumLoop(Loop):
    """A bare Gymnasium environment in a plain loop.

    Args:
        env: a `gymnasium.Env`.
    """

    family = "gymnasium"

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        env.reset()

    def prepare(self) -> None:
        space = self.env.action_space
        space.seed(0)
        self._actions = itertools.cycle([space.sample() for _ in range(PLAIN_ACTIONS)])

    def step(self) -> None:
        _, _, terminated, truncated, _ = self.env.step(next(self._actions))
        if terminated or truncated:
            self.env.reset()


class TorchRLLoop(Loop):
    """An `EnvBase`, stepped as a collector does: by `step_and_maybe_reset`, its root handed back to it.

    Args:
        env: one environment, or a batch of them.
    """

    family = "torchrl"

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._root = env.reset()

    def prepare(self) -> None:
        spec = self.env.full_action_spec
        self._key = self.env.action_key if len(self.env.action_keys) == 1 else None
        batches = [spec.rand() for _ in range(BATCHES_OF_ACTIONS)]
        self._actions = itertools.cycle(batches if self._key is None else [each.get(self._key) for each in batches])

    def step(self) -> None:
        if self._key is None:
            self._root.update(next(self._actions))
        else:
            self._root.set(self._key, next(self._actions))
        _, self._root = self.env.step_and_maybe_reset(self._root)


def loop_for(env: Any) -> Loop:
    """The loop for what a factory returned.

    Raises:
        CommandError: it is no environment.
    """
    import gymnasium
    from torchrl.envs.common import EnvBase

    if isinstance(env, EnvBase):
        return TorchRLLoop(env)
    if isinstance(env, gymnasium.Env):
        return GymnasiumLoop(env)
    kind = f"{type(env).__module__}.{type(env).__qualname__}".removeprefix("builtins.")
    raise CommandError(f"the factory returned a {kind}, expected a gymnasium.Env or a torchrl EnvBase")
