"""A rollout that is written in place is the one that torchrl's own loop and stack would give."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import EnvBase, GymEnv, StepCounter, TransformedEnv

from shoal import ParallelEnv, RestartPolicy, SerialEnv
from shoal.envs import batched
from tests.support import Counter, Trouble

pytestmark = pytest.mark.usefixtures("nothing_left")

KINDS: dict[str, Any] = {
    "serial": SerialEnv,
    "parallel": ParallelEnv,
    "grouped": functools.partial(ParallelEnv, processes=2),
}
kinds = pytest.mark.parametrize("kind", KINDS)


class Dictionary(Counter):
    """Observes two leaves, one of them 64-bit."""

    observation_space = gym.spaces.Dict(
        {"count": gym.spaces.Box(0, 99, (2,), np.float64), "frame": gym.spaces.Box(0, 255, (4, 4), np.uint8)}
    )

    def observe(self) -> Any:
        return {
            "count": np.array([self.steps, self.resets], np.float64),
            "frame": np.full((4, 4), self.total, np.uint8),
        }


FACTORIES: dict[str, Any] = {
    "counter": functools.partial(Counter, 3),
    "dictionary": functools.partial(Dictionary, 4),
    "wrapped": functools.partial(GymEnv, "CartPole-v1"),
    "categorical": functools.partial(GymEnv, "CartPole-v1", categorical_action_encoding=True),
    "continuous": functools.partial(GymEnv, "Pendulum-v1"),
}


def both(kind: str, factory: Any, steps: int, **kwargs: Any) -> tuple[Any, Any]:
    """A rollout in place, and the same by torchrl's own loop."""
    results = []
    for rollout in (lambda env: env.rollout, lambda env: functools.partial(EnvBase.rollout, env)):
        env = KINDS[kind](3, factory)
        env.set_seed(0)
        torch.manual_seed(1)
        with mock.patch.object(batched, "rollout_in_place", wraps=batched.rollout_in_place) as used:
            results.append(rollout(env)(steps, break_when_any_done=False, **kwargs))
        assert used.called == (len(results) == 1)
        after = env.step(env.rand_action(env.reset()))["next"]
        assert after.batch_size == (3,)
        env.close()
    return results[0], results[1]


@kinds
@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("steps", [1, 40])
def test_it_is_the_rollout_of_torchrls_own_loop(kind: str, factory: str, steps: int) -> None:
    mine, theirs = both(kind, FACTORIES[factory], steps)
    assert mine.batch_size == theirs.batch_size == (3, steps)
    assert mine.names == theirs.names
    assert mine.device == theirs.device
    keys = sorted(map(str, theirs.keys(True, True)))
    assert sorted(map(str, mine.keys(True, True))) == keys
    for key in theirs.keys(True, True):
        assert mine[key].dtype == theirs[key].dtype, key
        assert torch.equal(mine[key], theirs[key]), key
        assert mine[key].is_contiguous()


@kinds
def test_it_goes_on_from_a_root(kind: str) -> None:
    env = KINDS[kind](2, functools.partial(Counter, 5))
    td = env.step_mdp(env.step(env.rand_action(env.reset())))
    rollout = env.rollout(6, tensordict=td.exclude("action"), auto_reset=False, break_when_any_done=False)
    assert rollout["observation"][:, :, 0].tolist() == [[1, 2, 3, 4, 0, 1]] * 2
    assert rollout["next", "observation"][:, :, 0].tolist() == [[2, 3, 4, 5, 1, 2]] * 2
    with pytest.raises(RuntimeError, match="tensordict must be provided"):
        env.rollout(3, auto_reset=False, break_when_any_done=False)
    env.close()


@kinds
def test_nothing_that_happens_later_changes_it(kind: str) -> None:
    env = KINDS[kind](2, functools.partial(Counter, 5))
    rollout = env.rollout(8, break_when_any_done=False)
    copy = rollout.clone()
    env.rollout(8, break_when_any_done=False)
    env.reset()
    env.close()
    assert (rollout == copy).all()
    assert (
        rollout["observation"].untyped_storage().data_ptr()
        != rollout["next", "observation"].untyped_storage().data_ptr()
    )


@kinds
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"break_when_any_done": None},
        {"break_when_any_done": False, "break_when_all_done": True},
        {"break_when_any_done": False, "policy": lambda td: td.set("action", torch.eye(3)[[0, 1]].long())},
        {"break_when_any_done": False, "callback": lambda env, td: None},
        {"break_when_any_done": False, "set_truncated": True},
        {"break_when_any_done": False, "tensordict": TensorDict({"extra": torch.ones(2)}, batch_size=[2])},
    ],
    ids=["break", "none", "all", "policy", "callback", "set_truncated", "extra"],
)
def test_other_rollouts_take_torchrls_loop(kind: str, kwargs: dict[str, Any]) -> None:
    env = KINDS[kind](2, [functools.partial(Counter, 3), functools.partial(Counter, 5)])
    with mock.patch.object(batched, "rollout_in_place") as used:
        rollout = env.rollout(8, **kwargs)
    assert not used.called
    steps = {(): 3, ("break_when_any_done",): 3}.get(tuple(kwargs), 5 if "break_when_all_done" in kwargs else 8)
    assert rollout.batch_size == (2, steps)
    assert ("extra" in rollout.keys()) == ("tensordict" in kwargs)
    env.close()


@kinds
def test_steps_that_read_a_state_take_torchrls_loop(kind: str) -> None:
    def factory() -> Any:
        return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=4))

    env = KINDS[kind](2, factory)
    rollout = env.rollout(6, break_when_any_done=False)
    assert rollout["next", "step_count"].squeeze(-1).tolist() == [[1, 2, 3, 4, 1, 2]] * 2
    assert rollout["step_count"].squeeze(-1).tolist() == [[0, 1, 2, 3, 0, 1]] * 2
    env.close()


def test_faults_that_are_mended_show_in_it() -> None:
    factories = [Counter, functools.partial(Trouble, "kill", at=3)]
    env = ParallelEnv(2, factories, on_failure=RestartPolicy(delay=0.0))
    rollout = env.rollout(6, break_when_any_done=False)
    assert rollout["next", "truncated"].squeeze(-1).tolist() == [[False] * 6, [False, False, True] * 2]
    assert rollout["observation"][1, :, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert rollout["next", "observation"][1, :, 0].tolist() == [1, 2, 2, 1, 2, 2]
    env.close()
