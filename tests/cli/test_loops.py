"""The stepping itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torchrl.envs import GymWrapper

from shoal import SerialEnv
from shoal.cli.loops import BATCHES_OF_ACTIONS, PLAIN_ACTIONS, Loop, loop_for
from tests.cli.support import torchrl_env
from tests.support import Counter


class Recorder(Counter):
    """Remembers its actions."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[int] = []

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(int(action))
        return super().step(action)


def stepped(loop: Loop, steps: int) -> None:
    loop.prepare()
    for _ in range(steps):
        loop.step()


def test_a_bare_environment_is_reset_whenever_it_is_done() -> None:
    env = Counter(length=5)
    stepped(loop_for(env), 12)
    assert (env.total, env.resets, env.steps) == (12, 3, 2)


def test_a_torchrl_environment_is_reset_whenever_it_is_done() -> None:
    env = Counter(length=5)
    stepped(loop_for(GymWrapper(env)), 12)
    assert (env.total, env.steps) == (12, 2)


@pytest.mark.parametrize(("wrap", "drawn"), [(lambda env: env, PLAIN_ACTIONS), (GymWrapper, BATCHES_OF_ACTIONS)])
def test_actions_are_random_and_drawn_beforehand(wrap: Any, drawn: int) -> None:
    env = Recorder()
    stepped(loop_for(wrap(env)), 2 * drawn)
    assert set(env.actions) == {0, 1, 2}
    assert env.actions[:drawn] == env.actions[drawn:]


def test_each_row_of_a_batch_is_stepped_with_its_own_actions() -> None:
    batch = SerialEnv(3, Recorder)
    stepped(loop_for(batch), 50)
    actions = np.array([env.actions for env in batch._envs])
    assert actions.shape == (3, 50)
    assert len({tuple(each) for each in actions}) == 3
    batch.close()


def test_several_leaves_of_actions_are_given_together() -> None:
    class Two(Counter):
        import gymnasium

        action_space = gymnasium.spaces.Dict(
            {"a": gymnasium.spaces.Discrete(2), "b": gymnasium.spaces.Box(-1, 1, (2,), np.float32)}
        )

        def step(self, action: Any) -> Any:
            assert set(action) == {"a", "b"}
            return super().step(0)

    batch = SerialEnv(2, Two)
    loop = loop_for(batch)
    assert len(batch.action_keys) == 2
    stepped(loop, 3)
    batch.close()


def test_a_run_takes_at_least_one_step_and_gives_steps_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    env = Counter()
    loop = loop_for(env)
    loop.prepare()
    ticks = iter([0.0, 4.0, 10.0, 12.0, 14.0, 16.0])
    monkeypatch.setattr("shoal.cli.loops.time.perf_counter", lambda: next(ticks))
    assert loop.run(0.5) == 0.25
    assert loop.run(5.0) == 0.5
    assert env.total == 4


def test_families() -> None:
    assert loop_for(Counter()).family == "gymnasium"
    assert loop_for(torchrl_env()).family == "torchrl"
    assert loop_for(SerialEnv(1, Counter)).family == "torchrl"
