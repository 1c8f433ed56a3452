"""Section 5 of the contract: ``step(tensordict)`` and ``step_and_maybe_reset(tensordict)``."""

from __future__ import annotations

import functools
import threading
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torchrl.data import Composite, NonTensor, Unbounded

from shoal import ParallelEnv, SerialEnv
from tests.differential.harness import assert_same
from tests.support import Counter
from tests.zoo.torchrl_envs import TORCHRL_ZOO, CountingEnv, Leaf, described

pytestmark = pytest.mark.usefixtures("nothing_left")

ENGINES: dict[str, Any] = {
    "serial": SerialEnv,
    "parallel": ParallelEnv,
    "messages": functools.partial(ParallelEnv, processes=1, use_buffers=False),
    "lazy": functools.partial(ParallelEnv, processes=1, share_individual_td=True),
    "lazy messages": functools.partial(ParallelEnv, processes=1, share_individual_td=True, use_buffers=False),
}
engines = pytest.mark.parametrize("engine", ENGINES)
BOTH = pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])


# ------------------------------------------------------------------------------------------------------------ input


@engines
def test_entries_that_are_no_input_leaves_do_not_travel(engine: str) -> None:
    """Extra entries of the input neither cost nor break anything: what cannot be sent is not even looked at."""
    env = ENGINES[engine](2, Counter)
    lock = threading.Lock()
    td = env.rand_action(env.reset())
    td["extra"] = NonTensorStack(*(NonTensorData(lock, batch_size=[]) for _ in range(2)))
    td["deep", "wide"] = torch.zeros(2, 4)
    sent: list[Any] = []
    run = env.__dict__["_session"].run
    env.__dict__["_session"].run = lambda *args, **kwargs: (
        sent.append(args[2] if len(args) > 2 else None),
        run(*args, **kwargs),
    )[1]
    for step in (env.step, lambda td: env.step_and_maybe_reset(td)[0]):
        result = step(td.copy())
        assert result.get("extra").tolist()[0] is lock
        assert result["deep", "wide"].shape == (2, 4)
    keys = {key for given in sent for each in (given or {}).values() for key in each.leaves}
    assert keys <= {("action",)}
    env.close()


@engines
@pytest.mark.parametrize("factory", [CountingEnv, lambda: Counter()], ids=["torchrl", "gymnasium"])
def test_a_misshapen_action_names_the_key_the_rows_and_both_shapes_by_every_transport(
    engine: str, factory: Any
) -> None:
    env = ENGINES[engine](2, factory)
    right = env.action_spec.shape[-1]
    td = env.reset()
    for step in (env.step, env.step_and_maybe_reset):
        with pytest.raises(RuntimeError, match=rf"no 'action'.*\b2 rows.*\({right},\)"):
            step(td.copy())
        wrong = td.copy().set("action", torch.zeros(2, right + 1, dtype=env.action_spec.dtype))
        with pytest.raises(RuntimeError, match=rf"'action'.*2.*{right + 1},?\).*expected.*\b{right},?\)"):
            step(wrong)
    env.close()


@BOTH
def test_a_misshapen_action_of_a_multi_task_row_names_key_row_count_and_both_shapes(kind: type) -> None:
    factories = [described(actions=(Leaf(("agents", "action"), shape=(n,)),)) for n in (1, 2)]
    env = kind(2, factories)
    td = env.rand_action(env.reset())
    rows = td.unbind(0)
    bad = rows[1].clone().set(("agents", "action"), torch.zeros(3))
    with pytest.raises(RuntimeError, match=r"'agents\.action'.*row 1 of 2 rows.*\(3,\).*expected \(2,\)"):
        env.step(type(td).lazy_stack([rows[0], bad]))
    gone = rows[1].clone().exclude(("agents", "action"))
    with pytest.raises(RuntimeError, match=r"no 'agents\.action' for row 1 of 2 rows.*\(2,\)"):
        env.step(type(td).lazy_stack([rows[0], gone]))
    env.close()


# ---------------------------------------------------------------------------------------------------------- results


@engines
def test_step_adds_next_to_its_input_and_step_and_maybe_reset_returns_the_input_and_a_root_of_its_own(
    engine: str,
) -> None:
    env = ENGINES[engine](2, Counter)
    td = env.rand_action(env.reset())
    before = td.clone()
    assert env.step(td) is td
    assert set(td.keys()) == {*before.keys(), "next"}
    assert (td.exclude("next") == before).all()
    again = before.clone()
    done, root = env.step_and_maybe_reset(again)
    assert done is again
    assert root is not again
    assert set(again.keys()) == {*before.keys(), "next"}
    assert (again.exclude("next") == before).all()
    assert "next" not in root.keys()
    env.close()


