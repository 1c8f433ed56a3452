"""Section 2 of the contract: building a batch, and what is refused at once."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, GymEnv, GymWrapper
from torchrl.envs import ParallelEnv as TorchRLParallelEnv
from torchrl.envs import SerialEnv as TorchRLSerialEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from shoal import ParallelEnv, SerialEnv
from tests.support import Counter, ThreadsEnv, Trouble, WithChild, children, rows_with

pytestmark = pytest.mark.usefixtures("nothing_left")

BOTH = pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])


@BOTH
@pytest.mark.parametrize("given", [2, 4])
def test_a_wrong_number_of_factories_names_both_numbers(kind: type, given: int) -> None:
    with pytest.raises(RuntimeError, match=rf"{given} factories for num_workers=3"):
        kind(3, [Counter] * given)


@BOTH
def test_a_wrong_number_of_kwargs_names_both_numbers(kind: type) -> None:
    with pytest.raises(RuntimeError, match=r"3 dicts for num_workers=4"):
        kind(4, Counter, create_env_kwargs=[{}, {}, {}])


@BOTH
def test_an_environment_in_place_of_a_factory_is_a_type_error_that_says_what_to_pass(kind: type) -> None:
    for env in (Counter(), GymWrapper(Counter())):
        with pytest.raises(TypeError, match=r"not a factory.*Pass a callable that builds one"):
            kind(2, env)
        with pytest.raises(TypeError, match=r"create_env_fn\[1\]"):
            kind(2, [Counter, GymWrapper(Counter())])


@BOTH
def test_a_factory_that_returns_no_environment_names_what_it_returned(kind: type) -> None:
    with pytest.raises(
        TypeError, match=r"row [01] returned a builtins.dict; expected a torchrl EnvBase or a gymnasium.Env"
    ):
        kind(2, dict)


@BOTH
@pytest.mark.parametrize(("what", "error"), [("raise", ValueError), ("system-exit", SystemExit)])
def test_a_factory_that_raises_in_one_row_ends_everything_at_once(kind: type, what: str, error: type) -> None:
    start = time.monotonic()
    with pytest.raises(error) as caught:
        kind(3, rows_with(1, what=what, when="build"))
    assert time.monotonic() - start < 4.0
    if kind is ParallelEnv or what == "raise":
        assert caught.value.row == 1
        assert caught.value.command == "build"


@BOTH
@pytest.mark.parametrize("name", ["pin_memory", "allow_step_when_done"])
def test_arguments_that_are_gone_are_a_value_error(kind: type, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        kind(2, Counter, **{name: True})


@BOTH
def test_shared_memory_and_memmap_exclude_each_other(kind: type) -> None:
    with pytest.raises(RuntimeError, match="shared_memory"):
        kind(2, Counter, shared_memory=True, memmap=True)


def test_a_start_method_means_nothing_to_a_serial_environment() -> None:
    with pytest.raises(TypeError, match="mp_start_method"):
        SerialEnv(2, Counter, mp_start_method="spawn")


@pytest.mark.parametrize("processes", [0, 4])
def test_processes_must_be_between_one_and_the_number_of_rows(processes: int) -> None:
    with pytest.raises(ValueError, match=f"between 1 and num_workers=3, found {processes}"):
        ParallelEnv(3, Counter, processes=processes)


def test_rows_may_be_split_unevenly() -> None:
    ParallelEnv(2, Counter).close()  # brings up the template that the tests share
    before = children()
    env = ParallelEnv(5, Counter, processes=2)
    env.reset()
    assert env.call("double", 2) == [4] * 5
    assert len(set(children()) - set(before)) == 2
    env.close()


class EmptySpecEnv(EnvBase):
    """Has a nested spec without leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(seen=Unbounded((1,)), nothing=Composite())
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _step(self, tensordict: Any) -> Any:
        raise NotImplementedError

    def _set_seed(self, seed: int | None) -> None:
        raise NotImplementedError


@BOTH
def test_an_empty_nested_spec_names_its_key_and_the_way_out(kind: type) -> None:
    with pytest.raises(RuntimeError, match=r"'nothing'.*RemoveEmptySpecs"):
        kind(2, EmptySpecEnv)


@BOTH
def test_torchrl_takes_our_classes_for_its_own(kind: type) -> None:
    env = kind(2, Counter)
    assert isinstance(env, BatchedEnvBase)
    assert isinstance(env, EnvBase)
    assert isinstance(env, TorchRLParallelEnv) == (kind is ParallelEnv)
    assert isinstance(env, TorchRLSerialEnv) == (kind is SerialEnv)
    env.close()


