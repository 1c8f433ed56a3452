"""Section 2 of the contract: building a batch."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvCreator

from shoal import ParallelEnv, SerialEnv
from tests.support import Counter, descriptors, until
from tests.zoo.torchrl_envs import CountingEnv

pytestmark = pytest.mark.usefixtures("nothing_left")

BOTH = pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])


# ---------------------------------------------------------------------------------------------------- create_env_fn


class Wide(Counter):
    """Observes two numbers more."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)

    def observe(self) -> Any:
        return np.concatenate([super().observe(), [0, 0]]).astype(np.float32)


def counter_or_wide(wide: bool) -> gym.Env:
    return Wide() if wide else Counter()


@BOTH
def test_entries_that_are_all_the_same_object_are_one_task_and_different_objects_are_several(kind: type) -> None:
    kwargs = [{"wide": False}, {"wide": True}]
    for same in ([counter_or_wide] * 2, (counter_or_wide,) * 2):
        with pytest.raises(RuntimeError, match="same factory"):
            kind(2, same, create_env_kwargs=kwargs)
    env = kind(2, tuple(functools.partial(counter_or_wide) for _ in range(2)), create_env_kwargs=kwargs)
    assert [env.reset()[row]["observation"].shape for row in range(2)] == [(3,), (5,)]
    env.close()


class Maker:
    """Makes environments by a method."""

    def __init__(self, length: int) -> None:
        self.length = length

    def make(self) -> gym.Env:
        return Counter(self.length)


@BOTH
def test_a_bound_method_and_an_env_creator_are_factories(kind: type) -> None:
    for factory in (Maker(3).make, EnvCreator(lambda: CountingEnv(max_steps=3))):
        env = kind(2, factory)
        assert env.rollout(9).shape == (2, 3)
        env.close()


NOTEBOOK = """
import functools, gymnasium as gym, numpy as np, sys
from shoal import ParallelEnv
class Mine(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)
    def __init__(self, value=0.0):
        self.value = value
    def reset(self, *, seed=None, options=None):
        return np.full(2, self.value, np.float32), {}
    def step(self, action):
        return np.full(2, self.value, np.float32), 0.0, False, False, {}
    def make(self):
        return type(self)(self.value)
def function():
    return Mine(0.25)
def closure(value):
    return lambda: Mine(value)
factories = [lambda: Mine(), closure(0.125), functools.partial(Mine, 0.5), Mine(0.75).make, function, Mine]
for method in ("forkserver", "spawn", "fork"):
    env = ParallelEnv(6, factories, mp_start_method=method, processes=2)
    print(env.rollout(2)["observation"][:, 0, 0].tolist())
    env.close()
"""


