"""Section 6 of the contract: around the data."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torchrl._utils import seed_generator
from torchrl.envs import GymWrapper, StepCounter, TransformedEnv

from shoal import ParallelEnv, SerialEnv
from tests.support import Counter, Inner, Named
from tests.zoo.torchrl_envs import CountingEnv

pytestmark = pytest.mark.usefixtures("nothing_left")

BOTH = pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])


class Secretive(Named):
    """Has names that are nobody's business."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self._secret = 1
        self.inner = Hidden(index)

    def __fspath__(self) -> str:
        return "nowhere"


class Hidden(Inner):
    """What an attribute may lead to, with a secret of its own."""

    _secret = 2


@pytest.fixture(params=["serial", "parallel"])
def env(request: pytest.FixtureRequest) -> Iterator[Any]:
    kind = SerialEnv if request.param == "serial" else ParallelEnv
    env = kind(3, Secretive, create_env_kwargs=[{"index": i} for i in range(3)])
    env.reset()
    yield env
    env.close()


# ------------------------------------------------------------------------------------------------------------- seeds


class OwnSeeds(CountingEnv):
    """Gives a seed of its own choice to whoever comes next."""

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        self.seeded = seed
        super().set_seed(seed, static_seed)
        return seed if static_seed or seed is None else seed + 100


@BOTH
def test_each_further_row_gets_the_value_that_the_row_before_gives(kind: type) -> None:
    """Also where a sub-environment overrides ``set_seed``, as it does in torchrl."""
    env = kind(3, OwnSeeds)
    assert env.set_seed(5) == 305
    assert env.get_attr("seeded") == [5, 105, 205]
    assert env.set_seed(5, static_seed=True) == 5
    assert env.get_attr("seeded") == [5, 5, 5]
    env.close()


@BOTH
@pytest.mark.parametrize("seed", [np.int32(7), np.uint64(7), np.array(7), torch.tensor(7), True])
def test_any_integer_type_is_a_seed_and_nothing_else_is(kind: type, seed: Any) -> None:
    env = kind(2, Counter)
    following = env.set_seed(seed)
    assert following == seed_generator(seed_generator(int(seed)))
    assert type(following) is int
    for wrong in (1.5, "7"):
        with pytest.raises(TypeError):
            env.set_seed(wrong)
    env.close()


# ------------------------------------------------------------------------------------------------------------ states


