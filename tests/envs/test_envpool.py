"""Section 6 of the contract: `MultiThreadedEnv`, EnvPool's threads under the contract of the other batches."""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl._utils import seed_generator
from torchrl.envs import GymWrapper, StepCounter, TransformedEnv
from torchrl.envs import MultiThreadedEnv as Reference
from torchrl.envs.utils import check_env_specs

from shoal.envs.envpool import MultiThreadedEnv
from tests.support import script

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    envpool = pytest.importorskip("envpool", reason="envpool is not installed (pip install shoal[envpool])")

N = 3
SEEDS = [5, 17, 2]
TASKS = ["CartPole-v1", "Pendulum-v1"]
LEAVES = ["observation", "done", "terminated", "truncated"]

pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered")


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def env(task: str) -> Iterator[MultiThreadedEnv]:
    with MultiThreadedEnv(N, task, create_env_kwargs={"seed": SEEDS}) as env:
        yield env


@pytest.fixture
def pool(task: str) -> Iterator[Any]:
    """EnvPool itself, with the same seeds."""
    pool = envpool.make_gymnasium(task, num_envs=N, env_seed=SEEDS)
    yield pool
    pool.close()


@pytest.fixture
def short() -> Iterator[MultiThreadedEnv]:
    """Whose episodes are truncated after three steps."""
    with MultiThreadedEnv(N, "Pendulum-v1", create_env_kwargs={"seed": SEEDS, "max_episode_steps": 3}) as env:
        yield env


def mask(*rows: int) -> torch.Tensor:
    picked = torch.zeros(N, 1, dtype=torch.bool)
    picked[list(rows)] = True
    return picked


def with_action(env: MultiThreadedEnv, td: TensorDict) -> tuple[TensorDict, np.ndarray]:
    """A random action, and how EnvPool takes it."""
    env.rand_action(td)
    action = td["action"]
    return td, (action.argmax(-1) if env.env_name == "CartPole-v1" else action).numpy()


def same(tensor: torch.Tensor, array: np.ndarray) -> None:
    np.testing.assert_array_equal(tensor.numpy(), array)


def test_looks_like_a_wrapped_gymnasium_environment(task: str, env: MultiThreadedEnv) -> None:
    single = GymWrapper(gymnasium.make(task)).fake_tensordict()
    ours = env.rand_step(env.reset())
    assert ours.batch_size == env.batch_size == (N,)
    assert set(ours.keys(True, True)) == set(single.keys(True, True))
    for key in single.keys(True, True):
        assert ours[key].dtype == single[key].dtype, key
        assert ours[key].shape == (N, *single[key].shape), key


@pytest.mark.parametrize("name", [*TASKS, "FrozenLake-v1", "MiniGrid-Empty-5x5-v0", "FingerSpin-v1", "TSP-v1"])
@pytest.mark.parametrize("categorical", [False, True])
def test_specs_hold(name: str, categorical: bool) -> None:
    with MultiThreadedEnv(2, name, categorical_action_encoding=categorical) as env:
        check_env_specs(env)
        assert env.rollout(5, break_when_any_done=False).shape == (2, 5)


def test_one_hot_or_numbers() -> None:
    one_hot, numbers = (MultiThreadedEnv(N, "FrozenLake-v1", categorical_action_encoding=c) for c in (False, True))
    assert one_hot.action_spec.shape == (N, 4) and numbers.action_spec.shape == (N,)
    a, b = one_hot.reset(), numbers.reset()
    assert torch.equal(a["observation"].argmax(-1), b["observation"])
    b["action"] = torch.tensor([1, 2, 3])
    a["action"] = torch.nn.functional.one_hot(b["action"], 4)
    a, b = one_hot.step(a), numbers.step(b)
    assert torch.equal(a["next", "observation"].argmax(-1), b["next", "observation"])


def test_gives_the_values_of_envpool(task: str, env: MultiThreadedEnv, pool: Any) -> None:
    torch.manual_seed(0)
    td = env.reset()
    same(td["observation"], pool.reset()[0])
    ended = 0
    for _ in range(250):
        td, action = with_action(env, td)
        td, root = env.step_and_maybe_reset(td)
        observation, reward, terminated, truncated, _ = pool.step(action)
        same(td["next", "observation"], observation)
        same(td["next", "reward"][:, 0], reward)
        same(td["next", "terminated"][:, 0], terminated)
        same(td["next", "truncated"][:, 0], truncated)
        done = terminated | truncated
        same(td["next", "done"][:, 0], done)
        if done.any():
            ended += 1
            observation[done] = pool.reset(np.flatnonzero(done).astype(np.int32))[0]
        same(root["observation"], observation)
        assert not any(root[key].any() for key in LEAVES[1:])
        assert "reward" not in root and "next" not in root
        td = root
    assert ended