def test_classes_and_functions_of_a_notebook_cell_work_in_workers_of_every_start_method() -> None:
    """The cell's module is ``__main__``, and no file holds its source."""
    done = subprocess.run([sys.executable, "-"], input=NOTEBOOK, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [str([0.0, 0.125, 0.5, 0.75, 0.25, 0.0])] * 3


# ------------------------------------------------------------------------------------------------ create_env_kwargs


class Configured(Counter):
    """Counts its builds in its configuration."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        config["built"].append(1)
        self.config = config


@pytest.mark.parametrize("form", ["dict", "list", "update"])
@pytest.mark.parametrize("engine", ["serial", "grouped", "fork"])
def test_create_env_kwargs_are_deep_copied_for_each_row(engine: str, form: str) -> None:
    """One dict (deep-copied for each row): neither the other rows nor the caller see what a row makes of its copy."""
    build: Any = {
        "serial": SerialEnv,
        "grouped": functools.partial(ParallelEnv, processes=1),
        "fork": functools.partial(ParallelEnv, processes=1, mp_start_method="fork"),
    }[engine]
    config: dict[str, Any] = {"config": {"built": []}}
    env = build(2, Configured, create_env_kwargs=[config, config] if form == "list" else config)
    if form == "update":
        env.update_kwargs(config)
    env.reset()
    assert env.get_attr("config") == [{"built": [1]}] * 2
    assert config == {"config": {"built": []}}
    env.close()
    env.reset()
    assert env.get_attr("config") == [{"built": [1]}] * 2
    env.close()


@BOTH
@pytest.mark.parametrize("several", [False, True])
def test_create_env_kwargs_that_the_caller_changes_later_have_no_effect(kind: type, several: bool) -> None:
    config: dict[str, Any] = {"config": {"built": []}}
    env = kind(2, Configured, create_env_kwargs=[config, config] if several else config)
    config["config"]["built"].append("later")
    env.reset()
    env.close()
    env.reset()
    assert env.get_attr("config") == [{"built": [1]}] * 2
    env.close()


@BOTH
def test_update_kwargs_with_a_list_of_n_changes_the_next_start_and_not_this_one(kind: type) -> None:
    env = kind(2, Counter, create_env_kwargs={"length": 3})
    env.reset()
    env.update_kwargs([{"length": 4}, {"length": 5}])
    assert env.get_attr("length") == [3, 3]
    env.reset()
    assert env.get_attr("length") == [3, 3]
    env.close()
    env.reset()
    assert env.get_attr("length") == [4, 5]
    env.close()


# ----------------------------------------------------------------------------------------------------------- device


class OnDevice(CountingEnv):
    """Says that it lives on some device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.to(device)


@BOTH
def test_without_a_device_results_live_where_the_sub_environments_do(kind: type) -> None:
    env = kind(2, functools.partial(OnDevice, "cpu"))
    assert env.device == torch.device("cpu")
    assert env.reset().device == torch.device("cpu")
    assert env.action_spec.device == torch.device("cpu")
    env.close()


@BOTH
def test_sub_environments_on_several_devices_without_a_device_are_a_value_error(kind: type) -> None:
    factories = [functools.partial(OnDevice, device) for device in ("cpu", "meta")]
    with pytest.raises(ValueError, match=r"several devices \((cpu, meta|meta, cpu)\).*device="):
        kind(2, factories)
    env = kind(2, factories, device="cpu")
    assert env.device == torch.device("cpu")
    assert {spec.device for spec in env.observation_spec.values(True, True)} == {torch.device("cpu")}
    env.close()


@BOTH
def test_non_blocking_is_accepted_and_kept(kind: type) -> None:
    env = kind(2, Counter, non_blocking=True, device="cpu")
    assert env.non_blocking is True
    assert env.rollout(3)["next", "observation"][:, :, 0].tolist() == [[1, 2, 3]] * 2
    env.close()


# -------------------------------------------------------------------------------------------------------- transport


class Talking(Counter):
    """Says its step in words, too."""

    observation_space = gym.spaces.Dict(count=gym.spaces.Box(-np.inf, np.inf, (3,)), words=gym.spaces.Text(20))

    def observe(self) -> Any:
        return {"count": super().observe(), "words": f"step {self.steps}"}

    def parent(self) -> int:
        return os.getppid()

    def threads(self) -> str:
        return os.environ["OMP_NUM_THREADS"]


def buffered(env: Any) -> set[tuple[str, ...]]:
    """The keys of the leaves that lie in buffers."""
    return {key for area in env.__dict__["_session"].engine.arrays.values() for key in area}


def test_use_buffers_none_decides_per_leaf_and_false_sends_everything_by_message() -> None:
    for use, keys in (
        (None, {("action",), ("count",), ("reward",), ("done",), ("terminated",), ("truncated",)}),
        (False, set()),
    ):
        env = ParallelEnv(2, Talking, use_buffers=use)
        assert buffered(env) == keys
        td = env.step(env.rand_action(env.reset()))
        assert td["next", "count"][:, 0].tolist() == [1, 1]
        assert list(td["next", "words"]) == ["step 1"] * 2
        env.close()


@BOTH
def test_use_buffers_true_is_silent_where_all_leaves_can_be_buffered(kind: type) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        env = kind(2, Counter, use_buffers=True)
    assert env.rollout(2).shape == (2, 2)
    env.close()


def test_buffers_lie_in_anonymous_shared_memory_or_with_memmap_in_a_file() -> None:
    ParallelEnv(2, Counter).close()  # brings up the template that the tests share
    for options, kinds in (
        ({}, {"memfd"}),
        ({"shared_memory": False}, {"memfd"}),
        ({"shared_memory": False, "memmap": True}, {"file", "memfd"}),  # commands always lie in memory
    ):
        before = descriptors()
        env = ParallelEnv(2, Counter, **options)
        env.reset()
        new = descriptors()
        for each in before:
            new.remove(each)
        blocks = [each for each in new if each.startswith("/")]
        assert {"memfd" if each.startswith("/memfd:") else "file" for each in blocks} == kinds, options
        env.close()


@BOTH
def test_options_that_are_accepted_change_no_value(kind: type) -> None:
    """``consolidate``, ``policy_proof``, ``daemon``, ``shutdown_timeout``, ``metadata_from_workers`` and
    ``auto_wrap_envs``."""
    for options in (
        {"consolidate": False, "daemon": True, "metadata_from_workers": True, "auto_wrap_envs": False},
        {"consolidate": True, "policy_proof": lambda td: td, "shutdown_timeout": 3, "auto_wrap_envs": True},
    ):
        env = kind(2, lambda: Counter(3), **options)
        assert env.rollout(5)["next", "observation"][:, :, 0].tolist() == [[1, 2, 3]] * 2
        env.close()


# ---------------------------------------------------------------------------------------------- threads, start method

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ThreadsWhenBuilt(CountingEnv):
    """Notes, as it is built, how many threads the numeric libraries have."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = {torch.get_num_threads(), *(int(os.environ[name]) for name in THREADS)}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_torch_openmp_mkl_and_openblas_have_num_sub_threads_before_a_sub_environment_is_built(
    start_method: str, count: int
) -> None:
    options = {} if count == 1 else {"num_sub_threads": count}
    before = torch.get_num_threads(), {name: os.environ.get(name) for name in THREADS}
    env = ParallelEnv(1, ThreadsWhenBuilt, mp_start_method=start_method, **options)
    env.reset()
    assert env.get_attr("threads") == [{count}]
    assert (torch.get_num_threads(), {name: os.environ.get(name) for name in THREADS}) == before
    env.close()


def test_num_threads_is_restored_exactly_by_close_in_a_serial_environment_too() -> None:
    before = torch.get_num_threads()
    env = SerialEnv(2, Counter, num_threads=before + 1)
    assert torch.get_num_threads() == before  # building is no start
    for _ in range(2):
        env.reset()
        assert torch.get_num_threads() == before + 1
        env.close()
        assert torch.get_num_threads() == before


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_the_process_wide_start_method_is_not_touched_by_a_start_method_that_is_given(start_method: str) -> None:
    before = mp.get_start_method(allow_none=True)
    env = ParallelEnv(2, Counter, mp_start_method=start_method, processes=1)
    env.reset()
    assert mp.get_start_method(allow_none=True) == before
    env.close()
    assert mp.get_start_method(allow_none=True) == before


def test_configure_parallel_changes_each_thing_it_names() -> None:
    ParallelEnv(2, Counter, num_sub_threads=2).close()  # brings up the template that the tests share
    threads = torch.get_num_threads()
    env = ParallelEnv(2, Talking, create_env_kwargs={"length": 4})
    env.configure_parallel(
        use_buffers=False,
        mp_start_method="fork",
        num_threads=threads + 1,
        num_sub_threads=2,
        non_blocking=True,
        daemon=True,
        shutdown_timeout=2.5,
    )
    assert torch.get_num_threads() == threads
    env.reset()
    assert buffered(env) == set()
    assert torch.get_num_threads() == threads + 1
    assert (env.non_blocking, env.daemon, env.shutdown_timeout) == (True, True, 2.5)
    assert env.call("parent") == [os.getpid()] * 2  # a fork of this process
    assert env.call("threads") == ["2", "2"]
    env.close()
    assert torch.get_num_threads() == threads


# ----------------------------------------------------------------------------------------------------------- better


def test_step_timeout_is_the_environment_variable_else_ten_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATCHED_PIPE_TIMEOUT", raising=False)
    assert SerialEnv(1, Counter).step_timeout == 10_000.0
    monkeypatch.setenv("BATCHED_PIPE_TIMEOUT", "12.5")
    env = ParallelEnv(1, Counter)
    assert env.step_timeout == env.__dict__["_session"].engine._options.step_timeout == 12.5
    env.close()
    assert SerialEnv(1, Counter, step_timeout=3).step_timeout == 3.0


class Meeting(Counter):
    """Is built only when all the others are being built, too."""

    def __init__(self, folder: str, row: int, rows: int) -> None:
        super().__init__()
        Path(folder, str(row)).touch()
        if not until(lambda: len(list(Path(folder).iterdir())) == rows, 20.0):
            raise TimeoutError("the others are not being built at the same time")


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_all_workers_build_at_the_same_time(tmp_path: Path, start_method: str) -> None:
    kwargs = [{"folder": str(tmp_path), "row": row, "rows": 3} for row in range(3)]
    ParallelEnv(3, Meeting, create_env_kwargs=kwargs, mp_start_method=start_method).close()


@BOTH
def test_nothing_builds_again_resets_or_steps_a_sub_environment_before_the_user_does(
    tmp_path: Path, kind: type
) -> None:
    log = tmp_path / "log"
    env = kind(2, Counter, create_env_kwargs={"log": str(log)})
    assert repr(env)
    assert env.observation_spec["observation"].shape == (2, 3)
    env.state_dict()
    assert env.get_attr("resets") == [0, 0]
    assert env.get_attr("total") == [0, 0]
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["build"] * 2
    assert env.reset()["observation"].tolist() == [[0, 1, 0]] * 2
    env.close()


@BOTH
def test_an_empty_nested_spec_is_named_by_its_whole_key_wherever_it_is(kind: type) -> None:
    for where in ("observation", "action", "reward"):
        with pytest.raises(RuntimeError, match=r"'agents\.nothing'.*RemoveEmptySpecs"):
            kind(2, functools.partial(_empty_below, where))


def _empty_below(where: str) -> Any:
    env = CountingEnv()
    spec = Composite(agents=Composite(one=Unbounded((1,)), nothing=Composite()))
    setattr(env, f"full_{where}_spec", spec)
    return env
