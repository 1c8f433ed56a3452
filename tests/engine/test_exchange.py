"""What may come between a command and its answer: Ctrl-C at any point, values that do not travel, a close."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from shoal import EnvError, ParallelEnv, RestartPolicy, SerialEnv, WorkerDied, WorkerTimeout
from shoal.engine import exchange, launch, pool, signals
from shoal.engine.protocol import Control
from shoal.engine.signals import Completion
from tests.support import Counter, SlowMethod, Trouble, rows_with, until

pytestmark = pytest.mark.usefixtures("nothing_left")

SOURCE = str(Path(pool.__file__).parents[1])

BOTH = pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])


def acted(env: Any, tensordict: Any) -> Any:
    return env.rand_action(tensordict.copy())


def once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException) -> None:
    """Lets a method raise when it is called next, and then be itself again."""
    method = getattr(owner, name)

    def raising(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, name, method)
        raise error

    monkeypatch.setattr(owner, name, raising)


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_a_ctrl_c_after_the_answers_were_heard_is_made_good_by_the_next_command(
    on_failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = ParallelEnv(3, Counter, processes=2, on_failure=on_failure)
    td = env.reset()
    for _ in range(3):  # more than once: the two completions take turns
        once(monkeypatch, Control, "all_answered", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            env.step(acted(env, td))
        following = env.step(acted(env, td))["next"]
    assert following["observation"][:, 0].tolist() == [6, 6, 6]
    assert not env.faults
    env.close()


def interrupt_at(point: int) -> None:
    """Lets a Ctrl-C come at the n-th point from now on where Python would notice one in shoal's code: the start of a
    function, the end of a call into C."""
    seen = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal seen
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(SOURCE):
            seen += 1
            if seen == point:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
@pytest.mark.parametrize("command", ["step", "step_and_maybe_reset", "reset"])
@pytest.mark.parametrize("kind", [SerialEnv, functools.partial(ParallelEnv, processes=2)])
def test_after_a_ctrl_c_at_any_point_of_a_command_the_environment_can_be_reset(
    kind: Any, command: str, on_failure: str
) -> None:
    env = kind(3, Counter, on_failure=on_failure)
    for point in range(1, 1000):
        given = acted(env, env.reset())
        interrupt_at(point)
        try:
            getattr(env, command)(given)
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        root = env.reset()
        assert root["observation"][:, 0].tolist() == [0, 0, 0]
        following = env.step(acted(env, root))["next"]
        assert following["observation"][:, 0].tolist() == [1, 1, 1]
    assert 30 < point < 999
    assert not env.faults
    env.close()


@pytest.mark.parametrize("method", ["_send_packed", "_take_message", "_use"])
def test_a_ctrl_c_in_the_middle_of_an_exchange_closes_the_environment(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = ParallelEnv(2, Counter, use_buffers=False)
    td = env.reset()
    if method == "_use":
        once(monkeypatch, exchange.Exchange, "_collect", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            env.step(acted(env, td))
    once(monkeypatch, exchange.Exchange, method, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        env.step(acted(env, td))
    assert env.is_closed
    assert env.reset()["observation"][:, 0].tolist() == [0, 0]
    env.close()


def test_a_ctrl_c_while_the_environment_is_claimed_leaves_it_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    env = ParallelEnv(2, Counter)
    td = env.reset()
    engine = env.__dict__["_session"].engine
    engine._claims["thread"] = threading.get_ident()  # as if it came right after the claim
    assert env.step(acted(env, td))["next", "observation"][:, 0].tolist() == [1, 1]
    engine._running = True
    with pytest.raises(RuntimeError, match="in the middle of a command of this thread"):
        env.step(acted(env, td))
    engine._running = False
    env.close()


def test_a_second_ctrl_c_during_close_still_ends_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    env = ParallelEnv(2, functools.partial(Trouble, "hang", "close", at=1), shutdown_timeout=30.0)
    env.reset()
    once(monkeypatch, pool.Pool, "_heard_out", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        env.close()
    assert env.is_closed  # and the fixture looks for processes


def test_an_environment_that_another_thread_closes_says_so() -> None:
    env = ParallelEnv(2, SlowMethod)
    env.reset()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            env.call("slow", 30.0)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    engine = env.__dict__["_session"].engine
    assert until(lambda: engine._running)
    engine.close(0.2)
    thread.join(10.0)
    assert "closed, by another thread or a signal, in the middle of 'call'" in str(errors[0])
    env.close(raise_if_closed=False)


# Values that do not travel.


class NoReturn:
    """Pickles here, and does not unpickle elsewhere."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __reduce__(self) -> Any:
        return _only_at_home, (self.home,)


