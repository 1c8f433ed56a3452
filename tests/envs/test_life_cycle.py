"""Section 3 of the contract: from not started to closed, and back."""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torchrl.envs import GymEnv

from shoal import ParallelEnv, SerialEnv, WorkerDied
from tests.support import Counter, SlowMethod, Trouble, children, ended, script, until

FACE = "import time\nfrom shoal import ParallelEnv\nfrom tests.support import Counter, children\n"

pytestmark = pytest.mark.usefixtures("nothing_left")


def imports_within() -> Any:
    from torchrl.envs import GymEnv

    return GymEnv("CartPole-v1")


BOTH = pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])


@BOTH
def test_start_and_close_are_errors_where_they_make_no_sense(kind: type) -> None:
    env = kind(2, Counter)
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


@BOTH
def test_a_batch_that_was_never_used_closes_without_an_error(kind: type) -> None:
    kind(1, Counter).close()  # brings up the template that the tests share
    before = children()
    env = kind(2, Counter)
    env.close()
    assert set(children()) <= set(before)


@BOTH
def test_specs_stay_readable_when_closed_and_the_next_use_starts_afresh(kind: type) -> None:
    env = kind(2, Counter)
    env.rollout(3)
    env.close()
    assert env.observation_spec["observation"].shape == (2, 3)
    assert env.action_spec.shape == (2, 3)
    assert env.batch_size == (2,)
    assert env.reset()["observation"].tolist() == [[0, 1, 0], [0, 1, 0]]
    env.close()


@BOTH
def test_with_closes(kind: type) -> None:
    kind(1, Counter).close()  # brings up the template that the tests share
    before = children()
    with kind(2, Counter) as env:
        env.reset()
    assert env.is_closed
    assert set(children()) <= set(before)


@BOTH
@pytest.mark.parametrize(
    "copying", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["copy", "pickle"]
)
def test_a_copy_is_a_twin_that_is_not_started(kind: type, copying: Any) -> None:
    env = kind(2, Counter, create_env_kwargs={"length": 4})
    env.rollout(2)
    twin = copying(env)
    assert twin.is_closed
    assert not env.is_closed
    assert twin.observation_spec == env.observation_spec
    assert twin.rollout(10).shape == (2, 4)
    assert env.step(env.rand_action(env.reset()))["next", "observation"][0, 0] == 1
    twin.close()
    env.close()


@BOTH
def test_configuring_counts_until_the_first_use(kind: type) -> None:
    env = kind(2, Counter)
    assert env.configure_parallel(shutdown_timeout=3, use_buffers=False) is env
    env.reset()
    assert env.shutdown_timeout == 3.0
    with pytest.raises(RuntimeError, match="before the environment is started"):
        env.configure_parallel(num_threads=1)
    env.close()


def test_leaving_the_interpreter_with_a_live_environment_ends_its_workers() -> None:
    process = script(FACE + "env = ParallelEnv(3, Counter); env.reset(); print(*children(), flush=True)")
    out, err = process.communicate(timeout=120)
    assert err == ""
    assert process.returncode == 0
    assert len(out.split()) == 4
    assert ended(list(map(int, out.split())))


def test_an_exception_in_the_users_script_ends_the_workers_and_shows_one_traceback() -> None:
    process = script(FACE + "env = ParallelEnv(3, Counter); env.reset(); print(*children(), flush=True); 1 / 0")
    out, err = process.communicate(timeout=120)
    assert err.count("Traceback") == 1
    assert "ZeroDivisionError" in err
    assert ended(list(map(int, out.split())))


@BOTH
def test_nothing_that_happens_later_changes_a_result(kind: type) -> None:
    env = kind(3, Counter)
    td = env.reset()
    kept, copies = [], []
    for _ in range(200):
        done, td = env.step_and_maybe_reset(env.rand_action(td))
        kept.append((done, td.copy()))
        copies.append((done.clone(), td.clone()))
    env.reset()
    env.close()
    for (done, root), (done_copy, root_copy) in zip(kept, copies, strict=True):
        assert (done == done_copy).all()
        assert (root == root_copy).all()


