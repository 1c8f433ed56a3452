"""Section 4 of the contract: ``reset(tensordict=None, **kwargs)``."""

from __future__ import annotations

import functools
import threading
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torchrl.envs import step_mdp

from shoal import ParallelEnv, SerialEnv
from tests.support import Counter
from tests.zoo.torchrl_envs import TORCHRL_ZOO, CountingEnv, StatelessPendulum

pytestmark = pytest.mark.usefixtures("nothing_left")

ENGINES: dict[str, Any] = {
    "serial": SerialEnv,
    "parallel": ParallelEnv,
    "grouped": functools.partial(ParallelEnv, processes=1),
    "lazy": functools.partial(SerialEnv, share_individual_td=True),
}
engines = pytest.mark.parametrize("engine", ENGINES)
BOTH = pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])


class Talking(Counter):
    """Says its step in words, too."""

    observation_space = gym.spaces.Dict(count=gym.spaces.Box(-np.inf, np.inf, (3,)), words=gym.spaces.Text(20))

    def observe(self) -> Any:
        return {"count": super().observe(), "words": f"step {self.steps}"}


@engines
def test_a_mask_of_no_row_resets_none_and_one_of_all_rows_resets_all(engine: str) -> None:
    env = ENGINES[engine](2, Counter)
    root = step_mdp(env.step(env.rand_action(env.reset())))
    none = env.reset(root.empty().set("_reset", torch.zeros(2, 1, dtype=torch.bool)))
    assert none["observation"].tolist() == [[1, 1, 1]] * 2
    every = env.reset(root.empty().set("_reset", torch.ones(2, 1, dtype=torch.bool)))
    assert every["observation"].tolist() == [[0, 2, 1]] * 2
    assert env.get_attr("resets") == [2, 2]
    env.close()


@engines
@pytest.mark.parametrize("factory", [Counter, Talking], ids=["numbers", "words"])
def test_rows_that_are_not_reset_show_the_values_of_the_input_where_it_carries_them(engine: str, factory: Any) -> None:
    """Those of the input if it carries them, else those after their last step."""
    env = ENGINES[engine](3, factory)
    key = "observation" if factory is Counter else "count"
    td = env.step(env.rand_action(env.reset()))
    given = td.empty().set("_reset", torch.tensor([[False], [True], [False]]))
    given[key] = torch.full((3, 3), 77.0)
    if factory is Talking:
        given["words"] = NonTensorStack(*(NonTensorData(f"given {row}", batch_size=[]) for row in range(3)))
    after = env.reset(given)
    assert after[key][:, 0].tolist() == [77, 0, 77]
    assert after["done"].flatten().tolist() == [False] * 3
    if factory is Talking:
        assert [str(words) for words in after["words"]] == ["given 0", "step 0", "given 2"]
    # the rows themselves are where they were: it was a matter of the result only
    assert env.get_attr("steps") == [1, 0, 1]
    again = env.reset(td.empty().set("_reset", torch.tensor([[False], [True], [False]])))
    assert again[key][:, 0].tolist() == [1, 0, 1]
    env.close()


@BOTH
def test_a_mask_at_the_root_resets_rows_whose_dones_are_nested(kind: type) -> None:
    """With a mask under ``"_reset"`` (or at nested levels): the root's picks rows, whatever their done keys."""
    env = kind(2, TORCHRL_ZOO["agents_done_alone"])
    single = TORCHRL_ZOO["agents_done_alone"]()
    env.set_seed(3, static_seed=True)
    single.set_seed(3)
    action = single.full_action_spec.rand()
    both = torch.stack([action, action])
    root = step_mdp(env.step(env.reset().update(both)))
    single.step(single.reset().update(action))
    after = env.reset(root.copy().set("_reset", torch.tensor([[False], [True]])))
    # torchrl leaves what lies beside the agents to the input wherever all dones are theirs: here, "map"
    for key, value in single.reset()["agents"].items(True, True):
        assert torch.equal(after[1]["agents", key], value), key
        assert torch.equal(after[0]["agents", key], root[0]["agents", key]), key
    env.close()


@BOTH
def test_a_row_is_reset_if_any_entry_of_its_nested_mask_is_true(kind: type) -> None:
    """Next to nested done keys: one agent's entry resets its row, as it would reset the environment alone."""
    name = "agents_done_alone"
    env, singles = kind(2, TORCHRL_ZOO[name]), [TORCHRL_ZOO[name]() for _ in range(2)]
    env.set_seed(3, static_seed=True)
    for single in singles:
        single.set_seed(3)
    action = singles[0].full_action_spec.rand()
    both = torch.stack([action, action])
    root = step_mdp(env.step(env.reset().update(both)))
    roots = [step_mdp(single.step(single.reset().update(action))) for single in singles]
    mask = torch.tensor([[[False], [True], [False]], [[False], [False], [False]]])
    after = env.reset(root.clone().set(("agents", "_reset"), mask))
    wanted = singles[0].reset(roots[0].clone().set(("agents", "_reset"), mask[0]))
    for key, value in wanted.items(True, True):
        if "action" not in str(key):
            assert torch.equal(after[0][key], value), key
            assert torch.equal(after[1][key], root[1][key]), key
    following = env.step(after.update(both))
    for row, start in enumerate([wanted, roots[1]]):
        alone = singles[row].step(start.update(action))["next"]
        assert all(torch.equal(following["next"][row][key], value) for key, value in alone.items(True, True))
    env.close()


