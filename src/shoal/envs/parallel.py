"""`ParallelEnv`: the sub-environments run in worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchrl.envs import EnvCreator
from torchrl.envs import batched_envs as reference
from torchrl.envs.common import EnvBase

from shoal.engine.launch import START_METHODS
from shoal.engine.pool import Pool, PoolOptions
from shoal.engine.rows import Builder
from shoal.envs.batched import BatchedEnv
from shoal.envs.serial import SerialEnv

_PARALLEL_ONLY = ("mp_start_method", "processes")


class _SerialForSingle(type(EnvBase)):  # type: ignore[misc]
    """Lets ``ParallelEnv(1, ..., serial_for_single=True)`` return a `SerialEnv`."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        num_workers = args[0] if args else kwargs.get("num_workers")
        if kwargs.get("serial_for_single") and num_workers == 1:
            return SerialEnv(*args, **{k: v for k, v in kwargs.items() if k not in _PARALLEL_ONLY})
        return super().__call__(*args, **kwargs)


class ParallelEnv(BatchedEnv, metaclass=_SerialForSingle):
    """A batch of environments that run in worker processes.

    Takes the arguments of torchrl's class of the same name and gives the same results; works under ``no_grad``. No
    ``if __name__ == "__main__"`` guard is needed. Further arguments than `BatchedEnv` lists:

    Keyword Args:
        processes: how many worker processes carry the N rows, as evenly as can be; by default one process a row. For
            cheap environments few processes with many rows each are much faster.
        mp_start_method: ``"forkserver"`` (default on Linux: workers fork from a template process that has imported
            what the factories need), ``"spawn"`` (fresh interpreters) or ``"fork"`` (forks of this process). The start
            method of the whole process is never touched.
        shutdown_timeout: seconds that workers have to close on their own before they are killed.
        step_timeout: seconds that one command may take; by default the environment variable ``BATCHED_PIPE_TIMEOUT``,
            else 10,000. Being idle is never a timeout. May be set later; `time_limit` sets it for some calls.
        build_timeout: seconds that building the sub-environments may take; by default ``step_timeout``, and 10,000 at
            least.
        serial_for_single: with ``num_workers=1``, returns a `SerialEnv`.

    Raises:
        Exception: what a factory raised, with its row and the worker's traceback.
        WorkerDied: a worker process ended (also in every later command).
        WorkerTimeout: a command took longer than ``step_timeout``.

    Example:
        >>> import gymnasium as gym
        >>> from shoal import ParallelEnv
        >>> env = ParallelEnv(8, lambda: gym.make("CartPole-v1"), processes=2)
        >>> env.rollout(3).shape
        torch.Size([8, 3])
        >>> env.close()
    """

    _parallel = True

    def _make_engine(self, builders: list[Builder]) -> Pool:
        method = self._mp_start_method
        if method is not None and method not in START_METHODS:
            raise ValueError(f"mp_start_method must be one of {', '.join(START_METHODS)}, found {method!r}")
        for builder in builders:
            if isinstance(builder.factory, EnvCreator) and builder.factory._share_memory:
                _share(builder.factory._transform_state_dict)
        return Pool(
            builders,
            PoolOptions(
                processes=self._processes,
                start_method=method,
                num_threads=self.num_sub_threads,
                memmap=self._memmap,
                step_timeout=self.step_timeout,
                build_timeout=self.build_timeout,
                rebuilds=self._policy is not None,
                shutdown_timeout=self.shutdown_timeout,
            ),
        )

    @classmethod
    def make_parallel(cls, *args: Any, num_envs: int = 1, **kwargs: Any) -> BatchedEnv:
        """Builds an environment as ``make_parallel(create_env_fn, num_envs=4, ...)`` or as the constructor does."""
        if args and isinstance(args[0], int):
            return cls(*args, **kwargs)
        return cls(num_envs, *args, **kwargs)


def _share(state: Any) -> None:
    """Moves the tensors of a state to shared memory: what an `EnvCreator` promises to share among environments."""
    if isinstance(state, torch.Tensor):
        state.share_memory_()  # type: ignore[no-untyped-call]
    elif isinstance(state, Mapping):
        for value in state.values():
            _share(value)


reference.ParallelEnv.register(ParallelEnv)
