"""Section 3 of the contract: from not started to closed, and back."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from shoal import ParallelEnv, SerialEnv
from tests.support import Counter, children, ended, script

pytestmark = pytest.mark.usefixtures("nothing_left")

BOTH = pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])

USES: dict[str, Any] = {
    "reset": lambda env: env.reset(),
    "step": lambda env: env.step(env.rand_action()),
    "step_and_maybe_reset": lambda env: env.step_and_maybe_reset(env.rand_action()),
    "rollout": lambda env: env.rollout(2),
    "set_seed": lambda env: env.set_seed(1),
    "state_dict": lambda env: env.state_dict(),
    "load_state_dict": lambda env: env.load_state_dict({}),
    "call": lambda env: env.call("double", 1),
    "get_attr": lambda env: env.get_attr("steps"),
    "set_attr": lambda env: env.set_attr("length", 3),
    "a view": lambda env: env[0].reset(),
}


@BOTH
def test_any_first_use_starts_it_and_so_does_the_next_use_after_close(kind: type) -> None:
    env = kind(2, Counter)
    for name, use in USES.items():
        assert env.is_closed
        use(env)
        assert not env.is_closed, name
        env.close()
        assert env.is_closed, name


@BOTH
def test_looking_at_it_is_no_use_of_it(kind: type) -> None:
    """Until its first use the env still counts as not started."""
    env = kind(2, Counter)
    for _ in range(2):
        assert repr(env)
        assert (env.num_workers, env.batch_size, env.device) == (2, (2,), None)
        assert env.rand_action()["action"].shape == (2, 3)
        assert env.fake_tensordict()["next", "observation"].shape == (2, 3)
        assert env.reward_keys == ["reward"]
        assert len(env.done_keys) == 3
        copy.deepcopy(env).close(raise_if_closed=False)
        pickle.dumps(env)
        assert env.is_closed
        env.close(raise_if_closed=False)


@BOTH
def test_until_its_first_use_update_kwargs_still_counts_and_ends_what_was_brought_up(kind: type) -> None:
    ParallelEnv(2, Counter).close()  # brings up the template that the tests share
    before = children()
    env = kind(2, Counter, create_env_kwargs={"length": 3})
    env.update_kwargs({"length": 4})
    assert set(children()) <= set(before)
    assert env.is_closed
    env.reset()
    assert env.get_attr("length") == [4, 4]
    env.close()


@BOTH
def test_close_of_a_batch_that_was_never_used_is_no_error_once(kind: type) -> None:
    env = kind(2, Counter)
    env.close()
    with pytest.raises(RuntimeError, match="closed already"):
        env.close()
    env.start()
    with pytest.raises(RuntimeError, match="started already"):
        env.start()
    env.close()


class Wide(Counter):
    """Observes two numbers more."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)

    def observe(self) -> Any:
        return np.concatenate([super().observe(), [0, 0]]).astype(np.float32)


@BOTH
@pytest.mark.parametrize("factories", [Counter, [Counter, Wide]], ids=["one task", "two tasks"])
def test_all_specs_stay_readable_when_closed(kind: type, factories: Any) -> None:
    env = kind(2, factories)
    names = ("output_spec", "input_spec", "observation_spec", "full_action_spec", "full_reward_spec", "full_done_spec")

    def known() -> dict[str, Any]:
        specs = {name: getattr(env, name).clone() for name in names}
        keys = {name: getattr(env, name) for name in ("action_keys", "reward_keys", "done_keys", "reset_keys")}
        return {**specs, **keys, "repr": repr(env), "batch_size": env.batch_size, "num_workers": env.num_workers}

    when_new = known()
    env.reset()
    env.close()
    for name, value in known().items():
        assert value == when_new[name], name
    assert env.is_closed


COPYING = pytest.mark.parametrize(
    "copying", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["copy", "pickle"]
)


@COPYING
@pytest.mark.parametrize("when", ["new", "started", "closed"])
def test_pickling_or_deep_copying_gives_a_twin_with_the_same_configuration(copying: Any, when: str) -> None:
    threads = torch.get_num_threads()
    env = ParallelEnv(
        3,
        [Counter, Wide, Wide],
        create_env_kwargs=[{"length": n} for n in (2, 3, 4)],
        processes=2,
        device="cpu",
        share_individual_td=True,
        shared_memory=False,
        memmap=True,
        num_threads=threads + 1,
        num_sub_threads=2,
        mp_start_method="fork",
        step_timeout=50,
        shutdown_timeout=5,
        non_blocking=True,
        consolidate=False,
        daemon=True,
    )
    if when != "new":
        env.reset()
    if when == "closed":
        env.close()
    twin = copying(env)
    assert twin.is_closed
    assert twin.__dict__["_session"] is None
    kept = {name: value for name, value in twin.__dict__.items() if isinstance(value, (bool, int, float, str))}
    mine = {**env.__dict__, "_in_use": False}
    assert kept == {name: mine[name] for name in kept}
    assert (twin.device, twin.create_env_kwargs) == (env.device, env.create_env_kwargs)
    assert [factory.__qualname__ for factory in twin.create_env_fn] == ["Counter", "Wide", "Wide"]
    assert (twin.output_spec, twin.input_spec) == (env.output_spec, env.input_spec)
    env.close(raise_if_closed=False)
    assert torch.get_num_threads() == threads
    twin.reset()
    assert torch.get_num_threads() == threads + 1
    assert twin.get_attr("length") == [2, 3, 4]
    assert len(twin.__dict__["_session"].engine._launcher.pids) == 2
    twin.close()
    assert torch.get_num_threads() == threads


@BOTH
def test_with_closes_after_an_exception_and_takes_an_environment_that_was_closed_inside(kind: type) -> None:
    env = kind(2, Counter)
    with pytest.raises(KeyError, match="no_such_key"), env:
        _ = env.reset()["no_such_key"]
    assert env.is_closed
    with kind(2, Counter) as env:
        env.reset()
        env.close()
    assert env.is_closed


def test_ctrl_c_in_the_users_script_ends_the_workers_and_shows_one_traceback() -> None:
    process = script(
        "import signal, threading\nfrom shoal import ParallelEnv\nfrom tests.support import Counter, children\n"
        "env = ParallelEnv(3, Counter); td = env.reset(); print(*children(), flush=True)\n"
        "signal.raise_signal(signal.SIGINT)\nprint('never')"
    )
    out, err = process.communicate(timeout=120)
    assert err.count("Traceback") == 1
    assert "KeyboardInterrupt" in err
    assert len(out.split()) == 4
    assert ended(list(map(int, out.split())))
