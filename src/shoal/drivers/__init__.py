"""How one family of environments is built, described, stepped and reset inside a worker.

A driver is chosen by what the user's factory returns. No module of a family is imported unless the factory's product
belongs to it, so that a worker with Gymnasium environments never imports torch.
"""

from __future__ import annotations

import sys
from typing import Any

from shoal.drivers.base import Driver
from shoal.engine.layout import Array
from shoal.engine.schema import Key


def together_for(
    drivers: dict[int, Driver],
    arrays: dict[str, dict[Key, Array]],
    fresh: Array,
    times: Array,
    catch: type[BaseException],
) -> Any:
    """What steps these drivers' environments in one loop, see `shoal.drivers.together`; None if each goes by itself.

    Args:
        drivers: of the rows of one process, attached, in order.
        arrays: ``[n, ...]`` arrays of their leaves, by area and key.
        fresh: ``[n]`` flags that say which rows were reset.
        times: ``[n, 2]`` doubles: seconds in each environment, and number of its resets and steps.
        catch: what to catch of a row.
    """
    if "shoal.drivers.gymnasium" not in sys.modules:
        return None
    from shoal.drivers.together import together_or_alone

    return together_or_alone(drivers, arrays, fresh, times, catch)


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
        from shoal.drivers.gym_wrapper import GymWrapperDriver, drives_natively
        from shoal.drivers.torchrl import TorchRLDriver

        return GymWrapperDriver(env, row) if drives_natively(env) else TorchRLDriver(env, row)
    raise TypeError(
        f"the factory of row {row} returned a {type(env).__module__}.{type(env).__qualname__}; "
        "expected a torchrl EnvBase or a gymnasium.Env"
    )
