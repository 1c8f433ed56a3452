"""Measures the configurations, one at a time, round after round."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import shoal
from shoal.cli.configuration import LOOP, SERIAL, Configuration
from shoal.cli.failures import FAILED, CommandError, Failure
from shoal.cli.interrupts import Interrupts
from shoal.cli.loops import loop_for
from shoal.cli.progress import Progress

WARM_UP_SECONDS = 0.2
"""At most; a single step where one takes longer."""

Factory = Callable[[], Any]


@dataclass
class Result:
    """What a configuration gave.

    Attributes:
        configuration: which one.
        rates: environment steps per second, one number a round.
        startup_seconds: from the constructor to the end of the first reset, in the first round.
        failure: why it failed; None where it did not.
    """

    configuration: Configuration
    rates: list[float] = field(default_factory=list)
    startup_seconds: float | None = None
    failure: Failure | None = None

    @property
    def rate(self) -> float | None:
        """Median over the rounds; None where it was skipped or failed."""
        return statistics.median(self.rates) if self.rates and self.failure is None else None

    @property
    def status(self) -> str:
        """``"measured"``, ``"skipped"`` or ``"failed"``."""
        if self.configuration.skipped:
            return "skipped"
        return "measured" if self.failure is None else "failed"

    @property
    def reason(self) -> str:
        """Why it was skipped or failed; empty where it was not."""
        return self.configuration.skipped if self.failure is None else self.failure.text


def family_of(factory: Factory) -> str:
    """Builds one environment to see what it is, ``"gymnasium"`` or ``"torchrl"``, and that it can be built at all.

    Raises:
        CommandError: the factory raised, or returned something else.
    """
    try:
        env = factory()
    except (Exception, SystemExit) as error:
        failure = Failure.of(error)
        raise CommandError(f"the factory raised {failure.text}", FAILED, failure)
    try:
        with _closing(env):
            return loop_for(env).family
    except CommandError:
        raise
    except (Exception, SystemExit) as error:
        failure = Failure.of(error)
        raise CommandError(f"the environment raised {failure.text}", FAILED, failure)


def measure(
    factory: Factory,
    configurations: Sequence[Configuration],
    *,
    seconds: float,
    rounds: int,
    progress: Progress,
    interrupts: Interrupts,
) -> list[Result]:
    """Measures each configuration once a round; every other round goes backwards.

    One is open at a time, so that a batch has the machine and its memory to itself, as it will have later. The first
    round's start-up is that of a program on its own; from the second round on, the processes that workers are forked
    from are kept, to save time. A configuration that fails is not tried again.

    Args:
        factory: builds one environment.
        configurations: what to measure, the plain loop first.
        seconds: how long each is stepped in a round, after a warm-up.
        rounds: how many there are.
        progress: is told.
        interrupts: are asked about Ctrl-C before each measurement.

    Raises:
        CommandError: the plain loop fails in the first round: nothing else could do better.
    """
    import_module("shoal.envs")  # with torchrl: that is no part of the first start-up
    from shoal.engine.launch import hold_templates

    results = [Result(configuration) for configuration in configurations]
    with ExitStack() as stack:
        for turn in range(rounds):
            if turn == 1:
                stack.enter_context(hold_templates())
            for result in results if turn % 2 == 0 else results[::-1]:
                interrupts.check()
                if result.status == "measured":
                    _measure_once(factory, result, seconds, progress, turn)
    return results


def _measure_once(factory: Factory, result: Result, seconds: float, progress: Progress, turn: int) -> None:
    label = result.configuration.label
    progress.begin(label)
    try:
        startup, rate = _run(factory, result.configuration, seconds)
    except (Exception, SystemExit) as error:
        result.failure = Failure.of(error)
        progress.end(label, f"failed: {result.failure.text}")
        if result.configuration.engine == LOOP and turn == 0:
            raise CommandError(f"the environment raised {result.failure.text}", FAILED, result.failure)
        return
    finally:
        gc.collect()
    result.rates.append(rate)
    if turn == 0:
        result.startup_seconds = startup
    progress.end(label, f"{rate:,.0f} steps/s")


def _run(factory: Factory, configuration: Configuration, seconds: float) -> tuple[float, float]:
    """Seconds to start, and steps per second."""
    start = time.perf_counter()
    env = _build(factory, configuration)
    with _closing(env):
        loop = loop_for(env)
        startup = time.perf_counter() - start
        loop.prepare()
        loop.run(min(seconds, WARM_UP_SECONDS))
        rate = configuration.rows * loop.run(seconds)
    return startup, rate


@contextmanager
def _closing(env: Any) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(Exception):  # the first exception is the one to tell of
            env.close()
        raise
    env.close()


def _build(factory: Factory, configuration: Configuration) -> Any:
    if configuration.engine == LOOP:
        return factory()
    if configuration.engine == SERIAL:
        return shoal.SerialEnv(configuration.rows, factory)
    return shoal.ParallelEnv(configuration.rows, factory, processes=configuration.processes)