def test_step_leaves_the_reset_to_the_caller(short: MultiThreadedEnv) -> None:
    td = short.rollout(3, break_when_any_done=False)
    assert td["next", "truncated"][:, :, 0].tolist() == [[False, False, True]] * N
    assert not td["next", "terminated"].any()
    td = short.step_mdp(td[:, -1])
    last = td["observation"].clone()
    fresh = short.reset(td.set("_reset", mask(1)))
    assert fresh["done"][:, 0].tolist() == [True, False, True]
    assert torch.equal(fresh["observation"][[0, 2]], last[[0, 2]])
    assert not torch.equal(fresh["observation"][1], last[1])
    assert "_reset" not in fresh.keys()


def test_a_row_that_is_over_begins_anew_when_stepped(short: MultiThreadedEnv) -> None:
    td = short.step_mdp(short.rollout(3)[:, -1])
    td = short.step(short.rand_action(td))
    assert td["next", "reward"].tolist() == [[0.0]] * N
    assert not td["next", "done"].any()


def test_a_partial_reset_resets_those_rows_alone(task: str, env: MultiThreadedEnv, pool: Any) -> None:
    td, action = with_action(env, env.reset())
    pool.reset()
    env.step(td)
    observation = pool.step(action)[0]
    for shape in ((N, 1), (N,)):
        asked = TensorDict({"_reset": mask(0, 2).reshape(shape)}, [N])
        td = env.reset(asked)
        observation[[0, 2]] = pool.reset(np.array([0, 2], np.int32))[0]
        same(td["observation"], observation)
    td, action = with_action(env, td)
    same(env.step(td)["next", "observation"], pool.step(action)[0])


def test_rows_that_are_not_reset_show_what_the_input_carries(env: MultiThreadedEnv) -> None:
    td = env.reset()
    given = TensorDict({"_reset": mask(1), "observation": torch.full_like(td["observation"], 0.25)}, [N])
    result = env.reset(given)["observation"]
    assert (result[[0, 2]] == 0.25).all()
    assert not (result[1] == 0.25).any()


def test_a_mask_of_no_row_resets_none(env: MultiThreadedEnv) -> None:
    td = env.rand_step(env.reset())
    assert torch.equal(env.reset(TensorDict({"_reset": mask()}, [N]))["observation"], td["next", "observation"])


def test_a_partial_step_moves_those_rows_alone(task: str, env: MultiThreadedEnv, pool: Any) -> None:
    td, action = with_action(env, env.reset())
    pool.reset()
    before = td["observation"].clone()
    td = env.step(td.set("_step", mask(2, 0)))
    observation, reward, *_ = pool.step(action[[0, 2]], np.array([0, 2], np.int32))
    same(td["next", "observation"][[0, 2]], observation)
    same(td["next", "reward"][[0, 2], 0], reward)
    assert torch.equal(td["next", "observation"][1], before[1])
    assert td["next", "reward"][1] == 0
    td, action = with_action(env, env.step_mdp(td).exclude("_step"))
    same(env.step(td)["next", "observation"], pool.step(action)[0])


def test_partial_steps_zero_where_the_input_has_nothing(env: MultiThreadedEnv) -> None:
    td = env.rand_action(env.reset()).select("action")
    assert not env.step(td.set("_step", mask(0)))["next", "observation"][1:].any()


def test_a_step_of_no_row_moves_nothing(env: MultiThreadedEnv) -> None:
    td = env.rand_action(env.reset())
    before = td["observation"].clone()
    assert torch.equal(env.step(td.set("_step", mask()))["next", "observation"], before)
    assert torch.equal(env.reset(TensorDict({"_reset": mask()}, [N]))["observation"], before)


def test_step_and_maybe_reset_resets_only_rows_that_moved(short: MultiThreadedEnv) -> None:
    td = short.reset()
    for _ in range(2):
        td = short.step_mdp(short.step(short.rand_action(td)))
    td, root = short.step_and_maybe_reset(short.rand_action(td).set("_step", mask(0)))
    assert td["next", "done"][:, 0].tolist() == [True, False, False]
    assert "_step" not in td.keys() and "_step" not in root.keys()
    assert not torch.equal(root["observation"][0], td["next", "observation"][0])
    assert torch.equal(root["observation"][1:], td["observation"][1:])
    td, root = short.step_and_maybe_reset(short.rand_action(root))
    assert td["next", "done"][:, 0].tolist() == [False, True, True]


