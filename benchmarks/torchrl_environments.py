"""The environments of `environments.py` as a torchrl user would build them. Importing this module imports torch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from environments import SLOW_ENV, SlowEnv
from torchrl.envs import GymEnv, GymWrapper

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrl.envs import EnvBase


def make_torchrl(name: str) -> EnvBase:
    """Build one torchrl environment."""
    return GymWrapper(SlowEnv()) if name == SLOW_ENV else GymEnv(name)


def torchrl_factory(name: str) -> Callable[[], EnvBase]:
    """Return a picklable factory of torchrl environments."""
    return partial(make_torchrl, name)
