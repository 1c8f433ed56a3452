"""What torchrl builds on top of batched environments, and inside of them."""

from __future__ import annotations

import gc
from typing import Any

import gymnasium as gym
import numpy as np
import pettingzoo
import psutil
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import (
    Compose,
    DMControlEnv,
    EnvCreator,
    GymEnv,
    InitTracker,
    PettingZooWrapper,
    TransformedEnv,
    VecNorm,
)
from torchrl.modules import LSTMModule

from shoal import ParallelEnv, SerialEnv
from tests.support import Counter
from tests.zoo.torchrl_envs import TORCHRL_ZOO

BOTH = pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])


def cartpole() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def upright() -> TensorDictModule:
    return TensorDictModule(lambda o: (o.sum(-1) > 0).long(), in_keys=["observation"], out_keys=["action"])


@BOTH
def test_a_collector_takes_the_batch_or_a_factory_of_it(kind: type) -> None:
    for env in (kind(3, cartpole), lambda: kind(3, cartpole)):
        collector = Collector(env, upright(), frames_per_batch=60, total_frames=120, max_frames_per_traj=10)
        batches = list(collector)
        assert [batch.shape for batch in batches] == [(3, 20), (3, 20)]
        assert batches[0]["next", "step_count"].max() == 10
        assert "env_state_dict" in collector.state_dict()
        collector.shutdown()


def test_a_collector_in_processes_of_its_own_takes_the_batch() -> None:
    collector = MultiSyncCollector(
        [lambda: ParallelEnv(2, cartpole)] * 2, upright(), frames_per_batch=40, total_frames=80
    )
    assert sum(batch.numel() for batch in collector) == 80
    collector.shutdown()


@BOTH
def test_rollouts_go_into_a_replay_buffer(kind: type) -> None:
    env = kind(2, lambda: gym.make("CartPole-v1"))
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    buffer.extend(env.rollout(10, break_when_any_done=False).reshape(-1))
    assert buffer.sample()["next", "observation"].shape == (8, 4)
    env.close()


@pytest.mark.parametrize("where", ["inside", "outside"])
@BOTH
def test_a_recurrent_policy_with_its_primer_inside_and_outside(kind: type, where: str) -> None:
    torch.manual_seed(0)
    lstm = LSTMModule(3, 4, in_key="observation", out_key="features")
    head = TensorDictModule(nn.Linear(4, 1), in_keys=["features"], out_keys=["action"])
    policy = TensorDictSequential(lstm, head)

    def transforms() -> Compose:
        primer = LSTMModule(3, 4, in_key="observation", out_key="features").make_tensordict_primer()
        return Compose(InitTracker(), primer)

    if where == "inside":
        env = kind(2, lambda: TransformedEnv(GymEnv("Pendulum-v1"), transforms()))
    else:
        env = TransformedEnv(kind(2, lambda: GymEnv("Pendulum-v1")), transforms())
    env.set_seed(0)
    with torch.no_grad():
        rollout = env.rollout(6, policy)
        assert rollout["next", "recurrent_state_h"].abs().sum() > 0
        hidden = rollout["next", "recurrent_state_h"][:, :-1]
        assert torch.equal(hidden, rollout["recurrent_state_h"][:, 1:])
    plain = TransformedEnv(GymEnv("Pendulum-v1"), transforms())
    plain.set_seed(0)
    with torch.no_grad():
        torch.testing.assert_close(plain.rollout(6, policy)["action"], rollout["action"][0])
    env.close()


