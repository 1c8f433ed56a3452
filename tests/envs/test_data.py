"""Cases from the field in which users of batched environments got wrong data."""

from __future__ import annotations

import functools
import os
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import Compose, GymWrapper, RenameTransform, RewardSum, StepCounter, TransformedEnv, step_mdp

from shoal import ParallelEnv, SerialEnv, WorkerTimeout
from tests.support import Counter, SlowMethod
from tests.zoo.torchrl_envs import TORCHRL_ZOO

pytestmark = pytest.mark.usefixtures("nothing_left")

ENGINES: dict[str, Any] = {
    "serial": SerialEnv,
    "parallel": ParallelEnv,
    "grouped": functools.partial(ParallelEnv, processes=2),
    "messages": functools.partial(ParallelEnv, processes=2, use_buffers=False),
    "memmap": functools.partial(ParallelEnv, processes=2, shared_memory=False, memmap=True),
}
engines = pytest.mark.parametrize("engine", ENGINES)


def masked(*rows: bool, n: int = 1) -> TensorDict:
    mask = torch.tensor(rows).unsqueeze(-1).expand(len(rows), n).clone()
    return TensorDict({"_reset": mask}, batch_size=[len(rows)])


@engines
def test_a_step_after_loading_a_state_waits_for_its_own_answer(engine: str) -> None:
    env = ENGINES[engine](3, [Counter, SlowStep, Counter])
    td = env.step(env.rand_action(env.reset()))
    env.load_state_dict(env.state_dict())
    td = env.step(env.rand_action(step_mdp(td)))
    assert td["next", "observation"][:, 0].tolist() == [2, 2, 2]
    env.close()


class SlowStep(SlowMethod):
    def step(self, action: int) -> Any:
        self.slow(0.2)
        return super().step(action)


def test_a_late_answer_after_a_timeout_is_never_taken_for_a_later_commands() -> None:
    env = ParallelEnv(2, [Counter, SlowStep], step_timeout=0.05)
    td = env.reset()
    with pytest.raises(WorkerTimeout, match=r"row 1 .*within 0\.05 s"):
        env.step(env.rand_action(td))
    assert env.is_closed
    assert env.reset()["observation"].tolist() == [[0, 1, 0], [0, 1, 0]]
    env.close()


@engines
def test_a_step_counter_truncates_inside_and_outside_alike(engine: str) -> None:
    make = lambda: GymWrapper(Counter(1000))  # noqa: E731
    inside = ENGINES[engine](3, lambda: TransformedEnv(make(), StepCounter(max_steps=10)))
    outside = TransformedEnv(ENGINES[engine](3, make), StepCounter(max_steps=10))
    for env in (inside, outside):
        rollout = env.rollout(31, break_when_any_done=False)
        assert rollout["next", "truncated"][0].flatten().nonzero().flatten().tolist() == [9, 19, 29]
        env.close()


class Talking(Counter):
    """Says its step in words, too."""

    observation_space = gym.spaces.Dict(count=gym.spaces.Box(-np.inf, np.inf, (3,)), words=gym.spaces.Text(20))

    def observe(self) -> Any:
        return {"count": super().observe(), "words": f"step {self.steps}"}


@engines
def test_a_partial_reset_leaves_the_others_where_they_are_in_numbers_and_words(engine: str) -> None:
    env = ENGINES[engine](3, functools.partial(Talking, 100))
    td = env.reset()
    for _ in range(4):
        td = step_mdp(env.step(env.rand_action(td)))
    td = env.reset(masked(True, False, True))
    assert td["count"][:, 0].tolist() == [0, 4, 0]
    assert [str(words) for words in td["words"]] == ["step 0", "step 4", "step 0"]
    _, td = env.step_and_maybe_reset(env.rand_action(td))
    td = env.reset(masked(False, False, True))
    assert td["count"][:, 0].tolist() == [1, 5, 0]
    assert [str(words) for words in td["words"]] == ["step 1", "step 5", "step 0"]
    env.close()


