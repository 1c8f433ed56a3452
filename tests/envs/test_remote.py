"""Section 6 of the contract: attributes, methods, seeds and states of the sub-environments."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torchrl._utils import seed_generator
from torchrl.envs import GymWrapper, StepCounter, TransformedEnv

from shoal import ParallelEnv, SerialEnv
from tests.support import Named, Trouble

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(params=["serial", "parallel", "grouped"])
def env(request: pytest.FixtureRequest) -> Iterator[Any]:
    kwargs: dict[str, Any] = {"create_env_kwargs": [{"index": i} for i in range(3)]}
    if request.param == "serial":
        env: Any = SerialEnv(3, Named, **kwargs)
    else:
        env = ParallelEnv(3, Named, processes=2 if request.param == "grouped" else None, **kwargs)
    env.reset()
    yield env
    env.close()


def test_a_name_stands_for_the_n_values(env: Any) -> None:
    assert list(env.index) == [0, 1, 2]
    assert env.index[1] == 1
    assert env.index == [0, 1, 2]
    assert len(env.index) == 3
    assert repr(env.index) == "[0, 1, 2]"
    assert env.add(5) == [5, 6, 7]
    assert env.add(5, times=2) == [10, 11, 12]
    assert env.inner.value == [0, 10, 20]
    assert env.inner.square() == [0, 100, 400]


def test_call_get_attr_and_set_attr(env: Any) -> None:
    assert env.call("add", 1) == [1, 2, 3]
    assert env.get_attr("inner.value") == [0, 10, 20]
    env.set_attr("index", 7)
    assert env.get_attr("index") == [7, 7, 7]
    env.set_attr("index", [3, 2, 1])
    assert env.get_attr("index") == [3, 2, 1]
    with pytest.raises(AttributeError, match="no attribute 'no_such'"):
        env.set_attr("no_such", 1)
    with pytest.raises(ValueError, match="2 values for 3"):
        env.set_attr("index", [1, 2])


def test_attributes_are_set_where_they_are_defined_through_wrappers() -> None:
    for make in (
        lambda: TransformedEnv(GymWrapper(Named()), StepCounter()),
        lambda: GymWrapper(Named()),
    ):
        env = SerialEnv(2, make)
        env.set_attr("index", [5, 6])
        assert [single.index for single in env._envs] == [5, 6]
        assert env.add(0) == [5, 6]
        env.close()


def test_a_name_that_nobody_has_is_an_attribute_error_and_harms_no_worker(env: Any) -> None:
    with pytest.raises(AttributeError, match="'no_such_name'"):
        _ = env.no_such_name
    assert not hasattr(env, "no_such_name")
    assert not hasattr(env, "_private")
    assert not hasattr(env, "_repr_html_")
    assert not hasattr(env, "__array__")
    with pytest.raises(AttributeError, match="no_such"):
        env.call("no_such")
    td = env.step(env.rand_action(env.reset()))
    assert td["next", "observation"][:, 0].tolist() == [1, 1, 1]


def test_a_method_that_raises_says_where(env: Any) -> None:
    with pytest.raises(KeyError, match="inside") as caught:
        env.fail()
    assert caught.value.row == 0
    assert caught.value.command == "call"


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_an_environment_that_is_not_started_says_to_start_it(kind: type) -> None:
    env = kind(2, Named)
    with pytest.raises(RuntimeError, match="not started: start it"):
        _ = env.index
    env.start()
    assert env.index == [0, 0]
    env.close()


@pytest.mark.parametrize("seed", [0, 7, np.int64(7), np.uint8(3), 2**31])
def test_seeds_follow_torchrls_chain(env: Any, seed: Any) -> None:
    expected = [int(seed)]
    for _ in range(3):
        expected.append(seed_generator(expected[-1]))
    assert env.set_seed(seed) == expected[-1]
    draws = [rng.integers(1000) for rng in env.np_random]
    assert draws == [np.random.default_rng(each).integers(1000) for each in expected[:-1]]


def test_a_static_seed_is_the_same_for_all(env: Any) -> None:
    assert env.set_seed(11, static_seed=True) == 11
    assert [rng.integers(1000) for rng in env.np_random] == [np.random.default_rng(11).integers(1000)] * 3


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_states_go_round(kind: type) -> None:
    env = kind(2, lambda: TransformedEnv(GymWrapper(Named()), StepCounter()))
    env.rollout(2)
    state = env.state_dict()
    assert list(state) == ["worker0", "worker1"]
    env.load_state_dict(state)
    env.load_state_dict(state["worker0"])
    env.close()


def test_what_cannot_be_sent_is_an_error_and_nothing_has_happened() -> None:
    env = ParallelEnv(2, Named)
    td = env.step(env.rand_action(env.reset()))
    with pytest.raises(TypeError, match=r"'call' was given for row 0 cannot be sent"):
        env.add(threading.Lock())
    with pytest.raises(TypeError, match="'reset' was given"):
        env.reset(options=threading.Lock())
    with pytest.raises(Exception, match=r"lock|pickle"):
        env.call("lock")
    with pytest.raises(RuntimeError, match=r"row 0 gave back from 'call' does not unpickle"):
        env.call("poison")
    assert env.step(env.rand_action(env.step_mdp(td)))["next", "observation"][:, 0].tolist() == [2, 2]
    env.close()


def test_a_failing_row_is_named_and_a_reset_of_it_makes_it_whole() -> None:
    for kind in (SerialEnv, ParallelEnv):
        env = kind(3, [Trouble, functools.partial(Trouble, "raise"), Trouble])
        td = env.reset()
        td = env.step_mdp(env.step(env.rand_action(td)))
        with pytest.raises(ValueError, match="boom") as caught:
            env.step(env.rand_action(td.clone()))
        assert caught.value.row == 1
        others = env.reset(td.empty().set("_reset", torch.tensor([[True], [False], [False]])))
        assert others["observation"][:, 0].tolist() == [0, 1, 2]  # row 1 is where its last good step left it
        with pytest.raises(RuntimeError, match="was not reset since"):
            env.step(env.rand_action(td.clone()))
        mask = torch.tensor([[False], [True], [False]])
        after = env.reset(td.empty().set("_reset", mask))
        assert after["observation"][:, 0].tolist() == [1, 0, 3]
        assert env.step(env.rand_action(after))["next", "observation"][[0, 2], 0].tolist() == [2, 4]
        env.close()


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_a_row_that_fails_right_after_a_reset_is_where_the_reset_left_it(kind: type) -> None:
    env = kind(2, [Trouble, functools.partial(Trouble, "raise")])
    env.step(env.rand_action(env.reset()))
    td = env.reset()
    with pytest.raises(ValueError, match="boom"):
        env.step(env.rand_action(td))
    after = env.reset(td.empty().set("_reset", torch.tensor([[True], [False]])))
    assert after["observation"].tolist() == [[0, 3, 2], [0, 2, 1]]
    env.close()


def test_ipython_displays_and_completes_it_and_no_worker_is_harmed(env: Any) -> None:
    from IPython.core.completer import Completer
    from IPython.core.formatters import DisplayFormatter

    data, _ = DisplayFormatter().format(env)
    assert "batch_size=torch.Size([3])" in data["text/plain"]
    assert "env.rollout" in Completer(namespace={"env": env}).attr_matches("env.roll")
    assert not env.faults
    assert env.step(env.rand_action(env.reset()))["next", "observation"][:, 0].tolist() == [1, 1, 1]
