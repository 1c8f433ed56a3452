"""A rollout that is written in place is the one that torchrl's own loop and stack would give."""

from __future__ import annotations

import functools
import itertools
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, Unbounded
from torchrl.envs import EnvBase, GymEnv, StepCounter, TransformedEnv

from shoal import ParallelEnv, RestartPolicy, SerialEnv
from shoal.envs import batched, rollout
from tests.envs.kinds import KINDS, kinds
from tests.support import Counter, Trouble

pytestmark = pytest.mark.usefixtures("nothing_left")


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


class TwoActions(Counter):
    """Takes two actions."""

    action_space = gym.spaces.Dict({"turn": gym.spaces.Discrete(3), "push": gym.spaces.Box(-1, 1, (2,), np.float32)})

    def step(self, action: Any) -> Any:
        assert set(action) == {"turn", "push"}
        return super().step(action["turn"])


class Draws(Counter):
    """Observes a draw from torch's own generator."""

    def observe(self) -> Any:
        return super().observe() + torch.rand(()).numpy()


FACTORIES: dict[str, Any] = {
    "two actions": functools.partial(TwoActions, 4),
    "counter": functools.partial(Counter, 3),
    "dictionary": functools.partial(Dictionary, 4),
    "wrapped": functools.partial(GymEnv, "CartPole-v1"),
    "categorical": functools.partial(GymEnv, "CartPole-v1", categorical_action_encoding=True),
    "continuous": functools.partial(GymEnv, "Pendulum-v1"),
}


def both(kind: str, factory: Any, steps: int, **kwargs: Any) -> tuple[Any, Any]:
    """A rollout in place, and the same by torchrl's own loop, which leave the generator in the same state."""
    results, states = [], []
    for roll in (lambda env: env.rollout, lambda env: functools.partial(EnvBase.rollout, env)):
        env = KINDS[kind](3, factory)
        env.set_seed(0)
        torch.manual_seed(1)
        with mock.patch.object(batched, "random_rollout", wraps=batched.random_rollout) as used:
            results.append(roll(env)(steps, break_when_any_done=False, **kwargs))
            states.append(torch.get_rng_state())
        assert used.called == (len(results) == 1)
        after = env.step(env.rand_action(env.reset()))["next"]
        assert after.batch_size == (3,)
        env.close()
    assert torch.equal(*states)
    return results[0], results[1]


def same(mine: Any, theirs: Any) -> None:
    assert type(mine) is type(theirs) is TensorDict
    assert mine.batch_size == theirs.batch_size
    assert mine.names == theirs.names
    assert mine.device == theirs.device
    keys = sorted(map(str, theirs.keys(True, True)))
    assert sorted(map(str, mine.keys(True, True))) == keys
    for key in theirs.keys(True, True):
        assert mine[key].dtype == theirs[key].dtype, key
        assert torch.equal(mine[key], theirs[key]), key
        assert mine[key].is_contiguous()
        assert mine[key].requires_grad == theirs[key].requires_grad
    for key in theirs.keys(True):
        if isinstance(theirs[key], TensorDict):
            assert mine[key].batch_size == theirs[key].batch_size, key
            assert mine[key].names == theirs[key].names, key


@kinds
@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("steps", [1, 40])
def test_it_is_the_rollout_of_torchrls_own_loop(kind: str, factory: str, steps: int) -> None:
    mine, theirs = both(kind, FACTORIES[factory], steps)
    assert mine.batch_size == (3, steps)
    same(mine, theirs)


def test_an_environment_that_draws_from_the_same_generator_is_not_in_the_way() -> None:
    mine, theirs = both("serial", functools.partial(Draws, 4), 9)
    same(mine, theirs)


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
        {"break_when_any_done": False, "break_when_all_done": True},
        {"break_when_any_done": False, "callback": lambda env, td: None},
        {"break_when_any_done": False, "set_truncated": True},
    ],
    ids=["all", "callback", "set_truncated"],
)
def test_other_rollouts_take_torchrls_loop(kind: str, kwargs: dict[str, Any]) -> None:
    env = KINDS[kind](2, [functools.partial(Counter, 3), functools.partial(Counter, 5)])
    with mock.patch.object(batched, "random_rollout") as random, mock.patch.object(rollout, "_Record") as record:
        rolled = env.rollout(8, **kwargs)
    assert not random.called
    assert not record.called
    assert rolled.batch_size == (2, 5 if "break_when_all_done" in kwargs else 8)
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


# With a policy.


