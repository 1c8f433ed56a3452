"""What the constructor of a batched environment makes of its arguments."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import gymnasium
import gymnasium.vector
from torchrl.envs.common import EnvBase

from shoal.engine.faults import RestartPolicy
from shoal.engine.pool import DEFAULT_TIMEOUT

Factory = Callable[..., Any]


def factories_of_rows(create_env_fn: Factory | Sequence[Factory], count: int) -> tuple[list[Factory], bool]:
    """The factory of each row, and whether they are all the same object.

    Raises:
        RuntimeError: another number of factories than rows.
        TypeError: an environment, or what cannot be called, in place of a factory.
    """
    if is_environment(create_env_fn):
        raise TypeError(
            f"create_env_fn is an environment ({type(create_env_fn).__name__}), not a factory: each row needs an "
            "environment of its own. Pass a callable that builds one, such as lambda: GymEnv('CartPole-v1')"
        )
    if callable(create_env_fn):
        return [create_env_fn] * count, True
    factories = list(create_env_fn)
    if len(factories) != count:
        raise RuntimeError(f"create_env_fn has {len(factories)} factories for num_workers={count} sub-environments")
    for row, factory in enumerate(factories):
        if is_environment(factory) or not callable(factory):
            raise TypeError(
                f"create_env_fn[{row}] is a {type(factory).__name__}: pass callables that each build an environment"
            )
    return factories, all(factory is factories[0] for factory in factories)


def is_environment(value: Any) -> bool:
    """Whether a value is an environment, where a factory of one belongs."""
    return isinstance(value, (EnvBase, gymnasium.Env, gymnasium.vector.VectorEnv))


def kwargs_of_rows(kwargs: Any, count: int) -> list[dict[str, Any]]:
    """The factory's keyword arguments of each row.

    Raises:
        RuntimeError: another number of dicts than rows.
    """
    if kwargs is None:
        return [{} for _ in range(count)]
    if isinstance(kwargs, Mapping):
        return [copied(kwargs) for _ in range(count)]
    if len(kwargs) != count:
        raise RuntimeError(f"create_env_kwargs has {len(kwargs)} dicts for num_workers={count} sub-environments")
    return [copied(each) for each in kwargs]


def copied(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments as one row gets them."""
    try:
        return deepcopy(dict(kwargs))
    except Exception:  # something in them cannot be copied: it is shared, as torchrl shares a sequence of dicts
        return dict(kwargs)


def checked_processes(processes: int | None, count: int) -> int:
    """How many worker processes carry so many rows.

    Raises:
        ValueError: fewer than one, or more than rows.
    """
    if processes is None:
        return count
    processes = operator.index(processes)
    if not 1 <= processes <= count:
        raise ValueError(f"processes must be between 1 and num_workers={count}, found {processes}")
    return processes


def checked_policy(on_failure: Any) -> RestartPolicy | None:
    """What to do after a fault; None to raise it.

    Raises:
        ValueError: something else than ``"raise"``, ``"restart"`` or a policy.
    """
    if isinstance(on_failure, RestartPolicy):
        return on_failure
    if on_failure not in ("raise", "restart"):
        raise ValueError(f'on_failure must be "raise", "restart" or a RestartPolicy, found {on_failure!r}')
    return RestartPolicy() if on_failure == "restart" else None


def default_timeout() -> float:
    """Seconds that a command may take where nobody says: as the environment variable of torchrl has it."""
    return float(os.environ.get("BATCHED_PIPE_TIMEOUT", DEFAULT_TIMEOUT))