def _only_at_home(home: int) -> NoReturn:
    if os.getpid() != home:
        raise ValueError("far from home")
    return NoReturn()


class Odd(Counter):
    """Gives back what does not travel."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.value: Any = None

    def lock(self) -> Any:
        return threading.Lock() if self.index == 1 else "fine"

    def os_error(self) -> Any:
        return _OSErrorOnPickling() if self.index == 1 else "fine"

    def exits(self) -> Any:
        return _ExitsOnUnpickling()


class _OSErrorOnPickling:
    def __reduce__(self) -> Any:
        raise OSError("not this")


class _ExitsOnUnpickling:
    def __reduce__(self) -> Any:
        return sys.exit, (7,)


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_an_argument_that_a_worker_cannot_unpickle_is_a_fault_that_harms_nothing(on_failure: str) -> None:
    env = ParallelEnv(3, Odd, processes=2, on_failure=on_failure)
    td = env.reset()
    with pytest.raises(EnvError, match=r"row 0 cannot 'set_attr': what it was given does not unpickle.*far from home"):
        env.set_attr("value", NoReturn())
    assert env.get_attr("value") == [None] * 3
    assert env.step(acted(env, td))["next", "observation"][:, 0].tolist() == [1, 1, 1]
    env.close()


@pytest.mark.parametrize("method", ["lock", "os_error"])
def test_a_result_that_cannot_be_pickled_is_a_fault_of_its_row_alone(method: str) -> None:
    env = ParallelEnv(3, Odd, processes=1, create_env_kwargs=[{"index": index} for index in range(3)])
    td = env.reset()
    with pytest.raises((TypeError, OSError)):
        env.call(method)
    assert [(fault.row, fault.command) for fault in env.faults] == [(1, "call")]
    assert env.step(acted(env, td))["next", "observation"][:, 0].tolist() == [1, 1, 1]
    env.close()


def test_a_result_that_exits_when_it_is_unpickled_is_a_fault() -> None:
    env = ParallelEnv(2, Odd)
    td = env.reset()
    with pytest.raises(EnvError, match=r"does not unpickle in this process: SystemExit: 7"):
        env.call("exits")
    assert env.step(acted(env, td))["next", "observation"][:, 0].tolist() == [1, 1]
    env.close()


class LockedSpace(Counter):
    """Its space cannot be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = gym.spaces.Box(-1, 1, (3,))
        self.observation_space.lock = threading.Lock()  # type: ignore[attr-defined]


def test_a_space_that_cannot_be_pickled_is_named_as_what_it_is() -> None:
    with pytest.raises(TypeError, match="lock") as caught:
        ParallelEnv(2, [Counter, LockedSpace])
    assert (caught.value.row, caught.value.command) == (1, "build")  # type: ignore[attr-defined]