class Agents(pettingzoo.ParallelEnv):
    """Three agents; agent i is done after i + 2 steps, the game after four."""

    metadata = {"name": "agents"}
    possible_agents = ["a0", "a1", "a2"]

    def observation_space(self, agent: str) -> gym.Space:
        return gym.spaces.Box(-10, 10, (2,), np.float32)

    def action_space(self, agent: str) -> gym.Space:
        return gym.spaces.Discrete(2)

    def observe(self) -> dict[str, np.ndarray]:
        return {agent: np.array([self.t, int(agent[1])], np.float32) for agent in self.agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.t = list(self.possible_agents), 0
        return self.observe(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        self.t += 1
        dones = {agent: self.t >= int(agent[1]) + 2 for agent in self.agents}
        result = (
            self.observe(),
            {agent: float(actions[agent]) for agent in self.agents},
            dones,
            dict.fromkeys(self.agents, False),
            {agent: {} for agent in self.agents},
        )
        self.agents = [agent for agent in self.agents if not dones[agent]]
        return result


def agents() -> PettingZooWrapper:
    return PettingZooWrapper(Agents(), use_mask=True, group_map=None)


@BOTH
def test_agents_of_pettingzoo_may_be_done_alone(kind: type) -> None:
    env, single = kind(2, agents), agents()
    torch.manual_seed(0)
    group = next(iter(single.group_map))
    td, plain = env.reset(), single.reset()
    for _ in range(9):
        action = env.full_action_spec.rand()
        td.update(action)
        plain.update(action[0])
        done, td = env.step_and_maybe_reset(td)
        done_plain, plain = single.step_and_maybe_reset(plain)
        assert (done["next"][0] == done_plain["next"]).all()
        for key in ((group, "observation"), (group, "done"), (group, "mask"), "done"):
            assert torch.equal(td[key][0], plain[key]), key
    env.close()


@BOTH
def test_two_tasks_of_dm_control(kind: type) -> None:
    factories = [lambda: DMControlEnv("humanoid", "stand"), lambda: DMControlEnv("humanoid", "walk")]
    env = kind(2, factories)
    env.set_seed(0, static_seed=True)
    torch.manual_seed(0)
    actions = [env.full_action_spec.rand() for _ in range(3)]
    play = iter(actions)
    rollout = env.rollout(3, lambda td: td.update(next(play)))
    for row, factory in enumerate(factories):
        single = factory()
        single.set_seed(0)
        td = single.reset()
        for step, action in enumerate(actions):
            td = single.step(td.update(action[row]))
            assert (td["next"] == rollout["next"][row, step]).all()
            td = single.step_mdp(td)
    env.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_what_an_env_creator_shares_stays_shared(start_method: str) -> None:
    creator = EnvCreator(lambda: TransformedEnv(GymEnv("Pendulum-v1"), VecNorm(in_keys=["observation"])))
    env = ParallelEnv(2, creator, mp_start_method=start_method)
    env.rollout(10)
    counts = [state["_extra_state"]["observation_count"] for state in env.state_dict().values()]
    assert counts[0] == counts[1] == creator.state_dict()["_extra_state"]["observation_count"]
    assert counts[0] > 15
    env.close()


def test_gradients_pass_through_a_serial_environment() -> None:
    env = SerialEnv(2, TORCHRL_ZOO["differentiable"])
    net = nn.Linear(2, 2)
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    rollout = env.rollout(5, policy)
    rollout["next", "reward"].sum().backward()
    assert net.weight.grad is not None
    assert net.weight.grad.abs().sum() > 0
    env.close()


def test_a_parallel_environment_keeps_no_graph_and_no_memory() -> None:
    env = ParallelEnv(2, Continuous, processes=1)
    policy = TensorDictModule(nn.Linear(3, 3), in_keys=["observation"], out_keys=["action"])
    td = env.reset()

    def steps(count: int) -> None:
        nonlocal td
        for _ in range(count):
            td = policy(td)
            assert td["action"].requires_grad
            done, td = env.step_and_maybe_reset(td)
            assert not done["next", "observation"].requires_grad
            assert not td["observation"].requires_grad
            td = td.select("observation", "done")

    steps(500)
    gc.collect()
    before = psutil.Process().memory_info().rss
    steps(5000)
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 10 * 2**20
    env.close()


class Continuous(Counter):
    """Takes any action."""

    action_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def step(self, action: Any) -> Any:
        return super().step(0)