@BOTH
def test_state_in_the_input_reaches_the_rows_being_reset_and_no_other(kind: type) -> None:
    env = kind(3, StatelessPendulum)
    root = env.reset()
    given = root.clone().set("_reset", torch.tensor([[True], [False], [True]]))
    given["params", "gravity"] = torch.tensor([5.0, 6.0, 7.0])
    after = env.reset(given)
    assert after["params", "gravity"].tolist() == [5.0, 6.0, 7.0]
    without = env.reset(TensorDict({"_reset": torch.tensor([[False]] * 3)}, batch_size=[3]))
    assert without["params", "gravity"].tolist() == [5.0, 10.0, 7.0]
    env.close()


class Taking(CountingEnv):
    """Keeps the keyword arguments of its reset, and takes what it has read out of them."""

    def _reset(self, tensordict: Any = None, *, options: Any = None, **kwargs: Any) -> Any:
        self.kept = options
        self.seen = sorted(options.pop("names")) if options and "names" in options else None
        return super()._reset(tensordict, **kwargs)


class TakingGym(Counter):
    """The same as a Gymnasium environment."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.kept = options
        self.seen = sorted(options.pop("names")) if options and "names" in options else None
        return super().reset(seed=seed)


@engines
@pytest.mark.parametrize("factory", [Taking, TakingGym])
def test_no_callers_dict_is_ever_changed_by_a_sub_environment_and_each_row_has_its_own(
    engine: str, factory: Any
) -> None:
    env = ENGINES[engine](2, factory)
    options = {"names": ["b", "a"]}
    env.reset(options=options)
    assert options == {"names": ["b", "a"]}
    assert env.get_attr("seen") == [["a", "b"]] * 2
    own: list[dict[str, Any]] = [{"options": options}, {"options": options}]
    env.reset(list_of_kwargs=own)
    assert own == [{"options": {"names": ["b", "a"]}}] * 2
    assert env.get_attr("seen") == [["a", "b"]] * 2
    env.close()


@engines
@pytest.mark.parametrize("factory", [Taking, TakingGym])
def test_changing_a_dict_after_the_call_has_no_effect(engine: str, factory: Any) -> None:
    env = ENGINES[engine](2, factory)
    options = {"level": [1]}
    env.reset(options=options)
    options["level"].append(2)
    options["more"] = [3]
    assert env.get_attr("kept") == [{"level": [1]}] * 2
    env.close()


class Masks(CountingEnv):
    """Keeps the mask of its reset, and writes to it."""

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
        self.mask = None if tensordict is None else tensordict.get("_reset", None)
        if self.mask is not None:
            self.before = self.mask.tolist()
            self.mask.fill_(False)
        return super()._reset(tensordict, **kwargs)


@engines
def test_no_callers_mask_is_ever_changed_and_changing_one_after_the_call_has_no_effect(engine: str) -> None:
    env = ENGINES[engine](2, Masks)
    env.reset()
    mask = torch.tensor([[True], [True]])
    env.reset(TensorDict({"_reset": mask}, batch_size=[2]))
    assert mask.tolist() == [[True], [True]]
    assert env.get_attr("before") == [[True]] * 2
    mask.fill_(True)
    assert [each.tolist() for each in env.get_attr("mask")] == [[False]] * 2
    env.close()


@engines
def test_entries_of_rows_that_are_not_reset_are_ignored_even_if_they_make_no_sense(engine: str) -> None:
    """What cannot be sent is not even looked at."""
    env = ENGINES[engine](2, Counter)
    env.reset()
    mask = TensorDict({"_reset": torch.tensor([[True], [False]])}, batch_size=[2])
    after = env.reset(mask, list_of_kwargs=[{"options": {"start": 3}}, {"no_such_argument": threading.Lock()}])
    assert after["observation"].tolist() == [[3, 2, 0], [0, 1, 0]]
    with pytest.raises(TypeError, match="no_such_argument"):
        env.reset(list_of_kwargs=[{}, {"no_such_argument": 1}])
    env.close()


@BOTH
def test_keyword_arguments_of_a_row_are_merged_over_the_common_ones(kind: type) -> None:
    env = kind(3, Counter)
    own = [{"options": {"start": 4}}, {}, {"seed": 7}]
    td = env.reset(list_of_kwargs=own, options={"start": 1}, seed=5)
    assert td["observation"][:, 0].tolist() == [4, 1, 1]
    draws = [rng.integers(1000) for rng in env.np_random]
    assert draws == [np.random.default_rng(seed).integers(1000) for seed in (5, 5, 7)]
    env.close()