@engines
def test_rows_may_be_batches_with_masks_of_their_own(engine: str) -> None:
    env = ENGINES[engine](2, TORCHRL_ZOO["batched"])
    assert env.batch_size == (2, 4)
    td = env.step(env.rand_action(env.reset()))
    assert td["next", "done"].shape == (2, 4, 1)
    root = step_mdp(td)
    mask = torch.zeros(2, 4, 1, dtype=torch.bool)
    mask[1, 2] = True
    after = env.reset(root.copy().set("_reset", mask))
    for key in ("observation", "done"):
        assert torch.equal(after[key][0], root[key][0])
        assert torch.equal(after[key][1, [0, 1, 3]], root[key][1, [0, 1, 3]])
    env.close()


@engines
def test_agents_done_alone_are_reset_alike_with_the_transform_inside_and_outside(engine: str) -> None:
    name = "agents_done_alone"
    sums = lambda: RewardSum()  # noqa: E731
    inside = ENGINES[engine](2, lambda: TransformedEnv(TORCHRL_ZOO[name](), sums()))
    outside = TransformedEnv(ENGINES[engine](2, TORCHRL_ZOO[name]), sums())
    torch.manual_seed(0)
    actions = [inside.full_action_spec.rand() for _ in range(12)]
    results = []
    for env in (inside, outside):
        env.set_seed(3)
        td, seen = env.reset(), []
        for action in actions:
            done, td = env.step_and_maybe_reset(td.update(action))
            seen.append((done["next"].clone(), td.clone()))
        results.append(seen)
        env.close()
    for (next_in, root_in), (next_out, root_out) in zip(*results, strict=True):
        assert (next_in == next_out).all()
        keys = [key for key in root_in.keys(True, True) if "action" not in str(key)]
        assert (root_in.select(*keys) == root_out.select(*keys)).all()


