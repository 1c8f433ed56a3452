"""A torchrl environment that makes trouble."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from tests.support import ACTS


class TroubleEnv(EnvBase):
    """Like `tests.support.Trouble`, as a torchrl environment with a state."""

    def __init__(self, what: str = "", when: str = "step", at: int = 2) -> None:
        super().__init__()
        self.what, self.when, self.at = what, when, at
        self.seen = 0
        self.steps = self.resets = self.total = 0
        self.observation_spec = Composite(observation=Unbounded((3,)))
        self.action_spec = Categorical(3)
        self.reward_spec = Unbounded((1,))
        self.trouble("build")

    def trouble(self, when: str) -> None:
        if when != self.when or not self.what:
            return
        self.seen += 1
        if self.seen == self.at or when == "build":
            ACTS[self.what]()

    def observe(self) -> torch.Tensor:
        return torch.tensor([self.steps, self.resets, self.total], dtype=torch.float32)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        self.trouble("reset")
        self.steps, self.resets = 0, self.resets + 1
        return TensorDict({"observation": self.observe()})

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        self.trouble("step")
        self.steps, self.total = self.steps + 1, self.total + 1
        reward = tensordict["action"].reshape(1).float()
        return TensorDict({"observation": self.observe(), "reward": reward, "done": torch.zeros(1, dtype=torch.bool)})

    def _set_seed(self, seed: int | None) -> None:
        self.trouble("seed")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.trouble("state")
        return OrderedDict(steps=self.steps, resets=self.resets, total=self.total)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        vars(self).update(state_dict)

    def method(self) -> int:
        self.trouble("method")
        return self.steps

    def close(self, **kwargs: Any) -> None:
        self.trouble("close")
        super().close(**kwargs)
