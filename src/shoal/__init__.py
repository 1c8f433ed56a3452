"""Batched reinforcement-learning environments for PyTorch: `ParallelEnv`, `SerialEnv` and `MultiThreadedEnv`.

Importing this package loads neither torch nor Gymnasium; its names are resolved when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.engine.errors import EnvError, WorkerDied, WorkerTimeout
    from shoal.engine.faults import FaultRecord, RestartPolicy
    from shoal.envs import MultiThreadedEnv, ParallelEnv, SerialEnv

__version__ = "0.1.0"

_HOMES = {
    "MultiThreadedEnv": "shoal.envs",
    "ParallelEnv": "shoal.envs",
    "SerialEnv": "shoal.envs",
    "EnvError": "shoal.engine.errors",
    "FaultRecord": "shoal.engine.faults",
    "RestartPolicy": "shoal.engine.faults",
    "WorkerDied": "shoal.engine.errors",
    "WorkerTimeout": "shoal.engine.errors",
}

__all__ = [
    "EnvError",
    "FaultRecord",
    "MultiThreadedEnv",
    "ParallelEnv",
    "RestartPolicy",
    "SerialEnv",
    "WorkerDied",
    "WorkerTimeout",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