def test_rows_that_stand_still_are_not_reset_even_if_they_are_done(short: MultiThreadedEnv) -> None:
    td = short.step_mdp(short.rollout(3)[:, -1])
    td = short.reset(td.set("_reset", mask(0)))
    before = td["observation"].clone()
    _, root = short.step_and_maybe_reset(short.rand_action(td).set("_step", mask(0)))
    assert root["done"][:, 0].tolist() == [False, True, True]
    assert torch.equal(root["observation"][1:], before[1:])
    kept = short.reset(TensorDict({"_reset": mask(), "done": root["done"]}, [N]))
    assert torch.equal(kept["observation"], root["observation"])


def test_rollouts_until_all_are_done(short: MultiThreadedEnv) -> None:
    td = short.reset()
    short.step(short.rand_action(td.set("_step", mask(0))))
    rolled = short.rollout(10, auto_reset=False, tensordict=short.reset(), break_when_all_done=True)
    assert rolled.shape == (N, 3)


def test_leaves_set_in_next_survive(env: MultiThreadedEnv) -> None:
    td = env.rand_action(env.reset())
    td["next"] = TensorDict({"hidden": torch.ones(N, 2)}, [N])
    td, _ = env.step_and_maybe_reset(td)
    assert (td["next", "hidden"] == 1).all()


def test_results_own_their_memory(env: MultiThreadedEnv) -> None:
    results, copies = [], []
    td = env.reset()
    for _ in range(60):
        td, root = env.step_and_maybe_reset(env.rand_action(td))
        results += [td, root]
        copies += [td.clone(), root.clone()]
        td = root.clone()
    env.reset(TensorDict({"_reset": mask(0)}, [N]))
    assert all((a == b).all() for a, b in zip(results, copies, strict=True))
    root["observation"].fill_(9)
    assert not (results[-2]["next", "observation"] == 9).any()
    assert not (env.reset(TensorDict({"_reset": mask()}, [N]))["observation"] == 9).any()