# Exceptions of odd kinds.


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Takes no attributes."""

    text: str = "frozen"


class ExitsAsText(Exception):
    """Raises SystemExit where its text is asked for."""

    def __str__(self) -> str:
        raise SystemExit(9)


class ExitsWhenRebuilt(Exception):
    """Raises SystemExit where it is unpickled, but for the process that it came from."""

    def __reduce__(self) -> Any:
        return _exit_elsewhere, (os.getpid(),)


def _exit_elsewhere(home: int) -> Exception:
    if os.getpid() != home:
        raise SystemExit(11)
    return ExitsWhenRebuilt()


class Raises(Counter):
    """Raises in its first step."""

    def __init__(self, kind: type[Exception]) -> None:
        super().__init__()
        self.kind = kind

    def step(self, action: int) -> Any:
        raise self.kind


@BOTH
@pytest.mark.parametrize(
    ("raised", "seen"), [(Frozen, Frozen), (ExitsAsText, ExitsAsText), (ExitsWhenRebuilt, EnvError)]
)
def test_exceptions_of_odd_kinds_are_reported(kind: type, raised: type[Exception], seen: type[Exception]) -> None:
    env = kind(2, [Counter, functools.partial(Raises, raised)])
    td = env.reset()
    with pytest.raises(raised if kind is SerialEnv else seen):
        env.step(acted(env, td))
    assert [(fault.row, fault.error) for fault in env.faults] == [(1, raised.__name__)]
    env.close()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_factory_that_exits_when_it_is_imported_is_named(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"exits_at_import_{method}"
    (tmp_path / f"{name}.py").write_text(f"import os, sys\nif os.getpid() != {os.getpid()}: sys.exit(5)\n")
    monkeypatch.syspath_prepend(tmp_path)
    module: Any = __import__(name)
    module.make = functools.partial(Counter)
    env_of = type("Env", (Counter,), {"__module__": name})
    module.Env = env_of
    code = f"import {name}\ndef factory():\n    return {name}.Env()\n"
    namespace: dict[str, Any] = {"__name__": name}
    exec(code, namespace)
    module.factory = namespace["factory"]
    with pytest.raises(SystemExit) as caught:
        ParallelEnv(2, [Counter, module.factory], mp_start_method=method)
    assert (caught.value.row, caught.value.command) == (1, "build")  # type: ignore[attr-defined]


# Closing.


class Talkative(Counter):
    """Has much to say."""

    def much(self) -> bytes:
        time.sleep(0.2)
        return bytes(5_000_000)

    def close(self) -> None:
        raise ValueError("x" * 3_000_000)


def test_close_hears_out_a_worker_that_has_much_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    env = ParallelEnv(2, [Counter, Talkative], shutdown_timeout=20.0)
    env.reset()
    once(monkeypatch, exchange.Exchange, "_wait_longer", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        env.__dict__["_session"].engine.execute(exchange.Opcode.CALL, [1], {1: (("much",), (), {})})
    start = time.monotonic()
    with pytest.raises(ValueError, match="xxx") as caught:
        env.close()
    assert time.monotonic() - start < 10.0
    assert len(str(caught.value)) >= 3_000_000


# What the list of faults holds.


def test_a_late_worker_is_listed_with_its_process() -> None:
    env = ParallelEnv(3, rows_with(1, what="hang"), step_timeout=0.4)
    td = env.step_mdp(env.step(acted(env, env.reset())))
    with pytest.raises(WorkerTimeout) as caught:
        env.step(acted(env, td))
    assert [(fault.row, fault.pid) for fault in env.faults] == [(1, caught.value.pids[0])]
    assert f"(pid {caught.value.pids[0]})" in str(caught.value)


class LongMessage(Counter):
    """Has a long message."""

    def step(self, action: int) -> Any:
        raise ValueError("y" * 1_000_000)


def test_a_long_message_is_listed_short() -> None:
    env = SerialEnv(1, LongMessage, on_failure="restart")
    env.step(acted(env, env.reset()))
    assert len(env.faults[0].message) < 2100
    assert "1000000 characters" in env.faults[0].message
    env.close()


# Putting processes in the place of lost ones.


def test_a_process_that_cannot_be_started_is_tried_again_and_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    env = ParallelEnv(3, rows_with(1, what="kill"), on_failure=RestartPolicy(tries=3, delay=0.0))
    td = env.step_mdp(env.step(acted(env, env.reset())))
    kind = type(env.__dict__["_session"].engine._launcher)
    once(monkeypatch, kind, "launch", OSError(24, "Too many open files"))
    done, td = env.step_and_maybe_reset(acted(env, td))
    assert done["next", "truncated"].tolist() == [[False], [True], [False]]
    assert [fault.error for fault in env.faults] == ["WorkerDied", "OSError"]
    td = env.step_mdp(env.step(acted(env, td)))
    with monkeypatch.context() as patch:
        patch.setattr(kind, "launch", lambda *_: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        with pytest.raises(OSError, match="Too many open files"):
            env.step(acted(env, td))
    assert launch.TemplateLauncher is kind
    assert not env.is_closed
    env.close()


@pytest.mark.parametrize("where", ["close", "build"])
def test_what_hangs_while_it_is_put_up_again_is_replaced(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_REBUILD_GRACE", 0.3)
    built = tmp_path / "built"

    def factory() -> gym.Env:
        count = len(built.read_text()) if built.exists() else 0
        built.write_text("x" * (count + 1))
        if where == "build" and count == 1:
            while True:
                time.sleep(0.05)
        env = Trouble("raise")
        if where == "close" and count == 0:
            env.close = lambda: time.sleep(1000)  # type: ignore[method-assign]
        return env

    env = ParallelEnv(2, [Counter, factory], on_failure=RestartPolicy(delay=0.0), step_timeout=0.3)
    env.__dict__["_session"].engine._built_in = 0.0
    td = env.step_mdp(env.step(acted(env, env.reset())))
    start = time.monotonic()
    done, td = env.step_and_maybe_reset(acted(env, td))
    assert time.monotonic() - start < 5.0
    assert done["next", "observation"][:, 0].tolist() == [2, 1]
    assert td["observation"][:, 0].tolist() == [2, 0]
    assert [fault.error for fault in env.faults] == ["ValueError", "WorkerTimeout"]
    env.close()


@pytest.mark.parametrize("processes", [None, 1])
def test_a_row_that_cannot_be_put_up_again_has_no_environment(processes: int | None, tmp_path: Path) -> None:
    built = tmp_path / "built"

    def factory() -> gym.Env:
        if built.exists():
            raise OSError("no licence")
        built.touch()
        return Trouble("raise")

    policy = RestartPolicy(tries=2, span=0.2, delay=0.0)
    kind: Any = SerialEnv if processes is None else functools.partial(ParallelEnv, processes=processes)
    env = kind(2, [Counter, factory], on_failure=policy)
    td = env.step_mdp(env.step(acted(env, env.reset())))
    with pytest.raises(OSError, match="no licence"):
        env.step(acted(env, td))
    with pytest.raises((OSError, EnvError), match=r"no licence|has no environment now"):
        env.reset()
    built.unlink()
    assert until(lambda: _resets(env), 5.0)  # once the span is over, it is tried again
    assert env.step(acted(env, td))["next", "observation"][:, 0].tolist() == [1, 1]
    env.close()


def _resets(env: Any) -> bool:
    try:
        return bool((env.reset()["observation"][:, 0] == 0).all())
    except (OSError, EnvError):
        return False


@pytest.mark.parametrize("what", ["raise", "kill"])
@BOTH
def test_what_update_kwargs_says_counts_from_the_next_start_not_from_a_restart(kind: type, what: str) -> None:
    if kind is SerialEnv and what == "kill":
        what = "two"
    env = kind(2, functools.partial(Trouble, what), create_env_kwargs={"length": 50}, on_failure="restart")
    td = env.step_mdp(env.step(acted(env, env.reset())))
    env.update_kwargs({"length": 70})
    env.step_and_maybe_reset(acted(env, td))
    assert len(env.faults) == 2
    assert env.get_attr("length") == [50, 50]
    env.close()
    env.start()
    assert env.get_attr("length") == [70, 70]
    env.close()


def test_arrays_of_a_closed_pool_are_gone() -> None:
    env = ParallelEnv(2, Counter)
    engine = env.__dict__["_session"].engine
    assert isinstance(engine.fresh, np.ndarray)
    env.close()
    assert engine.arrays == {}
    assert not hasattr(engine, "fresh")


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_a_worker_that_dies_between_its_answer_and_its_ring_is_not_waited_for(
    on_failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, finish = tmp_path / "now", Completion.finish

    def die(self: Completion) -> None:
        if now.exists() and now.read_text() == str(os.getpid()):
            now.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        finish(self)

    monkeypatch.setattr(Completion, "finish", die)  # forked workers take it along
    env = ParallelEnv(3, Counter, mp_start_method="fork", on_failure=on_failure)
    td = env.reset()
    now.write_text(str(env.stats().processes[1].pid))
    start = time.monotonic()
    if on_failure == "raise":
        with pytest.raises(WorkerDied, match=r"row 1 .*SIGKILL during 'step'"):
            env.step(acted(env, td))
        assert env.is_closed
    else:
        following = env.step(acted(env, td))["next"]
        assert following["observation"][:, 0].tolist() == [1, 0, 1]
        assert following["truncated"].tolist() == [[False], [True], [False]]
        env.close()
    assert time.monotonic() - start < 4.0


def test_a_parent_with_a_worker_to_each_processor_sleeps_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "usable_cpus", lambda: 2)
    polls = []
    for processes in (1, 2, 3):
        env = ParallelEnv(3, Counter, processes=processes)
        env.reset()
        polls.append(env.__dict__["_session"].engine._exchange._waiter._poll_seconds)
        env.close()
    assert polls == [signals.POLL_SECONDS, signals.POLL_SECONDS_ON_FULL_CPUS, signals.POLL_SECONDS]
