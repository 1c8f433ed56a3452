"""How one family of environments is built, described, stepped and reset inside a worker.

A driver is chosen by what the user's factory returns. No module of a family is imported unless the factory's product
belongs to it, so that a worker with Gymnasium environments never imports torch.
"""

from __future__ import annotations

import sys
from typing import Any

from shoal.drivers.base import Driver


def driver_for(env: Any, row: int) -> Driver:
    """The driver for what a factory returned.

    Raises:
        TypeError: it is no environment that shoal can drive.
    """
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is not None and isinstance(env, gymnasium.Env):
        from shoal.drivers.gymnasium import GymnasiumDriver

        return GymnasiumDriver(env, row)
    common = sys.modules.get("torchrl.envs.common")
    if common is not None and isinstance(env, common.EnvBase):
        from shoal.drivers.torchrl import GymWrapperDriver, TorchRLDriver, drives_natively

        return GymWrapperDriver(env, row) if drives_natively(env) else TorchRLDriver(env, row)
    raise TypeError(
        f"the factory of row {row} returned a {type(env).__module__}.{type(env).__qualname__}; "
        "expected a torchrl EnvBase or a gymnasium.Env"
    )