def test_one_row_may_be_serial() -> None:
    for kwargs in ({}, {"mp_start_method": "spawn", "processes": 1, "memmap": True, "shared_memory": False}):
        env = ParallelEnv(1, Counter, serial_for_single=True, **kwargs)
        assert type(env) is SerialEnv
        env.close()
    env = ParallelEnv(2, Counter, serial_for_single=True)
    assert type(env) is ParallelEnv
    env.close()


@BOTH
def test_repr_shows_the_class_a_sub_environment_and_the_batch_size(kind: type) -> None:
    env = kind(2, Counter)
    assert kind.__name__ in repr(env)
    assert "Counter" in repr(env)
    assert "batch_size=torch.Size([2])" in repr(env)
    env.close()


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_each_environment_is_built_once_in_its_worker_and_nothing_resets_it_first(
    tmp_path: Path, start_method: str
) -> None:
    log = tmp_path / "log"
    env = ParallelEnv(3, Counter, create_env_kwargs={"log": str(log)}, mp_start_method=start_method)
    lines = log.read_text().split("\n")[:-1]
    assert [line.split()[0] for line in lines] == ["build"] * 3
    assert len({line.split()[1] for line in lines}) == 3
    env.reset()
    assert sorted(line.split()[0] for line in log.read_text().split("\n")[:-1]) == ["build"] * 3 + ["reset"] * 3
    env.close()
    assert sum(line.startswith("close") for line in log.read_text().split("\n")) == 3


@BOTH
def test_kwargs_are_copied_for_each_row_and_lists_give_each_row_its_own(kind: type) -> None:
    env = kind(3, Counter, create_env_kwargs=[{"length": n} for n in (2, 3, 4)])
    env.reset()
    assert env.get_attr("length") == [2, 3, 4]
    env.close()
    env.update_kwargs({"length": 7})
    env.reset()
    assert env.get_attr("length") == [7, 7, 7]
    with pytest.raises(RuntimeError, match="2 dicts for 3"):
        env.update_kwargs([{}, {}])
    env.close()


def test_lambdas_closures_partials_methods_and_classes_of_main_work_without_a_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import functools, gymnasium as gym, numpy as np, sys
from shoal import ParallelEnv
print("running")
class Mine(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)
    def __init__(self, value=0.0):
        self.value = value
    def reset(self, *, seed=None, options=None):
        return np.full(2, self.value, np.float32), {}
    def step(self, action):
        return np.full(2, self.value, np.float32), 0.0, False, False, {}
    @classmethod
    def make(cls):
        return cls(0.5)
def closure(value):
    return lambda: Mine(value)
def function():
    return Mine(0.25)
factories = [lambda: Mine(), closure(0.1), functools.partial(Mine, 0.2), Mine.make, function, Mine]
env = ParallelEnv(6, factories)
print(env.rollout(2)["observation"][:, 0, 0].tolist())
for method in ("spawn", "fork"):
    other = ParallelEnv(2, closure(0.1), mp_start_method=method)
    print(other.rollout(2)["observation"][:, 0, 0].tolist())
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    values = [round(float(np.float32(v)), 7) for v in (0.0, 0.1, 0.2, 0.5, 0.25, 0.0)]
    lines = done.stdout.splitlines()
    assert lines[0] == "running"
    assert lines.count("running") == 1
    assert [round(v, 7) for v in eval(lines[1])] == pytest.approx(values)
    assert len(lines) == 4


def test_threads_and_the_global_start_method_stay_as_they_are() -> None:
    import torch.multiprocessing as mp

    before = torch.get_num_threads(), mp.get_start_method(allow_none=True)
    env = ParallelEnv(2, lambda: GymEnv("CartPole-v1"))
    env.reset()
    assert (torch.get_num_threads(), mp.get_start_method(allow_none=True)) == before
    env.close()
    assert (torch.get_num_threads(), mp.get_start_method(allow_none=True)) == before
    env = ParallelEnv(2, Counter, num_threads=before[0] + 1)
    env.reset()
    assert torch.get_num_threads() == before[0] + 1
    env.close()
    assert torch.get_num_threads() == before[0]


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_a_worker_has_as_many_threads_as_it_was_told(start_method: str) -> None:
    env = ParallelEnv(2, ThreadsEnv, num_sub_threads=2, mp_start_method=start_method)
    env.reset()
    assert env.get_attr("variable") == ["2", "2"]
    env.close()


