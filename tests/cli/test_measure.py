"""Measuring: what is opened, in which order, and what becomes of failures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from shoal.cli.configuration import Configuration, plan
from shoal.cli.failures import CommandError
from shoal.cli.interrupts import Interrupts
from shoal.cli.measure import Factory, Result, family_of, measure
from shoal.cli.progress import Progress
from tests.cli import support
from tests.support import Counter, Trouble

pytestmark = pytest.mark.usefixtures("nothing_left")


def measured(factory: Factory, configurations: list[Configuration], rounds: int = 1) -> list[Result]:
    return measure(
        factory,
        configurations,
        seconds=0.005,
        rounds=rounds,
        progress=Progress(None, 0),
        interrupts=Interrupts(),
    )


def test_every_way_gives_a_rate_for_all_its_rows_and_a_start_up() -> None:
    results = measured(Counter, plan([3], [2], 2))
    assert [each.status for each in results] == 4 * ["measured"]
    assert all(each.rate and each.startup_seconds is not None and len(each.rates) == 1 for each in results)


def test_rates_count_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cli.loops.Loop.run", lambda loop, seconds: 10.0)
    assert [each.rates for each in measured(Counter, plan([3], [1], 2))] == [[10.0], [30.0], [30.0], [30.0]]


def test_rounds_alternate_and_every_other_one_goes_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int | str] = []

    def run(factory: Factory, configuration: Configuration, seconds: float) -> tuple[float, float]:
        opened.append(configuration.rows)
        return len(opened), 1.0

    @contextlib.contextmanager
    def hold_templates() -> Iterator[None]:
        opened.append("hold")
        yield
        opened.append("let go")

    monkeypatch.setattr("shoal.cli.measure._run", run)
    monkeypatch.setattr("shoal.engine.launch.hold_templates", hold_templates)
    results = measured(Counter, [Configuration("loop", 1), *(Configuration("SerialEnv", rows) for rows in (2, 3))], 3)
    assert opened == [1, 2, 3, "hold", 3, 2, 1, 1, 2, 3, "let go"]
    assert [each.startup_seconds for each in results] == [1, 2, 3], "the start-up is that of the first round"


def test_the_rate_is_the_median_of_the_rounds() -> None:
    assert support.result("loop", 1, None, 1.0, 9.0, 2.0).rate == 2.0


def test_what_is_skipped_is_not_opened_and_says_why() -> None:
    skipped = Configuration("SerialEnv", 2, None, "for a reason")
    results = measured(Counter, [Configuration("loop", 1), skipped])
    assert (results[1].status, results[1].rates, results[1].reason) == ("skipped", [], "for a reason")


def test_a_configuration_that_fails_is_noted_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    results = measured(partial(Trouble, "exit", "step", 3), [Configuration("ParallelEnv", 2, 1)])
    assert "WorkerDied" in results[0].reason

    def no_processes(*_: object, **__: object) -> None:
        raise OSError("no processes here")

    monkeypatch.setattr("shoal.ParallelEnv", no_processes, raising=False)
    results = measured(Counter, plan([2, 4], [], 1))
    assert [each.status for each in results] == ["measured", "measured", "failed", "measured", "failed"]
    assert results[2].reason.startswith("OSError: no processes here (")


def test_a_configuration_that_failed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def run(factory: Factory, configuration: Configuration, seconds: float) -> tuple[float, float]:
        opened.append(configuration.rows)
        if configuration.rows == 2:
            raise ValueError("boom")
        return 1.0, 1.0

    monkeypatch.setattr("shoal.cli.measure._run", run)
    monkeypatch.setattr("shoal.engine.launch.hold_templates", contextlib.nullcontext)
    results = measured(Counter, [Configuration("loop", 1), Configuration("SerialEnv", 2)], 2)
    assert opened == [1, 2, 1]
    assert results[1].rate is None


def test_an_environment_whose_plain_loop_fails_ends_the_command() -> None:
    with pytest.raises(CommandError, match=r"the environment raised ValueError: boom \(.*support.py") as caught:
        measured(support.step_raises, plan([2], [1], 1))
    assert caught.value.code == 1


def test_an_environment_is_closed_also_where_it_raised(tmp_path: Path) -> None:
    log = tmp_path / "log"

    class Broken(Trouble):
        def __init__(self) -> None:
            super().__init__("raise", "step", 2)
            self.log = str(log)

        def close(self) -> None:
            self.note("close")

    with pytest.raises(CommandError):
        measured(Broken, [Configuration("loop", 1)])
    assert "close" in log.read_text()


@pytest.mark.parametrize(("factory", "family"), [(Counter, "gymnasium"), (support.torchrl_env, "torchrl")])
def test_families(factory: Factory, family: str) -> None:
    assert family_of(factory) == family


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (support.build_raises, r"the factory raised ValueError: boom \(.*support.py:\d+\)"),
        (support.exits, "the factory raised SystemExit: 4"),
        (support.with_argument, r"the factory raised TypeError: with_argument\(\) missing 1 required .*'length'$"),
        (support.no_environment, "the factory returned a dict, expected a gymnasium.Env or a torchrl EnvBase"),
        (partial(Trouble, "raise", "reset", 1), "the environment raised ValueError: boom"),
    ],
)
def test_a_factory_that_is_of_no_use_says_why(factory: Factory, message: str) -> None:
    with pytest.raises(CommandError, match=message) as caught:
        family_of(factory)
    assert caught.value.code == 1


def test_a_ctrl_c_that_a_library_swallowed_ends_the_measurement() -> None:
    interrupts = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        interrupts._take(2, None)
    with pytest.raises(KeyboardInterrupt):
        measure(
            Counter,
            [Configuration("loop", 1)],
            seconds=0.005,
            rounds=1,
            progress=Progress(None, 0),
            interrupts=interrupts,
        )