def test_works_under_transforms(short: MultiThreadedEnv) -> None:
    env = TransformedEnv(short, StepCounter())
    check_env_specs(env)
    assert env.rollout(7, break_when_any_done=False)["step_count"][0, :, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_frames_are_skipped_to_the_end_of_the_episode() -> None:
    options = {"seed": SEEDS, "max_episode_steps": 5}
    with MultiThreadedEnv(N, "Pendulum-v1", create_env_kwargs=options, frame_skip=2) as env:
        assert type(env) is MultiThreadedEnv
        single = MultiThreadedEnv(N, "Pendulum-v1", create_env_kwargs=options)
        td, one = env.reset(), single.reset()
        for frames in (2, 2, 1):
            td = env.step(env.rand_action(td))
            reward = torch.zeros(N, 1)
            for _ in range(frames):
                one = single.step(one.set("action", td["action"]))
                reward += one["next", "reward"]
                one = single.step_mdp(one)
            assert torch.equal(td["next", "reward"], reward)
            assert torch.equal(td["next", "observation"], one["observation"])
            td = env.step_mdp(td)
        assert td["done"].all()


# Seeds.


def test_each_row_has_the_seed_of_torchrls_chain(task: str) -> None:
    chain = [7]
    for _ in range(N):
        chain.append(seed_generator(chain[-1]))
    with MultiThreadedEnv(N, task) as env:
        assert env.set_seed(np.int64(7)) == chain[-1]
        observation = env.reset()["observation"]
        for row, seed in enumerate(chain[:N]):
            single = envpool.make_gymnasium(task, num_envs=1, seed=(seed + 2**31) % 2**32 - 2**31)
            same(observation[row], single.reset()[0][0])


def test_seeds_repeat(env: MultiThreadedEnv) -> None:
    def roll() -> Any:
        env.set_seed(3)
        torch.manual_seed(0)
        return env.rollout(60, break_when_any_done=False)

    first = roll()
    assert (first == roll()).all()
    env.close()
    env.start()
    torch.manual_seed(0)
    assert (first == env.rollout(60, break_when_any_done=False)).all()
    env.set_seed(4)
    assert not torch.equal(env.reset()["observation"], first["observation"][:, 0])


def test_a_static_seed_is_the_seed_of_all_rows(env: MultiThreadedEnv) -> None:
    assert env.set_seed(2**40 + 9, static_seed=True) == 2**40 + 9
    observation = env.reset()["observation"]
    assert (observation == observation[0]).all()
    assert env.set_seed(None) is None


# Life cycle.


def test_life_cycle(task: str) -> None:
    env = MultiThreadedEnv(N, task)
    assert env.is_closed
    env.start()
    assert not env.is_closed
    with pytest.raises(RuntimeError, match="started already"):
        env.start()
    env.close()
    assert env.is_closed
    with pytest.raises(RuntimeError, match="closed already"):
        env.close()
    env.close(raise_if_closed=False)
    assert env.observation_spec["observation"].shape[0] == N
    assert env.rollout(3).shape == (N, 3)
    env.close()
    MultiThreadedEnv(N, task).close()


def test_with_closes(task: str) -> None:
    with MultiThreadedEnv(N, task) as env:
        env.reset()
    assert env.is_closed


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_is_a_twin_that_is_not_started(env: MultiThreadedEnv, twin: Any) -> None:
    env.set_seed(11)
    first = env.reset()
    other = twin(env)
    assert other.is_closed and not env.is_closed
    assert (other.reset() == first).all()
    other.close()


def test_leaving_the_interpreter_needs_no_close() -> None:
    run = script(
        "from shoal.envs.envpool import MultiThreadedEnv\n"
        "env = MultiThreadedEnv(4, 'CartPole-v1')\n"
        "env.rollout(5)\n"
        "print('left')"
    )
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    assert out.strip() == "left"


def test_says_what_it_is(env: MultiThreadedEnv) -> None:
    assert repr(env) == (
        f"MultiThreadedEnv(env={env.env_name}, num_workers={N}, batch_size=torch.Size([{N}]), device=None)"
    )
    assert isinstance(env, Reference)
    assert MultiThreadedEnv(1, "ALE/Pong-v5").env_name == "Pong-v5"


def test_moves_results_to_its_device(task: str) -> None:
    with MultiThreadedEnv(N, task, device="cpu") as env:
        assert env.rollout(2).device == torch.device("cpu")
        check_env_specs(env)


# Errors.


def test_without_envpool_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ImportError, match=r"pip install shoal\[envpool\]"):
        MultiThreadedEnv(N, "CartPole-v1")


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"env_name": "CartPole-v7"}, ValueError, "no task 'CartPole-v7'; did you mean CartPole-v"),
        ({"env_name": "Go9x9-v1"}, ValueError, "players"),
        ({"num_workers": 0}, ValueError, "num_workers must be at least 1, found 0"),
        ({"frame_skip": 0}, ValueError, "frame_skip must be at least 1, found 0"),
        ({"create_env_kwargs": {"num_envs": 2}}, ValueError, "must not have num_envs"),
        ({"create_env_kwargs": {"batch_size": 2}}, ValueError, "batch_size=2"),
        ({"create_env_kwargs": {"nonsense": 2}}, TypeError, "nonsense"),
    ],
)
def test_arguments_that_cannot_be(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MultiThreadedEnv(**{"num_workers": N, "env_name": "CartPole-v1", **kwargs})


def test_actions_that_do_not_fit() -> None:
    with MultiThreadedEnv(N, "CartPole-v1") as env, pytest.raises(RuntimeError, match=r"no 'action'.*\(3, 2\)"):
        env.step(env.reset())
    with MultiThreadedEnv(N, "CartPole-v1") as env, pytest.raises(RuntimeError, match=r"\(3,\): expected \(3, 2\)"):
        env.step(env.reset().set("action", torch.zeros(N, dtype=torch.int64)))
    with MultiThreadedEnv(N, "CartPole-v1") as env, pytest.raises(RuntimeError, match=r"dtype torch\.float32"):
        env.step(env.reset().set("action", torch.zeros(N, 2)))
    with (
        MultiThreadedEnv(N, "CartPole-v1", categorical_action_encoding=True) as env,
        pytest.raises(ValueError, match="outside of Discrete"),
    ):
        env.step(env.reset().set("action", torch.tensor([0, 1, 2])))


def test_masks_and_arguments_of_reset_that_do_not_fit(env: MultiThreadedEnv) -> None:
    with pytest.raises(RuntimeError, match=r"expected \(3, 1\)"):
        env.reset(TensorDict({"_reset": torch.ones(N, 2, dtype=torch.bool)}, [N]))
    with pytest.raises(TypeError, match="set_seed"):
        env.reset(seed=1)