class Configured(Counter):
    """Counts in its configuration."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(100)
        config["built"] += 1
        self.config = config

    def step(self, action: int) -> Any:
        self.config["steps"].append(action)
        observation, *rest = super().step(action)
        observation[:] = self.config["built"], len(self.config["steps"]), 0
        return observation, *rest


@engines
def test_a_factory_that_closes_over_a_config_gives_each_row_its_own(engine: str) -> None:
    config = {"built": 0, "steps": []}
    env = ENGINES[engine](3, lambda: Configured(config))
    td = env.reset()
    for count in (1, 2):
        td = step_mdp(env.step(env.rand_action(td)))
        assert td["observation"].tolist() == [[1, count, 0]] * 3
    assert config == {"built": 0, "steps": []}
    env.close()


@engines
def test_renaming_inside_and_outside_gives_equal_rollouts(engine: str) -> None:
    rename = lambda: Compose(RenameTransform(["observation"], ["seen"], create_copy=False))  # noqa: E731
    inside = ENGINES[engine](2, lambda: TransformedEnv(GymWrapper(Counter(4)), rename()))
    outside = TransformedEnv(ENGINES[engine](2, lambda: GymWrapper(Counter(4))), rename())
    rollouts = []
    for env in (inside, outside):
        torch.manual_seed(0)
        rollouts.append(env.rollout(10, break_when_any_done=False))
        env.close()
    assert (rollouts[0] == rollouts[1]).all()


class Big(Counter):
    """Gives and takes five megabytes of text."""

    observation_space = gym.spaces.Dict(count=gym.spaces.Box(-np.inf, np.inf, (3,)), words=gym.spaces.Text(10**7))

    def observe(self) -> Any:
        return {"count": super().observe(), "words": f"{self.steps}" * 5_000_000}

    def measure(self, text: str) -> int:
        return len(text)


@pytest.mark.parametrize("engine", ["serial", "parallel", "grouped"])
def test_five_megabytes_in_every_row_both_ways(engine: str) -> None:
    env = ENGINES[engine](4, Big)
    td = env.reset()
    for step in range(1, 3):
        done, td = env.step_and_maybe_reset(env.rand_action(td))
        for words in (done["next", "words"], td["words"]):
            assert [str(each)[-1] for each in words] == [str(step)] * 4
            assert all(len(str(each)) == 5_000_000 for each in words)
    assert env.measure("x" * 5_000_000) == [5_000_000] * 4
    env.close()


@engines
def test_masks_and_keyword_arguments_of_the_caller_are_left_alone(engine: str) -> None:
    env = ENGINES[engine](2, Counter)
    env.reset()
    options, own = {"options": {"start": 2}}, [{"options": {"start": 3}}, {}]
    assert env.reset(**options)["observation"][:, 0].tolist() == [2, 2]
    assert env.reset(list_of_kwargs=own, options={"start": 1})["observation"][:, 0].tolist() == [3, 1]
    assert (options, own) == ({"options": {"start": 2}}, [{"options": {"start": 3}}, {}])
    td = masked(True, False)
    mask = td["_reset"]
    env.reset(td)
    assert mask.flatten().tolist() == [True, False]
    with pytest.raises(RuntimeError, match="3 dicts for 2"):
        env.reset(list_of_kwargs=[{}] * 3)
    env.close()


@engines
def test_a_wrong_action_names_the_key_the_rows_and_both_shapes(engine: str) -> None:
    env = ENGINES[engine](3, Counter)
    td = env.reset()
    with pytest.raises(RuntimeError, match=r"no 'action'.*shape \(3, 3\) \(3 rows of \(3,\), int64\)"):
        env.step(td.clone())
    with pytest.raises(RuntimeError, match=r"'action' \(action\) has shape \(3, 2\): expected \(3, 3\)"):
        env.step_and_maybe_reset(td.clone().set("action", torch.zeros(3, 2)))
    with pytest.raises(RuntimeError, match=r"has dtype torch.float32: expected torch.int64"):
        env.step(td.clone().set("action", torch.zeros(3, 3)))
    assert env.step(env.rand_action(td))["next", "observation"][:, 0].tolist() == [1, 1, 1]
    env.close()


@engines
def test_extra_entries_and_gradients_of_the_input_neither_cost_nor_break(engine: str) -> None:
    env = ENGINES[engine](2, Counter)
    td = env.rand_action(env.reset())
    weight = torch.ones(2, 5, requires_grad=True)
    td.update({"extra": weight * 2, ("deep", "extra"): torch.zeros(2, 1), "words": "text"})
    done, root = env.step_and_maybe_reset(td)
    assert done["extra"].requires_grad
    assert torch.equal(root["extra"], weight * 2)
    assert torch.equal(root["deep", "extra"], torch.zeros(2, 1))
    assert env.step(env.rand_action(root))["next", "observation"][:, 0].tolist() == [2, 2]
    env.close()


@engines
def test_input_of_another_dtype_does_not_spread_to_the_rows_that_take_part(engine: str) -> None:
    env = ENGINES[engine](2, Counter)
    td = env.rand_action(env.reset())
    td["observation"] = td["observation"].double()
    stepped = env.step(td.clone().set("_step", torch.tensor([True, False])))
    assert stepped["next", "observation"].dtype == torch.float32
    assert stepped["next", "observation"][:, 0].tolist() == [1, 0]
    env.close()


def test_workers_without_a_seed_differ(tmp_path: Any) -> None:
    env = ParallelEnv(4, Random)
    assert len({tuple(values) for values in env.reset()["observation"].tolist()}) == 4
    assert len(set(env.call("pid"))) == 4
    env.close()


class Random(Counter):
    """Draws from the process-wide generators."""

    def observe(self) -> Any:
        import random

        return np.array([random.random(), np.random.random(), 0], np.float32)

    def pid(self) -> int:
        return os.getpid()


@pytest.mark.parametrize("method", ["step", "step_and_maybe_reset"])
@engines
def test_an_input_of_another_batch_size_is_refused(engine: str, method: str) -> None:
    env = ENGINES[engine](3, Counter)
    action = env.rand_action(env.reset())["action"]
    for size in ([], [3, 3]):  # an action has three entries
        given = TensorDict({"action": action}, batch_size=size)
        with pytest.raises(RuntimeError, match="batch_size"):
            getattr(env, method)(given)
        assert "next" not in given.keys()
    env.close()