@engines
@pytest.mark.parametrize("factory", [Counter, CountingEnv])
def test_rows_that_are_done_are_reset_in_the_same_exchange(engine: str, factory: Any) -> None:
    kwargs = [{"length": n} if factory is Counter else {"max_steps": n} for n in (1, 5)]
    env = ENGINES[engine](2, factory, create_env_kwargs=kwargs)
    td = env.reset()
    session = env.__dict__["_session"]
    commands: list[str] = []
    run = session.run
    session.run = lambda opcode, *args, **kwargs: (commands.append(opcode.name), run(opcode, *args, **kwargs))[1]
    for count in (1, 2):
        done, td = env.step_and_maybe_reset(env.rand_action(td))
        assert done["next", "observation"][:, 0].tolist() == [1, count]
        assert done["next", "done"].flatten().tolist() == [True, False]
        assert td["observation"][:, 0].tolist() == [0, count]
        assert not td["done"].any()
    assert commands == ["STEP_AND_MAYBE_RESET"] * 2
    commands.clear()
    env.rollout(3, break_when_any_done=False, auto_reset=False, tensordict=td)
    assert commands == ["STEP_AND_MAYBE_RESET"] * 2 + ["STEP"]
    env.close()


# ----------------------------------------------------------------------------------------------------- partial steps


@engines
@pytest.mark.parametrize("name", ["text", "object", "tensorclass"])
def test_a_partial_step_repeats_the_inputs_values_of_any_kind_and_leaves_the_other_rows_alone(
    engine: str, name: str
) -> None:
    env, single = ENGINES[engine](3, TORCHRL_ZOO[name]), TORCHRL_ZOO[name]()
    env.set_seed(4, static_seed=True)
    single.set_seed(4)
    action = single.full_action_spec.rand()
    every = torch.stack([action] * 3)
    roots = [single.reset()]
    for _ in range(3):
        roots.append(single.step_mdp(single.step(roots[-1].copy().update(action))))
    keys = list(single.full_observation_spec.keys(True, True))
    root = env.reset()
    steps = [0, 0, 0]
    for mask in ((True, False, True), (False, False, False), (True, True, False), (True, True, True)):
        td = env.step(root.copy().update(every).set("_step", torch.tensor(mask)))
        steps = [count + moved for count, moved in zip(steps, mask, strict=True)]
        for row, count in enumerate(steps):
            assert_same(roots[count].select(*keys), td["next"][row].select(*keys))
        if not any(mask):
            assert not td["next", "done"].any()
        root = env.step_mdp(td.exclude("_step"))
        if steps[0] == 3:
            break
    env.close()


@engines
def test_rows_that_do_not_step_have_zeros_in_next_where_the_input_has_nothing(engine: str) -> None:
    env = ENGINES[engine](2, Counter)
    td = env.step(env.rand_action(env.reset()))
    td = env.rand_action(env.step_mdp(td))
    bare = td.select("action").set("_step", torch.tensor([True, False]))
    bare["action"] = torch.tensor([[0, 1, 0], [0, 0, 1]])
    after = env.step(bare)
    assert after["next", "observation"].tolist() == [[2, 1, 2], [0, 0, 0]]
    assert after["next", "reward"].flatten().tolist() == [1, 0]
    assert after["next", "done"].flatten().tolist() == [False, False]
    assert env.get_attr("steps") == [2, 1]
    env.close()


@engines
def test_a_partial_step_and_maybe_reset_leaves_rows_that_do_not_step_as_they_are(engine: str) -> None:
    env = ENGINES[engine](2, Counter, create_env_kwargs={"length": 1})
    td = env.rand_action(env.reset()).set("_step", torch.tensor([False, True]))
    done, root = env.step_and_maybe_reset(td)
    assert done["next", "done"].flatten().tolist() == [False, True]
    assert done["next", "observation"][:, 0].tolist() == [0, 1]
    assert root["observation"].tolist() == [[0, 1, 0], [0, 2, 1]]
    assert env.get_attr("resets") == [1, 2]
    env.close()


# ------------------------------------------------------------------------------------------------------- set in next