class Policies:
    """Policies of all kinds; each made anew for a rollout. Counter's action is one of three."""

    @staticmethod
    def action(td: TensorDict) -> torch.Tensor:
        return torch.eye(3, dtype=torch.int64)[(td["observation"].sum(-1).long() * 7) % 3]

    @classmethod
    def writes(cls) -> Any:
        return lambda td: td.set("action", cls.action(td))

    @classmethod
    def returns_another(cls) -> Any:
        return lambda td: TensorDict({"action": cls.action(td), "extra": td["observation"] * 2}, td.batch_size)

    @classmethod
    def module(cls) -> Any:
        def module(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return cls.action({"observation": observation}), observation + 0.5

        return TensorDictModule(module, in_keys=["observation"], out_keys=["action", ("params", "loc")])

    @classmethod
    def nested(cls) -> Any:
        def policy(td: Any) -> Any:
            inner = TensorDict({"loc": td["observation"].clone()}, batch_size=[2, 3])
            return td.update({"action": cls.action(td), "params": inner, "mean": td["observation"].bfloat16()})

        return policy

    @classmethod
    def remembers(cls) -> Any:
        """Adds to what it wrote a step ago, in a nested TensorDict and in place."""

        def policy(td: Any) -> Any:
            before = td.get(("memory", "count"), None)
            td.set(("memory", "count"), torch.zeros(2, 1) if before is None else before + 1)
            td.set("trace", torch.zeros(2) if before is None else td["trace"] + 10)
            return td.set("action", cls.action(td))

        return policy

    @classmethod
    def changes(cls, how: str) -> Any:
        """Writes another form from its third call on."""
        calls = itertools.count()

        def policy(td: Any) -> Any:
            later = next(calls) >= 2
            td.set("action", cls.action(td))
            if how == "shape":
                td.set("extra", torch.ones(2, 3 if later else 2))
            elif how == "key" and later:
                td.set("late", torch.ones(2))
            elif how == "dtype":
                td.set("extra", torch.ones(2, dtype=torch.float64 if later else torch.float32))
            elif how == "action" and later:
                td.set("action", td["action"].int())
            elif how == "text":
                td.set("text", NonTensorStack("a", "b"))
            elif how == "grad":
                td.set("extra", torch.ones(2, requires_grad=later) * 2)
            elif how == "names" and later:
                td.names = ["rows"]
            elif how == "next" and later:
                td.set(("next", "hidden"), torch.ones(2))
            return td

        return policy


def policy_rollouts(kind: str, make: Any, factories: Any, steps: int, **kwargs: Any) -> list[Any]:
    """A rollout in place, and the same by torchrl's own loop."""
    results: list[Any] = []
    for roll in (lambda env: env.rollout, lambda env: functools.partial(EnvBase.rollout, env)):
        env = KINDS[kind](2, factories)
        env.set_seed(0)
        torch.manual_seed(1)
        results.append(roll(env)(steps, make(), **kwargs))
        results.append(env.step(env.rand_action(env.reset()))["next", "observation"])
        env.close()
    assert torch.equal(results[1], results[3])
    return [results[0], results[2]]


COUNTERS = [functools.partial(Counter, 5), functools.partial(Counter, 7)]


@kinds
@pytest.mark.parametrize("make", [Policies.writes, Policies.module, Policies.nested, Policies.remembers])
@pytest.mark.parametrize(("steps", "until_done"), [(1, False), (12, False), (3, True), (12, True), (12, None)])
def test_with_a_policy_it_is_the_rollout_of_torchrls_own_loop(
    kind: str, make: Any, steps: int, until_done: bool | None
) -> None:
    with mock.patch.object(rollout, "_gathered") as gathered:
        mine, theirs = policy_rollouts(kind, make, COUNTERS, steps, break_when_any_done=until_done)
    assert not gathered.called
    assert mine.batch_size == (2, steps if until_done is False else min(steps, 5))
    same(mine, theirs)


@kinds
@pytest.mark.parametrize("until_done", [False, True])
def test_random_actions_until_a_row_is_done(kind: str, until_done: bool) -> None:
    extra = TensorDict({"extra": torch.ones(2, 3)}, batch_size=[2])
    mine, theirs = policy_rollouts(
        kind, lambda: None, COUNTERS, 12, break_when_any_done=until_done, tensordict=extra.clone()
    )
    assert mine["extra"].shape == (2, 5 if until_done else 12, 3)
    same(mine, theirs)


@kinds
@pytest.mark.parametrize("how", ["shape", "key", "dtype", "action", "text", "grad", "names", "next"])
@pytest.mark.parametrize("until_done", [False, True])
@pytest.mark.parametrize("contiguous", [False, None])
def test_a_policy_that_changes_the_form_of_what_it_writes(
    kind: str, how: str, until_done: bool, contiguous: bool | None
) -> None:
    kwargs = {"break_when_any_done": until_done, "return_contiguous": contiguous}
    results: list[Any] = []
    for roll in (lambda env: env.rollout, lambda env: functools.partial(EnvBase.rollout, env)):
        env = KINDS[kind](2, COUNTERS)
        try:
            results.append(roll(env)(12, Policies.changes(how), **kwargs))
        except RuntimeError as error:
            results.append(type(error))
        env.close()
    mine, theirs = results
    assert type(mine) is type(theirs)
    if isinstance(mine, type):
        assert mine is theirs
        return
    assert mine.batch_size == theirs.batch_size == (2, 5 if until_done else 12)
    assert mine.names == theirs.names
    for step in range(mine.shape[1]):
        assert set(mine[:, step].keys(True, True)) == set(theirs[:, step].keys(True, True))
        assert (mine[:, step].exclude("text") == theirs[:, step].exclude("text")).all()
    if how == "text":
        assert mine["text"] == theirs["text"]
    if how == "grad":
        assert mine[:, 3]["extra"].requires_grad == theirs[:, 3]["extra"].requires_grad


@kinds
def test_a_policy_may_write_what_numpy_does_not_know(kind: str) -> None:
    def policy(td: Any) -> Any:
        td.set("small", td["observation"].to(torch.float8_e4m3fn))
        return td.set("action", Policies.action(td))

    mine, theirs = policy_rollouts(kind, lambda: policy, COUNTERS, 7, break_when_any_done=False)
    assert mine["small"].dtype == theirs["small"].dtype
    assert torch.equal(mine["small"].float(), theirs["small"].float())
    same(mine.exclude("small"), theirs.exclude("small"))


@kinds
@pytest.mark.parametrize("until_done", [False, True])
def test_names_that_a_policy_gives_stay(kind: str, until_done: bool) -> None:
    def policy(td: Any) -> Any:
        td.names = ["rows"]
        return td.set("action", Policies.action(td))

    mine, theirs = policy_rollouts(kind, lambda: policy, COUNTERS, 7, break_when_any_done=until_done)
    assert mine.names == theirs.names == ["rows", "time"]
    assert (mine == theirs).all()


@kinds
def test_rows_that_are_done_in_parts_take_torchrls_loop(kind: str) -> None:
    env = KINDS[kind](2, functools.partial(Counter, 4))
    env.reset()
    env.__dict__["_results"].whole_rows = False
    with mock.patch.object(rollout, "_Record") as record:
        assert env.rollout(6, Policies.writes(), break_when_any_done=False).batch_size == (2, 6)
        assert env.rollout(6, Policies.writes()).batch_size == (2, 4)
    assert not record.called
    env.close()


@kinds
def test_what_a_policy_keeps_and_changes_later_is_not_in_it(kind: str) -> None:
    kept: list[Any] = []

    def policy(td: Any) -> Any:
        for before in kept:
            before["observation"].fill_(99.0)
        kept.append(td)
        return td.set("action", Policies.action(td))

    env = KINDS[kind](2, functools.partial(Counter, 50))
    rolled = env.rollout(6, policy, break_when_any_done=False)
    assert rolled["observation"][:, :, 0].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert rolled["next", "observation"][:, :, 0].tolist() == [[1, 2, 3, 4, 5, 6]] * 2
    env.close()


def test_room_that_may_stay_unused_is_bounded() -> None:
    env = SerialEnv(2, functools.partial(Counter, 4))
    with mock.patch.object(rollout, "_Record") as record:
        rolled = env.rollout(1 << 26, Policies.writes())
    assert not record.called
    assert rolled.batch_size == (2, 4)
    env.close()


def test_a_policy_of_rows_that_are_restarted() -> None:
    factories = [Counter, functools.partial(Trouble, "kill", at=3)]
    env = ParallelEnv(2, factories, on_failure=RestartPolicy(delay=0.0))
    rolled = env.rollout(6, Policies.writes(), break_when_any_done=False)
    assert rolled["next", "truncated"].squeeze(-1).tolist() == [[False] * 6, [False, False, True] * 2]
    assert rolled["observation"][1, :, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert env.rollout(6, Policies.writes())["next", "truncated"].squeeze(-1).tolist() == [
        [False] * 3,
        [False, False, True],
    ]
    env.close()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "spec",
    [
        OneHot(5),
        OneHot(2, dtype=torch.bool),
        Categorical(5),
        Bounded(-1, 1, (6,)),
        Bounded(-1, 1, (1,), dtype=torch.float64),
        Bounded(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 2.0]), (2,)),
        Bounded(0, 7, (3,), dtype=torch.int64),
        Bounded(0, 255, (2, 2), dtype=torch.uint8),
        Binary(4),
    ],
    ids=str,
)
def test_actions_that_are_drawn_at_once_are_those_of_single_draws(spec: Any, rows: int) -> None:
    whole = Composite({"action": spec.expand(rows, *spec.shape)}, shape=(rows,))
    torch.manual_seed(3)
    single = torch.stack([whole.rand() for _ in range(37)])
    state = torch.get_rng_state()
    torch.manual_seed(3)
    drawn = rollout._all_draws(whole, 37)
    assert drawn is not None
    assert (drawn == single).all()
    assert torch.equal(torch.get_rng_state(), state)


def test_specs_that_draw_in_another_order_are_not_drawn_at_once() -> None:
    masked = OneHot(3, mask=torch.tensor([True, False, True]))
    for spec in (Unbounded((3,)), MultiOneHot([2, 3]), MultiCategorical([2, 3]), masked):
        assert rollout._all_draws(Composite({"action": spec.expand(2, *spec.shape)}, shape=(2,)), 4) is None
