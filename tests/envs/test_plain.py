"""The short way of a step: it gives what the long way gives, and makes it while the rows are at it."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from torchrl.envs import EnvBase

from shoal import ParallelEnv
from shoal.envs import plain, rollout
from shoal.envs.plain import LargeWay, PlainWay, SmallWay
from tests.envs.kinds import KINDS, kinds
from tests.support import Counter
from tests.zoo.torchrl_envs import CountingEnv

pytestmark = pytest.mark.usefixtures("nothing_left")


class Frames(Counter):
    """Observes a leaf of a few bytes and an image that is too large to be moved together with others."""

    observation_space = gym.spaces.Dict(
        {"count": gym.spaces.Box(0, 99, (2,), np.float64), "frame": gym.spaces.Box(0, 255, (64, 64), np.uint8)}
    )

    def observe(self) -> Any:
        return {
            "count": np.array([self.steps, self.resets], np.float64),
            "frame": np.full((64, 64), self.total, np.uint8),
        }


def way_of(env: Any) -> PlainWay:
    way: PlainWay = env.__dict__["_results"].plain
    return way


def trace(env: Any, steps: int) -> list[TensorDict]:
    """Steps of both kinds, each result as it was given."""
    torch.manual_seed(0)
    td, found = env.reset(), []
    for step in range(steps):
        td = env.rand_action(td)
        if step % 3 == 2:
            found.append(env.step(td))
            td = env.reset(TensorDict({"_reset": td["next", "done"]}, [3])) if td["next", "done"].any() else td
            td = td.exclude("next")
        else:
            stepped, td = env.step_and_maybe_reset(td)
            found += [stepped, td.clone()]
    return found


@kinds
@pytest.mark.parametrize("factory", [Counter, Frames], ids=["small", "large"])
def test_each_way_gives_what_the_long_way_gives(kind: str, factory: Any) -> None:
    factories = [functools.partial(factory, limit) for limit in (2, 3, 50)]
    traces = []
    for limit in (1 << 12, 0, None):
        with mock.patch.object(plain, "_SMALL_BYTES", limit or 0):
            env = KINDS[kind](3, factories)
            env.reset()
        if limit is None:
            env.__dict__["_results"].plain = None
        else:
            assert type(way_of(env)) is (SmallWay if limit and factory is Counter else LargeWay)
        traces.append(trace(env, 12))
        env.close()
    for results in zip(*traces, strict=True):
        assert len({frozenset(result.keys(True, True)) for result in results}) == 1
        assert (results[0] == results[2]).all()
        assert (results[1] == results[2]).all()


@kinds
@pytest.mark.parametrize("factory", [Counter, Frames], ids=["small", "large"])
def test_results_are_nobody_elses_memory(kind: str, factory: Any) -> None:
    env = KINDS[kind](2, factory)
    stepped, td = env.step_and_maybe_reset(env.rand_action(env.reset()))
    leaves = [result[key] for result in (stepped["next"], td) for key in result.keys() if key != "action"]
    copies = [leaf.clone() for leaf in leaves]
    for number, leaf in enumerate(leaves):
        leaf.fill_(1)
        copies[number] = leaf.clone()
        assert all(torch.equal(other, copy) for other, copy in zip(leaves, copies, strict=True))
    env.step_and_maybe_reset(env.rand_action(td.clone()))
    env.close()
    assert all(torch.equal(leaf, copy) for leaf, copy in zip(leaves, copies, strict=True))


@kinds
def test_inputs_that_take_the_long_way(kind: str) -> None:
    env = KINDS[kind](2, Counter)
    td = env.rand_action(env.reset())
    for leaf in ("requires_grad", "locked", "mask"):
        given = td.copy()
        if leaf == "requires_grad":
            given["action"] = given["action"].float().requires_grad_()
        elif leaf == "locked":
            given.lock_()
        else:
            given["_step"] = torch.tensor([True, False])
        assert not way_of(env).write_input(given), leaf
    assert way_of(env).write_input(td)
    with pytest.raises(RuntimeError, match=r"[Ll]ock"):
        env.step(td.copy().lock_())
    env.close()


@kinds
def test_an_action_with_a_gradient_leaves_the_buffers_without(kind: str) -> None:
    env = KINDS[kind](2, functools.partial(gym.make, "Pendulum-v1"))
    td = env.reset()
    td["action"] = torch.zeros(2, 1, requires_grad=True)
    assert not way_of(env).write_input(td)
    env.step_and_maybe_reset(td)
    assert not any(buffer.requires_grad for leaves in way_of(env).leaves.values() for _, buffer in leaves)
    env.close()


@pytest.mark.parametrize("processes", [1, 2])
def test_bfloat16_has_a_way_of_its_own(processes: int) -> None:
    env = ParallelEnv(2, functools.partial(CountingEnv, dtype=torch.bfloat16), processes=processes)
    stepped, td = env.step_and_maybe_reset(env.rand_action(env.reset()))
    assert type(way_of(env)) is LargeWay
    for result in (stepped["next"], td):
        assert result["observation"].dtype == torch.bfloat16
        assert result["observation"].flatten().tolist() == [1, 1]
    env.close()


@kinds
@pytest.mark.parametrize("follows", ["step_and_maybe_reset", "step_mdp"])
def test_what_is_written_to_a_nested_part_of_a_root_is_not_in_the_step_before(kind: str, follows: str) -> None:
    env = KINDS[kind](2, Counter)
    td = env.rand_action(env.reset())
    td["policy", "deep", "loc"] = torch.zeros(2)
    if follows == "step_and_maybe_reset":
        stepped, after = env.step_and_maybe_reset(td)
    else:
        stepped = env.step(td)
        after = env.step_mdp(stepped)
    assert after["policy", "deep", "loc"] is stepped["policy", "deep", "loc"]  # a leaf is handed on
    after["policy", "deep", "loc"] = torch.ones(2)
    after["policy", "deep", "scale"] = torch.ones(2)
    assert stepped["policy", "deep", "loc"].tolist() == [0, 0]
    assert list(stepped["policy", "deep"].keys()) == ["loc"]
    env.close()


def odd_results(env: Any) -> dict[str, Any]:
    """Results of a step, and what users make of them."""

    def stepped() -> Any:
        return env.step(env.rand_action(env.reset()))

    return {
        "plain": stepped(),
        "extras": stepped().update({"extra": torch.ones(2), "deep": TensorDict({"a": torch.ones(2)}, [2])}),
        "text": stepped().set("text", NonTensorStack("a", "b")),
        "device": stepped().to("cpu"),
        "more in next": stepped().set(("next", "hidden"), torch.ones(2)),
        "less in next": stepped().exclude(("next", "truncated")),
        "a tree in next": stepped().set(("next", "observation"), TensorDict({"a": torch.ones(2)}, [2])),
        "mask": stepped().set("_step", torch.ones(2, dtype=torch.bool)),
        "reset": stepped().set("_reset", torch.ones(2, 1, dtype=torch.bool)),
        "reward": stepped().set("reward", torch.ones(2, 1)),
        "names": stepped().refine_names("rows"),
        "one row": stepped()[0],
        "rows twice": torch.stack([stepped(), stepped()], 1),
    }


@kinds
def test_step_mdp_is_torchrls(kind: str) -> None:
    env = KINDS[kind](2, Counter)
    short = set()
    for name, result in odd_results(env).items():
        if way_of(env).advance(result.copy()) is not None:
            short.add(name)
        mine = env.step_mdp(result.copy())
        theirs = EnvBase._step_mdp.fget(env)(result.copy())  # type: ignore[attr-defined]
        assert set(mine.keys(True, True)) == set(theirs.keys(True, True)), name
        assert (mine == theirs).all(), name
        assert mine.batch_size == theirs.batch_size, name
        assert mine.device == theirs.device, name
        assert mine.names == theirs.names, name
    assert short == {"plain", "extras", "text", "device", "reset", "reward"}
    env.close()


class Waits(Counter):
    """Its step goes on when a file appears."""

    file: Path | None = None

    def step(self, action: Any) -> Any:
        deadline = time.monotonic() + 30.0
        while self.file is not None and not self.file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the result was not made while the rows were at it")
        return super().step(action)


@pytest.mark.parametrize("roll", [False, True])
def test_a_result_is_made_while_the_rows_are_at_it(tmp_path: Path, roll: bool) -> None:
    env = ParallelEnv(2, Waits)
    td = env.rand_action(env.reset())
    env.set_attr("file", tmp_path / "made")
    place: Any = (rollout._Record, "write_root") if roll else (PlainWay, "_make")
    original = getattr(*place)

    def made(*args: Any) -> Any:
        result = original(*args)
        (tmp_path / "made").touch()
        return result

    with mock.patch.object(*place, made):
        if roll:
            env.rollout(1, lambda td: td.set("action", torch.eye(3, dtype=torch.int64)[[0, 1]]))
        else:
            env.step_and_maybe_reset(td)
    env.close()


@kinds
def test_what_is_done_meanwhile_counts_as_the_face(kind: str) -> None:
    env = KINDS[kind](2, Counter)
    td = env.rand_action(env.reset())
    original = PlainWay._make

    def slow(*args: Any) -> None:
        end = time.perf_counter() + 0.2
        while time.perf_counter() < end:
            pass
        original(*args)
        args[-1][3] += 0.2

    with mock.patch.object(PlainWay, "_make", slow):
        before = env.stats()
        env.step_and_maybe_reset(td)
        after = env.stats()
    assert after.face_seconds - before.face_seconds >= 0.19
    env.close()


@kinds
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_result_that_cannot_be_made_leaves_everything_as_it_was(kind: str, error: type[BaseException]) -> None:
    env = KINDS[kind](2, Counter)
    td = env.rand_action(env.reset())
    with mock.patch.object(PlainWay, "_carried", side_effect=error), pytest.raises(error):
        env.step_and_maybe_reset(td)
    assert "next" not in td.keys()
    assert env.step(td)["next", "observation"][:, 0].tolist() == [2, 2]  # the rows have moved
    env.close()
