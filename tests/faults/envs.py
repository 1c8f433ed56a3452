"""A torchrl environment that makes trouble."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Categorical, Composite, Unbounded
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


class TroubleAgents(EnvBase):
    """Two agents with done flags of their own and an observation each, and one more observation above them."""

    def __init__(self, what: str = "", at: int = 2, when: str = "step") -> None:
        super().__init__()
        self.what, self.at, self.when = what, at, when
        self.seen = self.steps = self.lives = 0
        flags = Composite(done=Binary(shape=(2, 1), dtype=torch.bool), shape=(2,))
        self.observation_spec = Composite(
            above=Unbounded((1,)), agents=Composite(observation=Unbounded((2, 1)), shape=(2,))
        )
        self.action_spec = Composite(agents=Composite(action=Categorical(3, shape=(2,)), shape=(2,)))
        self.reward_spec = Composite(agents=Composite(reward=Unbounded((2, 1)), shape=(2,)))
        self.full_done_spec = Composite(agents=flags)

    def trouble(self, when: str) -> None:
        if self.what and when == self.when:
            self.seen += 1
            if self.seen == self.at:
                ACTS[self.what]()

    def observe(self) -> TensorDict:
        value = torch.full((2, 1), float(self.steps))
        agents = TensorDict({"observation": value}, batch_size=[2])
        return TensorDict({"above": torch.full((1,), float(self.steps)), "agents": agents})

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        self.trouble("reset")
        self.steps = 0
        return self.observe()

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        self.trouble("step")
        self.steps += 1
        result = self.observe()
        result["agents", "reward"] = torch.ones(2, 1)
        result["agents", "done"] = torch.zeros(2, 1, dtype=torch.bool)
        return result

    def _set_seed(self, seed: int | None) -> None: ...
