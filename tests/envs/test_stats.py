"""``env.stats()``: where the time of a batch goes."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest

from shoal import SerialEnv
from shoal.drivers import together
from shoal.engine import rows, worker
from shoal.envs import batched, session
from tests.envs.kinds import KINDS, kinds
from tests.support import Counter, children

pytestmark = pytest.mark.usefixtures("nothing_left")


class Slow(Counter):
    """Sleeps in each step."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(length=1000)
        self.seconds = seconds

    def step(self, action: int) -> Any:
        time.sleep(self.seconds)
        return super().step(action)


@kinds
def test_time_in_environments_is_told_by_row_and_process(kind: str) -> None:
    env = KINDS[kind](3, Slow, create_env_kwargs=[{"seconds": 0.0}, {"seconds": 0.0}, {"seconds": 0.004}])
    td = env.reset()
    for _ in range(together.MEASURED_EVERY * 3):
        _, td = env.step_and_maybe_reset(env.rand_action(td))
    time.sleep(0.1)
    stats = env.stats()
    steps = together.MEASURED_EVERY * 3
    assert stats.commands == steps + 1
    assert [row.row for row in stats.rows] == [0, 1, 2]
    assert {row.calls for row in stats.rows} == {steps + 1}
    slow = stats.rows[2].env_seconds
    assert slow >= 0.004 * steps
    assert slow > 3 * max(stats.rows[0].env_seconds, stats.rows[1].env_seconds)
    groups = {"serial": [(0, 1, 2)], "parallel": [(0,), (1,), (2,)], "grouped": [(0, 1), (2,)]}[kind]
    assert [process.rows for process in stats.processes] == groups
    if kind != "serial":
        assert {process.pid for process in stats.processes} <= set(children())
    busiest = stats.processes[-1]
    assert busiest.busy_seconds >= 0.004 * steps
    assert busiest.commands == steps + 1
    for process in stats.processes:
        assert process.busy_seconds + process.waiting_seconds == pytest.approx(stats.seconds)
    assert stats.engine_seconds >= 0.004 * steps
    assert stats.face_seconds > 0.0
    assert stats.outside_seconds >= 0.1
    parts = stats.engine_seconds + stats.face_seconds + stats.outside_seconds
    assert parts == pytest.approx(stats.seconds)
    env.close()


@kinds
def test_it_prints_as_a_table_with_the_slowest_rows_first(kind: str) -> None:
    env = KINDS[kind](3, Slow, create_env_kwargs=[{"seconds": 0.0}, {"seconds": 0.004}, {"seconds": 0.0}])
    env.rollout(together.MEASURED_EVERY, break_when_any_done=False)
    text = str(env.stats())
    assert f"{together.MEASURED_EVERY + 1} commands" in text
    assert text.index("row 1 ") < min(text.rindex("row 0 "), text.rindex("row 2 "))
    assert "engine" in text
    assert "outside" in text
    env.close()


@kinds
def test_stats_of_an_environment_that_is_not_started_say_so(kind: str) -> None:
    env = KINDS[kind](2, Counter)
    env.rollout(2)
    env.close()
    with pytest.raises(RuntimeError, match="not started"):
        env.stats()


def test_it_costs_a_handful_of_clock_readings_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """What being always on costs: so many readings of a clock, some 50 ns each. benchmarks/PROFILE.md measures it."""
    readings = 0

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            nonlocal readings
            readings += 1
            return time.perf_counter()

        monotonic = time.monotonic
        sleep = time.sleep

    env = SerialEnv(64, functools.partial(Counter, 1000))  # a reset that a step brings costs two more
    td = env.rand_action(env.reset())
    for module in (together, rows, worker, batched, session):
        if hasattr(module, "time"):
            monkeypatch.setattr(module, "time", Clock)
    monkeypatch.setattr("shoal.engine.local.time", Clock)
    for _ in range(together.MEASURED_EVERY):
        _, td = env.step_and_maybe_reset(env.rand_action(td))
    a_step = readings / together.MEASURED_EVERY
    assert a_step < 12
    env.close()


class SlowReset(Slow):
    """Takes its time for a reset, and ends often."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 4

    def reset(self, **kwargs: Any) -> Any:
        time.sleep(0.004)
        return super().reset(**kwargs)


@kinds
def test_time_in_resets_that_a_step_brings_counts_once(kind: str) -> None:
    env = KINDS[kind](3, SlowReset)
    td = env.reset()
    for _ in range(16):
        _, td = env.step_and_maybe_reset(env.rand_action(td))
    for row in env.stats().rows:
        assert 5 * 0.004 <= row.env_seconds < 9 * 0.004
    env.close()


@kinds
def test_a_command_that_fails_has_taken_its_time(kind: str) -> None:
    """The time in the engine is a part of the time in the methods, whatever became of them."""
    ways = {
        "step": lambda env: [env.step(env.rand_action(env.reset())) for _ in range(3)],
        "long step": lambda env: [env.step(env.rand_action(env.reset()).refine_names("rows")) for _ in range(3)],
        "both": lambda env: [env.step_and_maybe_reset(env.rand_action(env.reset())) for _ in range(3)],
        "rollout": lambda env: env.rollout(5, break_when_any_done=False),
        "policy": lambda env: env.rollout(5, lambda td: td.set("action", env.action_spec.rand())),
    }
    for name, way in ways.items():
        env = KINDS[kind](2, SlowTrouble)
        env.reset()
        env.set_attr("seconds", 0.05)
        before = env.stats()
        with pytest.raises(RuntimeError, match="trouble"):
            way(env)
        meter = env.__dict__["_session"].meter
        assert meter.engine > 0.05, name
        assert meter.moving > meter.engine, name
        assert env.stats().face_seconds >= before.face_seconds, name
        env.close()


class SlowTrouble(Slow):
    """Raises in its first slow step."""

    def step(self, action: int) -> Any:
        result = super().step(action)
        if self.seconds:
            raise RuntimeError("trouble")
        return result
