"""The Gymnasium driver: spaces, and what torchrl's wrapper refuses."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from torchrl._utils import seed_generator
from torchrl.envs import GymWrapper, check_env_specs

from shoal import SerialEnv
from shoal.drivers.gymnasium import next_seed
from shoal.drivers.spaces import plan_space
from tests.support import Counter


class Fixed(gym.Env):
    """Gives one value of each space, in turn, and keeps the actions it got."""

    def __init__(self, observation_space: gs.Space, action_space: gs.Space) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        observation_space.seed(1)
        self.values = [observation_space.sample() for _ in range(4)]
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.at = 0
        return self.values[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        self.at += 1
        return self.values[self.at], 0.5, False, False, {}


BOX, SMALL = gs.Box(-1, 1, (2,)), gs.Box(-1, 1, (3,))
LIKE_TORCHRL = {
    "box": (BOX, BOX),
    "box of no dimension": (gs.Box(-1, 1, ()), gs.Box(-1, 1, ())),
    "bytes": (gs.Box(0, 255, (4, 4, 3), np.uint8), gs.Discrete(2)),
    "discrete": (gs.Discrete(3), gs.Discrete(3)),
    "equal multi-discrete": (gs.MultiDiscrete([3, 3]), gs.MultiDiscrete([3, 3])),
    "unequal multi-discrete": (gs.MultiDiscrete([3, 4]), gs.MultiDiscrete([3, 4])),
    "multi-binary": (gs.MultiBinary(3), gs.MultiBinary(3)),
    "tuple of equals": (gs.Tuple([BOX, BOX]), gs.Discrete(2)),
    "tuple of discretes": (gs.Tuple([gs.Discrete(3), gs.Discrete(3)]), gs.Discrete(2)),
    "dict": (gs.Dict(a=BOX, b=gs.Dict(c=gs.Discrete(3), d=gs.MultiBinary(2))), gs.Dict(x=gs.Discrete(2), y=BOX)),
    "dict with state": (gs.Dict(state=BOX, other=SMALL), gs.Discrete(2)),
    "text": (gs.Dict(words=gs.Text(4), box=BOX), gs.Discrete(2)),
}


@pytest.mark.parametrize("name", LIKE_TORCHRL)
def test_specs_and_values_are_those_of_torchrls_wrapper(name: str) -> None:
    observation, action = LIKE_TORCHRL[name]
    env = SerialEnv(1, lambda: Fixed(observation, action))
    wrapper = GymWrapper(Fixed(observation, action))
    for ours, theirs in (
        (env.observation_spec, wrapper.observation_spec),
        (env.full_action_spec, wrapper.full_action_spec),
        (env.full_reward_spec, wrapper.full_reward_spec),
        (env.full_done_spec, wrapper.full_done_spec),
    ):
        assert ours == theirs.expand(1, *theirs.shape)
    td, single = env.reset(), wrapper.reset()
    for _ in range(3):
        actions = wrapper.rand_action(single.clone()).select(*wrapper.action_keys)
        td.update(actions.unsqueeze(0))
        single.update(actions)
        td, single = env.step(td), wrapper.step(single)
        assert (td["next"][0] == single["next"]).all()
        td, single = env.step_mdp(td), wrapper.step_mdp(single)
    for ours, theirs in zip(env._envs[0].actions, wrapper._env.actions, strict=True):
        np.testing.assert_equal(ours, theirs)
    env.close()


BEYOND_TORCHRL = {
    "tuple of unequals": (
        gs.Tuple([BOX, gs.Discrete(3)]),
        gs.Tuple([gs.Discrete(2), BOX]),
        {("observation", "0"): (2,), ("observation", "1"): (3,)},
        {("action", "0"): (2,), ("action", "1"): (2,)},
    ),
    "flat multi-binary": (gs.MultiBinary((2, 3)), gs.MultiBinary((2, 3)), {"observation": (2, 3)}, {"action": (2, 3)}),
    "multi-discrete in two dimensions": (
        gs.MultiDiscrete([[3, 4], [2, 2]]),
        gs.MultiDiscrete([[3, 4], [2, 2]]),
        {"observation": (2, 2)},
        {"action": (2, 2)},
    ),
    "discrete from elsewhere": (
        gs.Discrete(3, start=5),
        gs.Discrete(2, start=7),
        {"observation": (3,)},
        {"action": (2,)},
    ),
    "dict of one action": (BOX, gs.Dict(x=gs.Discrete(2)), {"observation": (2,)}, {"x": (2,)}),
    "dict in a tuple": (
        gs.Tuple([gs.Dict(a=BOX), gs.Dict(a=BOX)]),
        gs.Discrete(2),
        {("observation", "a"): (2, 2)},
        {"action": (2,)},
    ),
}


@pytest.mark.parametrize("name", BEYOND_TORCHRL)
def test_spaces_that_torchrl_refuses_have_a_natural_shape_and_legal_actions(name: str) -> None:
    observation, action, seen, acted = BEYOND_TORCHRL[name]
    env = SerialEnv(2, lambda: Fixed(observation, action))
    assert {key: tuple(spec.shape[1:]) for key, spec in env.observation_spec.items(True, True)} == seen
    assert {key: tuple(spec.shape[1:]) for key, spec in env.full_action_spec.items(True, True)} == acted
    env.rollout(3)
    for single in env._envs:
        assert len(single.actions) == 3
        assert all(action in single.action_space for action in single.actions), single.actions
    env.close()


def test_a_space_without_an_array_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"type Sequence.*wrap the environment"):
        plan_space(gs.Sequence(BOX))


def test_a_discrete_that_starts_elsewhere_is_counted_from_its_start() -> None:
    env = SerialEnv(1, lambda: Fixed(gs.Discrete(3, start=5), gs.Discrete(2)))
    assert env.reset()["observation"].argmax() + 5 == env._envs[0].values[0]
    env.close()


class Wrong(Counter):
    def step(self, action: int) -> Any:
        _, *rest = super().step(action)
        return np.zeros(4, np.float32), *rest


def test_an_observation_of_a_wrong_shape_names_row_key_expected_and_found() -> None:
    env = SerialEnv(2, [Counter, Wrong])
    td = env.rand_action(env.reset())
    with pytest.raises(ValueError, match=r"row 1, observation 'observation': expected shape \(3,\).*found \(4,\)"):
        env.step(td)
    env.close()


class Outside(Counter):
    observation_space = gs.Discrete(3)

    def observe(self) -> Any:
        return 3


def test_a_discrete_value_outside_of_its_space_is_an_error() -> None:
    env = SerialEnv(1, Outside)
    with pytest.raises(ValueError, match=r"row 0, observation 'observation': the value 3 is outside"):
        env.reset()
    env.close()


class Missing(Counter):
    observation_space = gs.Dict(a=BOX, b=BOX)

    def observe(self) -> Any:
        return {"a": np.zeros(2, np.float32)}


def test_a_missing_entry_of_a_dict_is_named() -> None:
    env = SerialEnv(1, Missing)
    with pytest.raises(KeyError, match=r"no entry 'b'.*found \['a'\]"):
        env.reset()
    env.close()


@pytest.mark.parametrize(
    "value", [1, 1.5, True, np.float64(0.1), np.float32(2), np.int64(3), np.array(0.25), np.array([0.5]), None]
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("rows", [1, 3])
def test_rewards_of_any_kind_become_those_of_the_spec(value: Any, dtype: Any, rows: int) -> None:
    class Rewarding(Counter):
        if dtype != np.float32:  # which is what an environment without such a space has
            reward_space = gs.Box(-9, 9, (1,), dtype)

        def step(self, action: int) -> Any:
            observation, _, *rest = super().step(action)
            return observation, value, *rest

    env = SerialEnv(rows, Rewarding)
    reward = env.step(env.rand_action(env.reset()))["next", "reward"]
    expected = 0.0 if value is None else float(np.asarray(value).reshape(()))
    assert reward.dtype == torch.from_numpy(np.zeros(1, dtype)).dtype
    assert reward.tolist() == [[dtype(expected)]] * rows
    env.close()


@pytest.mark.parametrize("rows", [1, 2])
def test_frame_skip_sums_rewards_and_stops_at_the_end_of_the_episode(rows: int) -> None:
    env = SerialEnv(rows, lambda: GymWrapper(Counter(6), frame_skip=4))
    single = GymWrapper(Counter(6), frame_skip=4)
    td, plain = env.reset(), single.reset()
    for _ in range(2):
        action = torch.tensor([0, 1, 0])
        td, plain = env.step(td.set("action", action.expand(rows, 3))), single.step(plain.set("action", action))
        assert all((row == plain["next"]).all() for row in td["next"].unbind(0))
        td, plain = env.step_mdp(td), single.step_mdp(plain)
    assert td["observation"].tolist() == [[6, 1, 6]] * rows
    env.close()


@pytest.mark.parametrize("seed", [0, 1, 17, 2**31, 2**40])
def test_the_seed_chain_is_torchrls(seed: int) -> None:
    assert next_seed(seed) == seed_generator(seed)


def test_check_env_specs_passes_on_nested_spaces() -> None:
    observation, action = LIKE_TORCHRL["dict"]
    env = SerialEnv(2, lambda: Fixed(observation, action))
    check_env_specs(env)
    env.close()


def test_arrays_given_to_the_environment_are_its_own() -> None:
    env = SerialEnv(1, lambda: Fixed(BOX, BOX))
    td = env.reset()
    for value in (0.25, 0.5):
        td["action"] = torch.full((1, 2), value)
        td = env.step_mdp(env.step(td))
    assert [action.tolist() for action in env._envs[0].actions] == [[0.25, 0.25], [0.5, 0.5]]
    env.close()