def test_a_gymnasium_worker_never_imports_torch() -> None:
    env = ParallelEnv(2, functools.partial(gym.make, "CartPole-v1"))
    env.reset()
    env.step(env.rand_action(env.reset()))
    env.close()
    code = """
import gymnasium as gym
from shoal.engine.pool import Pool, PoolOptions
from shoal.engine.rows import Builder
from shoal.engine.protocol import Opcode
import sys
class Looks(gym.Wrapper):
    def loaded(self):
        import sys
        return "torch" in sys.modules
pool = Pool([Builder(lambda: Looks(gym.make("CartPole-v1")), {})] * 2, PoolOptions(processes=2))
pool.attach([d.schema for d in pool.descriptions])
pool.execute(Opcode.RESET)
print(pool.execute(Opcode.CALL, None, {r: (("loaded",), (), {}) for r in (0, 1)}).values)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "{0: False, 1: False}", done.stderr


def test_a_factory_in_a_worker_may_start_a_process_of_its_own() -> None:
    env = ParallelEnv(2, WithChild)
    env.reset()
    assert env.get_attr("answer") == [42, 42]
    env.close()


def test_a_dying_constructor_is_a_dead_worker() -> None:
    from shoal import WorkerDied

    with pytest.raises(WorkerDied, match=r"row 1 .*exit code 3.*'build'"):
        ParallelEnv(2, [Trouble, functools.partial(Trouble, "exit", "build")])


@BOTH
def test_share_individual_td_in_its_three_values(kind: type) -> None:
    from tensordict import LazyStackedTensorDict

    alike, unlike = Counter, Wide
    for factories, share, lazy in (
        ([alike, alike], None, False),
        ([alike, alike], True, True),
        ([alike, alike], False, False),
        ([alike, unlike], None, True),
        ([alike, unlike], True, True),
    ):
        env = kind(2, factories, share_individual_td=share)
        td = env.reset()
        assert isinstance(td, LazyStackedTensorDict) == lazy, (factories, share)
        rollout = env.rollout(3, return_contiguous=False)
        assert rollout[1]["observation"].shape == (3, factories[1].observation_space.shape[0])
        assert rollout[0]["next", "observation"][:, 0].tolist() == [1, 2, 3]
        env.close()
    with pytest.raises(ValueError, match="do not stack"):
        kind(2, [alike, unlike], share_individual_td=False)


class Wide(Counter):
    """Observes two numbers more."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)

    def observe(self) -> Any:
        return np.concatenate([super().observe(), [0, 0]]).astype(np.float32)


def test_one_factory_must_give_the_same_leaves_in_every_row() -> None:
    with pytest.raises(RuntimeError, match="row 0 and row 1 different leaves"):
        SerialEnv(2, lambda wide: (Wide if wide else Counter)(), create_env_kwargs=[{"wide": 0}, {"wide": 1}])


def test_make_parallel_takes_both_forms() -> None:
    for env in (ParallelEnv.make_parallel(Counter, num_envs=2), ParallelEnv.make_parallel(2, Counter, processes=1)):
        assert env.rollout(2).shape == (2, 2)
        assert type(env) is ParallelEnv
        env.close()


@BOTH
def test_use_buffers_true_warns_where_a_leaf_cannot_be_buffered(kind: type) -> None:
    with pytest.warns(UserWarning, match="travel by message"):
        env = kind(2, Spoken, use_buffers=True)
    assert list(env.reset()["words"]) == ["hello", "hello"]
    env.close()


class Spoken(Counter):
    """Says hello."""

    observation_space = gym.spaces.Dict(words=gym.spaces.Text(10))

    def observe(self) -> Any:
        return {"words": "hello"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@BOTH
def test_results_live_wholly_on_the_device_that_was_asked_for(kind: type) -> None:
    env = kind(2, Counter, device="cuda")
    td = env.rollout(20, break_when_any_done=False)
    assert {value.device.type for value in td.values(True, True)} == {"cuda"}
    assert td["next", "observation"][:, :3, 0].tolist() == [[1, 2, 3]] * 2
    env.close()


@BOTH
def test_results_live_on_the_device_that_was_asked_for_and_move_with_to(kind: type) -> None:
    env = kind(2, Counter, device="cpu")
    assert env.device == torch.device("cpu")
    assert env.reset().device == torch.device("cpu")
    env.close()
    env = kind(2, Counter)
    assert env.device is None
    assert env.reset().device is None
    assert env.to("cpu").rollout(2).device == torch.device("cpu")
    env.close()