class Locked(CountingEnv):
    """Has locks in its state."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        inner = {"lock": threading.RLock(), "count": torch.tensor(3)}
        return {**super().state_dict(*args, **kwargs), "lock": threading.Lock(), "inner": inner}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> None:
        self.loaded = state


@BOTH
def test_state_dict_has_no_locks_in_it(kind: type) -> None:
    env = kind(2, Locked)
    state = env.state_dict()
    assert list(state) == ["worker0", "worker1"]
    assert state["worker1"]["lock"] is None
    assert state["worker1"]["inner"]["lock"] is None
    assert int(pickle.loads(pickle.dumps(state))["worker1"]["inner"]["count"]) == 3
    state["worker1"]["inner"]["count"] = torch.tensor(4)
    env.load_state_dict(state)
    assert [int(loaded["inner"]["count"]) for loaded in env.get_attr("loaded")] == [3, 4]
    env.load_state_dict(state["worker1"])
    assert [int(loaded["inner"]["count"]) for loaded in env.get_attr("loaded")] == [4, 4]
    env.close()


@BOTH
def test_a_state_that_was_taken_is_not_changed_by_later_steps(kind: type) -> None:
    """Nor does the environment change what it was given."""
    env = kind(2, CountingEnv)
    td = env.reset()
    state = env.state_dict()
    assert [int(state[f"worker{row}"]["count"]) for row in range(2)] == [0, 0]
    td = env.step_mdp(env.step(env.rand_action(td)))
    assert [int(state[f"worker{row}"]["count"]) for row in range(2)] == [0, 0]
    env.load_state_dict(state)
    env.step(env.rand_action(td))
    assert [int(state[f"worker{row}"]["count"]) for row in range(2)] == [0, 0]
    assert [int(count) for count in env.get_attr("count")] == [1, 1]
    env.close()


# -------------------------------------------------------------------------------------------------------- attributes


def test_private_and_dunder_names_are_never_forwarded(env: Any) -> None:
    for name in ("_secret", "__fspath__"):
        with pytest.raises(AttributeError):
            getattr(env, name)
        with pytest.raises(AttributeError):
            getattr(env.inner, name)
    assert env.get_attr("_secret") == [1, 1, 1]  # asked for by name, they are given


def test_values_of_an_attribute_are_iterated_sliced_compared_and_printed(env: Any) -> None:
    assert [value + 1 for value in env.index] == [1, 2, 3]
    assert env.index[1:] == [1, 2]
    assert env.index[-1] == 2
    assert env.index != [0, 1]
    assert env.index == env.index
    assert env.index != env.inner.value
    assert str(env.index) == f"{env.index}" == "[0, 1, 2]"
    assert 2 in env.index
    assert list(reversed(env.index)) == [2, 1, 0]
    with pytest.raises(IndexError):
        _ = env.index[3]


def test_a_name_that_does_not_follow_another_is_an_attribute_error_that_names_it(env: Any) -> None:
    with pytest.raises(AttributeError, match=r"'inner\.nothing'"):
        _ = env.inner.nothing
    with pytest.raises(AttributeError, match=r"'nothing'"):
        env.get_attr("inner.nothing")
    with pytest.raises(AttributeError, match=r"'nothing'"):
        env.get_attr("nothing")
    assert env.index == [0, 1, 2]


@BOTH
def test_names_of_a_closed_environment_say_to_start_it(kind: type) -> None:
    env = kind(2, Named)
    env.reset()
    values = env.index
    env.close()
    with pytest.raises(RuntimeError, match="not started: start it"):
        _ = env.index
    with pytest.raises(RuntimeError, match="not started: start it"):
        env.add(1)
    assert not env.__dict__["_in_use"]
    del values


class WithProperty(Named):
    """Has attributes of every sort."""

    shared = "class"
    _level = 0

    @property
    def level(self) -> int:
        return self._level

    @level.setter
    def level(self, value: int) -> None:
        self._level = value


def wrapped_twice() -> gym.Env:
    return gym.wrappers.TimeLimit(gym.wrappers.OrderEnforcing(WithProperty()), 7)


@BOTH
@pytest.mark.parametrize(
    "factory",
    [
        wrapped_twice,
        lambda: GymWrapper(wrapped_twice()),
        lambda: TransformedEnv(GymWrapper(wrapped_twice()), StepCounter()),
    ],
    ids=["gymnasium", "wrapper", "transformed"],
)
def test_set_attr_sets_where_the_attribute_is_defined_through_wrappers_or_raises(kind: type, factory: Any) -> None:
    env = kind(2, factory)
    env.set_attr("index", [5, 6])
    env.set_attr("level", 3)
    env.set_attr("shared", ("one", "two"))
    env.set_attr("_max_episode_steps", 1)
    below = "unwrapped" if factory is wrapped_twice else "_env.unwrapped"
    assert env.call(f"{below}.add", 0) == [5, 6]
    assert env.get_attr(f"{below}._level") == [3, 3]
    assert env.get_attr(f"{below}.shared") == ["one", "two"]
    assert env.rollout(4).shape == (2, 1)  # the time limit's own attribute, which the environment below has not
    with pytest.raises(AttributeError, match="no attribute 'no_such'"):
        env.set_attr("no_such", 1)
    assert not hasattr(env, "no_such")
    env.close()


def test_call_passes_arguments_and_keywords_to_every_row_and_follows_names(env: Any) -> None:
    assert env.call("add", 2, times=3) == [6, 7, 8]
    assert env.call("inner.square") == [0, 100, 400]
    assert env.get_attr("inner.value") == [0, 10, 20]


# ------------------------------------------------------------------------------------------------------- views, to()


def test_a_numpy_mask_and_an_empty_slice_of_bounds_pick_rows(env: Any) -> None:
    assert env[np.array([True, False, True])].get_attr("index") == [0, 2]
    assert env[np.array([2, 0])].get_attr("index") == [2, 0]
    assert env[::2].get_attr("index") == [0, 2]
    assert env[...].get_attr("index") == [0, 1, 2]
    assert env[np.int64(1)].get_attr("index") == [1]


def test_a_view_is_live(env: Any) -> None:
    view = env[1:]
    env.step(env.rand_action(env.reset()))
    assert view.get_attr("steps") == [1, 1]
    assert view.set_seed(4) == seed_generator(seed_generator(4))
    draws = [rng.integers(1000) for rng in view.get_attr("np_random")]
    assert draws == [np.random.default_rng(seed).integers(1000) for seed in (4, seed_generator(4))]
    view.set_attr("index", [8, 9])
    assert env.get_attr("index") == [0, 8, 9]
    assert list(view.state_dict()) == ["worker0", "worker1"]


def test_the_items_of_a_serial_environment_write_a_state_back() -> None:
    """``env[i] = snapshot``: what a view of another environment holds is a snapshot, too."""
    env, other = SerialEnv(2, Snapshots), SerialEnv(2, Snapshots)
    env.reset()
    other.reset(list_of_kwargs=[{"start": 3}, {"start": 4}])
    env[1] = other[0]
    assert [int(count) for count in env.get_attr("count")] == [0, 3]
    env.close()
    other.close()


class Snapshots(CountingEnv):
    """Takes the count of another environment."""

    def __setitem__(self, item: Any, source: CountingEnv) -> None:
        self.count = source.count


@BOTH
def test_add_truncated_keys_says_to_call_it_on_the_sub_environments(kind: type) -> None:
    env = kind(2, CountingEnv)
    with pytest.raises(RuntimeError, match="add_truncated_keys must be called on the sub-environments"):
        env.add_truncated_keys()
    assert env.rollout(2).shape == (2, 2)
    env.close()


@BOTH
def test_to_a_device_moves_results_only(kind: type) -> None:
    # no data is ever read from a "meta" tensor, so it stands in for any other device
    env = kind(2, CountingEnv)
    env.reset()
    assert env.to("meta") is env
    assert env.device == torch.device("meta")
    assert {spec.device.type for spec in env.output_spec.values(True, True)} == {"meta"}
    assert {value.device.type for value in env.reset().values(True, True)} == {"meta"}
    assert env.get_attr("device") == [None, None]
    assert [count.device.type for count in env.get_attr("count")] == ["cpu", "cpu"]
    assert env.get_attr("resets") == [2, 2]
    td = env.to("cpu").reset()
    assert td["observation"].tolist() == [[0], [0]]
    env.close()
    assert env.reset().device == torch.device("cpu")  # it stays where it was sent
    env.close()