def test_the_parent_may_be_idle_for_longer_than_the_timeout() -> None:
    env = ParallelEnv(2, Counter, step_timeout=0.3)
    td = env.reset()
    time.sleep(0.5)
    td = env.step(env.rand_action(td))
    assert td["next", "observation"][0, 0] == 1
    env.close()


@BOTH
def test_losing_the_last_reference_ends_the_workers_at_once(kind: type) -> None:
    kind(1, Counter).close()  # brings up the template that the tests share
    before = children()
    env = kind(2, Counter)
    env.step(env.rand_action(env.reset()))
    gone = weakref.ref(env)
    gc.disable()
    try:
        del env
        assert gone() is None
        assert until(lambda: set(children()) <= set(before))
    finally:
        gc.enable()


def test_after_a_fault_a_step_says_to_reset_and_a_reset_starts_afresh() -> None:
    env = ParallelEnv(2, [Counter, functools.partial(Trouble, "kill")])
    td = env.step(env.rand_action(env.reset()))
    td = env.rand_action(env.step_mdp(td))
    with pytest.raises(WorkerDied, match="SIGKILL"):
        env.step(td)
    assert env.is_closed
    for step in (env.step, env.step_and_maybe_reset):
        with pytest.raises(RuntimeError, match="reset it"):
            step(td)
    assert env.reset()["observation"].tolist() == [[0, 1, 0], [0, 1, 0]]
    env.close()


def test_a_fork_of_the_process_cannot_touch_its_workers() -> None:
    env = ParallelEnv(2, Counter)
    td = env.rand_action(env.reset())
    pid = os.fork()
    if pid == 0:
        try:
            env.step(td.clone())
        except RuntimeError as error:
            os._exit(0 if "fork of it" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert env.step(td)["next", "observation"][:, 0].tolist() == [1, 1]
    env.close()


def test_two_threads_at_once_are_an_error_that_harms_nothing() -> None:
    env = ParallelEnv(2, SlowMethod)
    env.reset()
    thread = threading.Thread(target=env.call, args=("slow", 0.5))
    thread.start()
    assert until(lambda: env.__dict__["_session"].engine._running)
    with pytest.raises(RuntimeError, match="another thread"):
        env.call("double", 1)
    thread.join()
    assert env.call("double", 1) == [2, 2]
    env.close()


@BOTH
def test_inference_mode_and_a_default_dtype_change_nothing_but_the_reward(kind: type) -> None:
    with torch.inference_mode():
        env = kind(2, Counter)
        env.rollout(2)
    assert env.rollout(3).shape == (2, 3)
    env.close()
    torch.set_default_dtype(torch.float64)
    try:
        for factory in (Counter, functools.partial(GymEnv, "CartPole-v1"), imports_within):
            env = kind(2, factory)
            reward = env.rollout(2)["next", "reward"]
            assert reward.dtype == env.reward_spec.dtype == torch.float64
            env.close()
    finally:
        torch.set_default_dtype(torch.float32)


@BOTH
def test_a_batch_of_lambdas_pickles(kind: type) -> None:
    env = kind(2, lambda: Counter(4))
    twin = pickle.loads(pickle.dumps(env))
    assert twin.rollout(9).shape == (2, 4)
    twin.close()
    env.close()


@BOTH
def test_a_batch_that_was_closed_before_any_use_rolls_out_and_so_does_its_copy(kind: type) -> None:
    env = kind(2, Counter, create_env_kwargs={"length": 3})
    twin = copy.deepcopy(env)
    env.close()
    for each in (env, twin):
        assert each.rollout(5).shape == (2, 3)
        each.close()


def test_thread_counts_come_back_after_a_fault_too() -> None:
    before = torch.get_num_threads()
    env = ParallelEnv(2, [Counter, functools.partial(Trouble, "kill")], num_threads=before + 1)
    td = env.step(env.rand_action(env.reset()))
    with pytest.raises(WorkerDied):
        env.step(env.rand_action(env.step_mdp(td)))
    env.reset()
    env.close()
    assert torch.get_num_threads() == before