@engines
def test_leaves_in_the_inputs_next_survive_where_no_spec_knows_them_and_never_replace_a_result(engine: str) -> None:
    for factory in (Counter, CountingEnv):
        env = ENGINES[engine](2, factory)
        td = env.rand_action(env.reset())
        td["next", "hidden"] = torch.arange(2.0)
        td["next", "deep", "hidden"] = torch.arange(2.0) + 1
        td["next", "observation"] = torch.full_like(td["observation"], 9)
        td["next", "done"] = torch.ones(2, 1, dtype=torch.bool)
        result = env.step(td.clone())
        done, root = env.step_and_maybe_reset(td.clone())
        for each, count in ((result, 1), (done, 2)):
            assert each["next", "hidden"].tolist() == [0, 1]
            assert each["next", "deep", "hidden"].tolist() == [1, 2]
            assert each["next", "observation"][:, 0].tolist() == [count] * 2
            assert each["next", "done"].flatten().tolist() == [False] * 2
        assert root["observation"][:, 0].tolist() == [2, 2]
        env.close()


# -------------------------------------------------------------------------------------------------------- any size


class Parrot(CountingEnv):
    """Takes text of any size as its action, and says it back."""

    def __init__(self) -> None:
        super().__init__(max_steps=100)
        self.words = "-"
        self.observation_spec = Composite(observation=Unbounded((1,)), words=NonTensor((), example_data="words"))
        self.action_spec = NonTensor((), example_data="words")

    def _observe(self) -> Any:
        return super()._observe().set("words", NonTensorData(self.words, batch_size=[]))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.words = tensordict["action"]
        return super()._step(tensordict.empty().set("action", torch.zeros(2)))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.words = "-"
        return super()._reset(tensordict, **kwargs)


def spoken(*letters: str) -> NonTensorStack:
    return NonTensorStack(*(NonTensorData(letter * 5_000_000, batch_size=[]) for letter in letters))


@BOTH
def test_five_megabytes_each_way_in_every_row_at_once_under_full_and_partial_steps_and_resets(kind: type) -> None:
    env = kind(3, Parrot)
    heads = lambda stack: [str(words)[:1] for words in stack]  # noqa: E731
    td = env.reset()
    assert heads(td["words"]) == ["-", "-", "-"]
    done, td = env.step_and_maybe_reset(td.set("action", spoken("a", "b", "c")))
    for words in (done["next", "words"], td["words"]):
        assert heads(words) == ["a", "b", "c"]
        assert [len(str(each)) for each in words] == [5_000_000] * 3
    stepped = env.step(td.set("action", spoken("d", "e", "f")).set("_step", torch.tensor([False, True, True])))
    assert heads(stepped["next", "words"]) == ["a", "e", "f"]
    assert [len(str(each)) for each in stepped["next", "words"]] == [5_000_000] * 3
    after = env.reset(td.empty().set("_reset", torch.tensor([[False], [True], [False]])))
    assert heads(after["words"]) == ["a", "-", "f"]
    env.close()


# -------------------------------------------------------------------------------------------------------- multi-task


class Wide(Counter):
    """Observes two numbers more, under another key too."""

    observation_space = gym.spaces.Dict(wide=gym.spaces.Box(-np.inf, np.inf, (5,), np.float32))
    action_space = gym.spaces.Discrete(2)

    def observe(self) -> Any:
        return {"wide": np.concatenate([super().observe(), [0, 0]]).astype(np.float32)}


@BOTH
def test_rows_of_other_keys_and_shapes_step_and_reset_in_parts_as_they_would_alone(kind: type) -> None:
    env = kind(2, [Counter, Wide])
    td = env.reset()
    assert set(td[0].keys()) == {"observation", "done", "terminated", "truncated"}
    assert set(td[1].keys()) == {"wide", "done", "terminated", "truncated"}
    td = env.step_mdp(env.step(env.rand_action(td)))
    td = env.step(env.rand_action(td).set("_step", torch.tensor([True, False])))
    assert td["next"][0]["observation"].tolist() == [2, 1, 2]
    assert td["next"][1]["wide"].tolist() == [1, 1, 1, 0, 0]
    after = env.reset(td.select().set("_reset", torch.tensor([[False], [True]])))
    assert after[0]["observation"].tolist() == [2, 1, 2]
    assert after[1]["wide"].tolist() == [0, 2, 1, 0, 0]
    done, root = env.step_and_maybe_reset(env.rand_action(after))
    assert done["next"][1]["wide"][0] == root[1]["wide"][0] == 1
    assert set(root[0].keys()) - {"action"} == {"observation", "done", "terminated", "truncated"}
    env.close()
