"""`SerialEnv`: the sub-environments run in this process, one after the other."""

from __future__ import annotations

from torchrl.envs import batched_envs as reference

from shoal.engine.local import LocalEngine
from shoal.engine.rows import Builder
from shoal.envs.batched import BatchedEnv


class SerialEnv(BatchedEnv):
    """A batch of environments that run one after the other in this process.

    Gives the same values as `ParallelEnv`, lets gradients through, and is what to debug with. See `BatchedEnv` for the
    arguments.

    Example:
        >>> import gymnasium as gym
        >>> from shoal import SerialEnv
        >>> env = SerialEnv(2, lambda: gym.make("CartPole-v1"))
        >>> env.rollout(3).shape
        torch.Size([2, 3])
    """

    def _make_engine(self, builders: list[Builder]) -> LocalEngine:
        return LocalEngine(builders, rebuilds=self._policy is not None)

    @property
    def _envs(self) -> list[object]:
        engine = self._started().engine
        assert isinstance(engine, LocalEngine)
        return [engine.envs[row] for row in self.__dict__["_results"].rows]


reference.SerialEnv.register(SerialEnv)
