"""Putting rows up again after faults: how often, how fast, with which seed, and what the caller sees of it."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from shoal import EnvError, ParallelEnv, RestartPolicy, SerialEnv, WorkerDied, WorkerTimeout
from shoal.engine import exchange, recovery
from tests.faults.envs import TroubleAgents
from tests.support import ACTS, Counter, SlowMethod, Trouble, ended, rows_with, script

pytestmark = pytest.mark.usefixtures("nothing_left")

BOTH = pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])


def acted(env: Any, tensordict: Any) -> Any:
    return env.rand_action(tensordict.copy())


class Stubborn(Counter):
    """Fails in each first step after a reset."""

    def __init__(self, what: str = "raise") -> None:
        super().__init__()
        self.what = what

    def step(self, action: int) -> Any:

        ACTS[self.what]()
        return super().step(action)


@BOTH
def test_the_delay_grows_and_after_so_many_tries_within_the_span_the_original_error_is_raised(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays: list[float] = []
    monkeypatch.setattr(recovery.time, "sleep", delays.append)
    policy = RestartPolicy(tries=4, span=60.0, delay=0.5, longest_delay=1.5)
    env = kind(2, [Counter, Stubborn], on_failure=policy)
    td = env.reset()
    for _ in range(4):
        done, td = env.step_and_maybe_reset(acted(env, td))
        assert done["next", "truncated"].tolist() == [[False], [True]]
    assert [delay for delay in delays if delay >= 0.5] == [0.5, 1.0, 1.5, 1.5]
    with pytest.raises(ValueError, match="boom"):
        env.step_and_maybe_reset(acted(env, td))
    assert [(fault.number, fault.action) for fault in env.faults] == [
        *((number, "restarted") for number in (1, 2, 3, 4)),
        (5, "raised"),
    ]
    assert not env.is_closed
    env.close()


def test_a_worker_that_dies_too_often_is_raised_and_closes_the_environment() -> None:
    env = ParallelEnv(2, [Counter, functools.partial(Stubborn, "kill")], on_failure=RestartPolicy(tries=2, delay=0.0))
    td = env.reset()
    for _ in range(2):
        _, td = env.step_and_maybe_reset(acted(env, td))
    with pytest.raises(WorkerDied, match=r"row 1 .*SIGKILL.*The environment is closed") as caught:
        env.step_and_maybe_reset(acted(env, td))
    assert caught.value.rows == (1,)
    assert env.is_closed
    assert env.reset()["observation"].tolist() == [[0, 1, 0], [0, 1, 0]]
    env.close()


@BOTH
def test_faults_that_lie_longer_back_than_the_span_do_not_count(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(0.0, 50.0)
    monkeypatch.setattr(recovery.time, "monotonic", lambda: next(now))
    env = kind(2, [Counter, Stubborn], on_failure=RestartPolicy(tries=2, span=60.0, delay=0.0))
    td = env.reset()
    for _ in range(6):
        _, td = env.step_and_maybe_reset(acted(env, td))
    assert [fault.row for fault in env.faults] == [1] * 6
    env.close()


@BOTH
def test_an_environment_that_fails_while_it_is_built_anew_is_tried_again(kind: type, tmp_path: Path) -> None:
    built = tmp_path / "built"

    def factory() -> gym.Env:
        count = len(built.read_text()) if built.exists() else 0
        built.write_text("x" * (count + 1))
        if count == 1:
            raise OSError("the licence server is busy")
        return Trouble("raise", at=1)

    env = kind(2, [Counter, factory], on_failure=RestartPolicy(delay=0.0))
    done, _ = env.step_and_maybe_reset(acted(env, env.reset()))
    assert done["next", "truncated"].tolist() == [[False], [True]]
    assert [(fault.row, fault.command, fault.error) for fault in env.faults] == [
        (1, "step_and_maybe_reset", "ValueError"),
        (1, "build", "OSError"),
    ]
    env.close()


@BOTH
def test_an_environment_that_is_built_anew_must_be_of_the_same_kind(kind: type, tmp_path: Path) -> None:
    built = tmp_path / "built"

    def factory() -> gym.Env:
        env: gym.Env = Trouble("raise", at=1)
        if built.exists():
            env.observation_space = gym.spaces.Box(-1, 1, (4,))
        built.touch()
        return env

    env = kind(2, [Counter, factory], on_failure=RestartPolicy(tries=2, delay=0.0))
    td = env.reset()
    with pytest.raises(EnvError, match=r"row 1 was built anew and has other leaves than before.*\(3,\).*\(4,\)"):
        env.step(acted(env, td))
    env.close()


class Seeded(Trouble):
    """Observes the seed that it was given last."""

    def reset(self, *, seed: int | None = None, **kwargs: Any) -> Any:
        if seed is not None:
            self.seed = seed
        return super().reset(**kwargs)

    def observe(self) -> np.ndarray:
        return np.array([self.steps, self.resets, getattr(self, "seed", -1)], np.float32)


@BOTH
def test_a_fresh_environment_gets_a_seed_of_its_own_that_is_the_same_in_each_run(kind: type) -> None:
    seeds = []
    for _ in range(2):
        env = kind(2, [Counter, functools.partial(Seeded, "raise")], on_failure="restart")
        env.set_seed(7)
        first = env.reset()["observation"][1, 2].item()
        td = env.reset()
        for _ in range(2):
            done, td = env.step_and_maybe_reset(acted(env, td))
        assert done["next", "truncated"].tolist() == [[False], [True]]
        seeds.append(td["observation"][1, 2].item())
        assert seeds[-1] not in (first, -1)
        env.close()
    assert seeds[0] == seeds[1]
    env = kind(2, [Counter, functools.partial(Seeded, "raise")], on_failure="restart")
    td = env.reset()
    for _ in range(2):
        _, td = env.step_and_maybe_reset(acted(env, td))
    assert td["observation"][1, 2] == -1  # nobody has asked for a seed
    env.close()


class DiesWhileItIsRead(Counter):
    """Its worker dies in the middle of writing the third observation: one leaf is new then, the other old."""

    observation_space = gym.spaces.Dict(
        {"first": gym.spaces.Box(-np.inf, np.inf, (2,)), "second": gym.spaces.Box(-np.inf, np.inf, (2,))}
    )

    def observe(self) -> Any:
        values: dict[str, Any] = {name: np.full(2, self.total, np.float32) for name in ("first", "second")}
        if self.total == 3:
            values["second"] = _Deadly()
        return values


class _Deadly:
    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("command", ["step", "step_and_maybe_reset"])
def test_what_a_dying_worker_has_written_is_never_seen(command: str) -> None:
    env = ParallelEnv(2, [DiesWhileItIsRead] * 2, on_failure="restart", processes=1)
    td = env.reset()
    for _ in range(2):
        _, td = env.step_and_maybe_reset(acted(env, td))
    result = getattr(env, command)(acted(env, td))
    following = result["next"] if command == "step" else result[0]["next"]
    for name in ("first", "second"):
        assert following[name].tolist() == [[2, 2], [2, 2]]
    assert following["truncated"].all()
    env.close()


def test_rows_that_share_a_lost_process_and_took_no_part_come_back_truncated_when_they_step_next() -> None:
    env = ParallelEnv(3, rows_with(1, what="kill"), processes=2, on_failure="restart")
    td = env.step_mdp(env.step(acted(env, env.reset())))
    only = torch.tensor([False, True, True])
    following = env.step(acted(env, td).set("_step", only))["next"]
    assert following["truncated"].tolist() == [[False], [True], [False]]
    assert following["observation"].tolist() == [[1, 1, 1], [1, 1, 1], [2, 1, 2]]
    shown = env.reset(td.empty().set("_reset", torch.zeros(3, 1, dtype=torch.bool)))
    assert shown["observation"].tolist() == [[1, 1, 1], [1, 1, 1], [2, 1, 2]]
    following = env.step(acted(env, td))["next"]
    assert following["truncated"].tolist() == [[True], [True], [False]]
    assert following["observation"].tolist() == [[1, 1, 1], [1, 1, 1], [3, 1, 3]]
    mask = following["done"]
    root = env.reset(td.empty().set("_reset", mask))
    assert root["observation"].tolist() == [[0, 1, 0], [0, 1, 0], [3, 1, 3]]
    assert env.step(acted(env, root))["next", "observation"][:, 0].tolist() == [1, 1, 4]
    env.close()


def test_all_workers_and_the_process_that_starts_them_may_die_at_once() -> None:
    env = ParallelEnv(3, Counter, on_failure="restart")
    td = env.step_mdp(env.step(acted(env, env.reset())))
    launcher = env.__dict__["_session"].engine._launcher
    os.kill(launcher._template._process.pid, signal.SIGKILL)
    assert ended(list(launcher.pids.values()))
    done, td = env.step_and_maybe_reset(acted(env, td))
    assert done["next", "truncated"].all()
    assert done["next", "observation"].tolist() == [[1, 1, 1]] * 3
    assert td["observation"].tolist() == [[0, 1, 0]] * 3
    assert env.step(acted(env, td))["next", "observation"][:, 0].tolist() == [1, 1, 1]
    env.close()


@BOTH
def test_a_rollout_goes_on_through_faults(kind: type) -> None:
    env = kind(3, rows_with(1, what="raise", at=4), on_failure=RestartPolicy(delay=0.0))
    rollout = env.rollout(12, break_when_any_done=False)
    assert rollout["next", "truncated"].squeeze(-1).nonzero().tolist() == [[1, 3], [1, 7], [1, 11]]
    assert rollout["next", "terminated"].sum() == 0
    assert rollout["observation"][1, :, 0].tolist() == [0, 1, 2, 3] * 3
    assert rollout["next", "observation"][1, :, 0].tolist() == [1, 2, 3, 3] * 3
    assert rollout["next", "observation"][0, :, 0].tolist() == list(range(1, 13))
    env.close()


def test_a_time_limit_holds_within_its_context_only() -> None:
    env = ParallelEnv(2, SlowMethod, step_timeout=30.0, on_failure="restart")
    env.reset()
    with env.time_limit(0.2), pytest.raises(WorkerTimeout, match=r"'call' within 0.2 s"):
        env.call("slow", 5.0)
    assert env.step_timeout == 30.0
    assert env.call("slow", 0.3) == ["late", "late"]
    env.step_timeout = 0.2
    with pytest.raises(WorkerTimeout, match=r"within 0.2 s"):
        env.call("slow", 5.0)
    env.close()


@pytest.mark.parametrize("on_failure", ["again", None, 3])
def test_what_is_no_policy_is_refused(on_failure: Any) -> None:
    with pytest.raises(ValueError, match=r'"raise", "restart" or a RestartPolicy'):
        SerialEnv(2, Counter, on_failure=on_failure)


@pytest.mark.parametrize("wrong", [{"tries": 0}, {"span": -1.0}, {"delay": -0.1}])
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="restart policy"):
        RestartPolicy(**wrong)


def test_the_last_thousand_faults_are_listed_and_all_are_counted() -> None:
    env = SerialEnv(1, Stubborn, on_failure=RestartPolicy(tries=10_000, delay=0.0))
    td = env.reset()
    for _ in range(1010):
        _, td = env.step_and_maybe_reset(acted(env, td))
    assert len(env.faults) == 1000
    assert [env.faults[0].number, env.faults[-1].number] == [11, 1010]
    env.close()


@BOTH
def test_the_log_says_what_happened_to_which_row(kind: type, caplog: pytest.LogCaptureFixture) -> None:
    env = kind(3, rows_with(1, what="raise"), on_failure="restart")
    with caplog.at_level(logging.INFO, "shoal"):
        env.rollout(2, break_when_any_done=False)
        with pytest.raises(AttributeError):
            env.get_attr("no_such_name")
    texts = [record.getMessage() for record in caplog.records]
    assert "row 1, command 'step', process" in texts[0]
    assert "ValueError: boom; restarted in 0.05 s" in texts[0]
    assert "in trouble" in texts[0]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO", "INFO"]
    env.close()


def test_the_log_names_a_lost_process_once(caplog: pytest.LogCaptureFixture) -> None:
    env = ParallelEnv(3, rows_with(1, what="kill"), processes=1, on_failure="restart")
    with caplog.at_level(logging.WARNING, "shoal"):
        env.rollout(2, break_when_any_done=False)
    (record,) = caplog.records
    assert "the worker process of rows 0, 1, 2" in record.getMessage()
    assert "was killed by SIGKILL during 'step'; restarted" in record.getMessage()
    env.close()


def test_nothing_is_written_unless_the_program_sets_logging_up() -> None:
    process = script(
        "from shoal import ParallelEnv\n"
        "from tests.support import rows_with\n"
        "env = ParallelEnv(3, rows_with(1, what='kill'), on_failure='restart')\n"
        "env.rollout(5, break_when_any_done=False)\n"
        "print(len(env.faults))\n"
    )
    out, err = process.communicate(timeout=60)
    assert (out.split(), err) == (["2"], "")


@BOTH
@pytest.mark.parametrize("command", ["step", "step_and_maybe_reset"])
def test_agents_with_done_flags_of_their_own_begin_anew_as_a_whole(kind: type, command: str) -> None:
    env = kind(2, [TroubleAgents, functools.partial(TroubleAgents, "raise", at=3)], on_failure="restart")
    td = env.reset()
    for _ in range(2):
        td = env.step_mdp(env.step(acted(env, td)))
    if command == "step":
        result = env.step(acted(env, td))
        root = env.maybe_reset(env.step_mdp(result))
    else:
        result, root = env.step_and_maybe_reset(acted(env, td))
    assert result["next", "agents", "done"].tolist() == [[[False], [False]], [[True], [True]]]
    assert result["next", "agents", "reward"].tolist() == [[[1], [1]], [[0], [0]]]
    assert result["next", "agents", "observation"].tolist() == [[[3], [3]], [[2], [2]]]
    assert result["next", "above"].tolist() == [[3], [2]]
    assert root["agents", "observation"].tolist() == [[[3], [3]], [[0], [0]]]
    if command == "step_and_maybe_reset":  # of a reset by masks, torchrl keeps what lies above them
        assert root["above"].tolist() == [[3], [0]]
    assert len(env.faults) == 1
    env.close()


class EndsBadly(Counter):
    """Comes to its natural end, and then fails in the reset that follows."""

    def __init__(self, what: str = "raise", times: int = 1, log: str | None = None) -> None:
        super().__init__(length=2, log=log)
        self.what, self.times = what, times

    def reset(self, **kwargs: Any) -> Any:
        if self.steps == 2 and self.times > 0:
            self.times -= 1
            ACTS[self.what]()
        return super().reset(**kwargs)


@BOTH
def test_a_step_that_was_complete_counts_where_only_the_reset_after_it_failed(kind: type) -> None:
    env = kind(3, [functools.partial(Counter, 9), EndsBadly, functools.partial(Counter, 9)], on_failure="restart")
    td = env.reset()
    _, td = env.step_and_maybe_reset(acted(env, td))
    given = acted(env, td)
    done, td = env.step_and_maybe_reset(given.clone())
    assert done["next", "terminated"].tolist() == [[False], [True], [False]]
    assert not done["next", "truncated"].any()
    assert done["next", "observation"][:, 0].tolist() == [2, 2, 2]
    assert done["next", "reward"].flatten().tolist() == given["action"].argmax(-1).tolist()
    assert td["observation"].tolist() == [[2, 1, 2], [0, 1, 0], [2, 1, 2]]
    assert not td["done"].any()
    assert len(env.faults) == 1
    env.close()


class FailsAfterItsEnd(Counter):
    """Raises in the first step of its second episode."""

    def step(self, action: int) -> Any:
        if self.resets == 2 and self.steps == 0:
            raise ValueError("no second episode")
        return super().step(action)


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv, functools.partial(ParallelEnv, processes=1)])
def test_the_flags_of_an_episode_that_is_over_do_not_make_a_failed_step_a_complete_one(kind: Any) -> None:
    calm = functools.partial(Counter, 9)
    env = kind(3, [calm, functools.partial(FailsAfterItsEnd, 2), calm], on_failure="restart")
    td = env.reset()
    for _ in range(2):
        done, td = env.step_and_maybe_reset(acted(env, td))
    assert done["next", "terminated"].tolist() == [[False], [True], [False]]
    assert td["observation"].tolist() == [[2, 1, 2], [0, 2, 2], [2, 1, 2]]
    done, td = env.step_and_maybe_reset(acted(env, td))
    assert done["next", "terminated"].tolist() == [[False]] * 3
    assert done["next", "truncated"].tolist() == [[False], [True], [False]]
    assert done["next", "observation"].tolist() == [[3, 1, 3], [0, 2, 2], [3, 1, 3]]
    assert td["observation"].tolist() == [[3, 1, 3], [0, 1, 0], [3, 1, 3]]
    env.close()


@pytest.mark.parametrize("use_buffers", [True, False])
def test_a_row_whose_process_dies_in_the_reset_of_another_comes_back_truncated(use_buffers: bool) -> None:
    factories = [functools.partial(Counter, 9), functools.partial(EndsBadly, "kill"), functools.partial(Counter, 9)]
    env = ParallelEnv(3, factories, processes=2, use_buffers=use_buffers, on_failure="restart")
    td = env.reset()
    _, td = env.step_and_maybe_reset(acted(env, td))
    done, td = env.step_and_maybe_reset(acted(env, td))
    assert done["next", "done"].tolist() == [[True], [True], [False]]
    assert done["next", "truncated"][0].item()
    assert done["next", "observation"][0].tolist() == [1, 1, 1]  # what it did in that step went with its process
    assert td["observation"].tolist() == [[0, 1, 0], [0, 1, 0], [2, 1, 2]]
    assert env.step(acted(env, td))["next", "observation"][:, 0].tolist() == [1, 1, 3]
    env.close()


class NeverResets(Counter):
    """Fails in each reset but the first of the whole program."""

    def __init__(self, log: str) -> None:
        super().__init__(length=1, log=log)

    def reset(self, **kwargs: Any) -> Any:
        if "reset" in Path(self.log or "").read_text():
            raise ValueError("never again")
        return super().reset(**kwargs)


@BOTH
@pytest.mark.parametrize("command", ["reset", "step_and_maybe_reset"])
def test_a_reset_that_fails_again_and_again_is_raised_in_the_end(kind: type, command: str, tmp_path: Path) -> None:
    factory = functools.partial(NeverResets, str(tmp_path / "log"))
    env = kind(2, [Counter, factory], on_failure=RestartPolicy(tries=3, delay=0.0))
    td = env.reset()
    with pytest.raises(ValueError, match="never again"):
        env.reset() if command == "reset" else env.step_and_maybe_reset(acted(env, td))
    assert [fault.action for fault in env.faults] == ["restarted"] * 3 + ["raised"]
    assert {fault.row for fault in env.faults} == {1}
    env.close()


def test_a_masked_reset_in_a_process_that_dies_resets_its_own_rows_only(tmp_path: Path) -> None:
    log = tmp_path / "log"
    factories = [functools.partial(Counter, 50, str(log)), *rows_with(0, 1, what="kill", when="reset")]
    env = ParallelEnv(2, factories, processes=1, on_failure="restart")
    td = env.step_mdp(env.step(acted(env, env.reset())))
    before = log.read_text().count("reset")
    root = env.reset(td.empty().set("_reset", torch.tensor([[False], [True]])))
    assert root["observation"].tolist() == [[1, 1, 1], [0, 1, 0]]
    assert log.read_text().count("reset") == before
    following = env.step(acted(env, root))["next"]
    assert following["truncated"].tolist() == [[True], [False]]
    assert following["observation"].tolist() == [[1, 1, 1], [1, 1, 1]]
    env.close()


def test_what_others_did_in_a_command_that_was_raised_is_their_last_good_value() -> None:
    factories = [Counter, Stubborn, functools.partial(Trouble, "kill", at=3)]
    env = ParallelEnv(3, factories, on_failure=RestartPolicy(tries=1, delay=0.0))
    td = env.step_mdp(env.step(acted(env, env.reset())))  # row 1 is put up: its one try
    td = env.reset(td.set("_reset", torch.tensor([[False], [True], [False]])))
    with pytest.raises(ValueError, match="boom"):
        env.step(acted(env, td))
    only = torch.tensor([True, False, True])
    following = env.step(acted(env, td).set("_step", only))["next"]
    assert following["truncated"].tolist() == [[False], [False], [True]]
    assert following["observation"][[0, 2]].tolist() == [[3, 1, 3], [2, 1, 2]]
    env.close()


def test_a_process_lost_after_its_answer_takes_none_of_its_rows_along_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = ParallelEnv(
        3, [Counter, *rows_with(0, 1, what="raise"), *rows_with(0, 1, what="kill")], processes=2, on_failure="restart"
    )  # rows 0 and 1 share a process
    td = env.step_mdp(env.step(acted(env, env.reset())))
    launcher = env.__dict__["_session"].engine._launcher
    synchronise = exchange.Exchange._synchronise

    def kill_first(self: Any, *args: Any) -> None:
        monkeypatch.setattr(exchange.Exchange, "_synchronise", synchronise)
        os.kill(launcher.pids[0], signal.SIGKILL)
        assert ended([launcher.pids[0]])
        synchronise(self, *args)

    monkeypatch.setattr(exchange.Exchange, "_synchronise", kill_first)
    done, td = env.step_and_maybe_reset(acted(env, td))
    assert {fault.row for fault in env.faults} == {0, 1, 2}
    assert done["next", "truncated"].all()
    assert done["next", "observation"].tolist() == [[1, 1, 1]] * 3
    assert td["observation"].tolist() == [[0, 1, 0]] * 3
    env.close()
