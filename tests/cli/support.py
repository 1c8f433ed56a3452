"""What the tests of the command line share: results without measuring, and factories that a target can name."""

from __future__ import annotations

import signal
import sys
from functools import partial
from typing import Any

from shoal.cli.configuration import LOOP, PARALLEL, SERIAL, Configuration
from shoal.cli.failures import Failure
from shoal.cli.measure import Result
from shoal.cli.target import Target
from tests.support import Counter, Trouble

TARGET = Target("my_envs:make_env", Counter, ("from my_envs import make_env",), "make_env")

value = 3
step_raises = partial(Trouble, "raise", "step", 2)
build_raises = partial(Trouble, "raise", "build")
exits = partial(sys.exit, 4)


class Nest:
    """Holds a factory one attribute further down."""

    make = Counter


def no_environment() -> dict[str, int]:
    return {}


def with_argument(length: int) -> Counter:
    return Counter(length)


def swallows_ctrl_c() -> None:
    """Does what extension modules do to a Ctrl-C that comes while they are imported."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("initialization failed") from None


def torchrl_env() -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(Counter())


def result(
    engine: str, rows: int, processes: int | None, *rates: float, failure: str = "", skipped: str = ""
) -> Result:
    """A result as `measure` would give it."""
    return Result(
        Configuration(engine, rows, processes, skipped),
        list(rates),
        startup_seconds=0.25 if rates else None,
        failure=Failure(failure, f"Traceback of {failure}\n") if failure else None,
    )


def results() -> list[Result]:
    """Eight rows of which one configuration failed, and 128 of which one was skipped."""
    return [
        result(LOOP, 1, None, 10_000.0, 9_000.0, 11_000.0),
        result(SERIAL, 8, None, 4_000.0, 5_000.0, 6_000.0),
        result(PARALLEL, 8, 2, 51_000.0, 50_000.0, 90_000.0),
        result(PARALLEL, 8, 4, failure="ValueError: boom"),
        result(PARALLEL, 8, 8, 17_000.0, 17_000.0, 17_000.0),
        result(SERIAL, 128, None, 4_500.0, 4_500.0, 4_500.0),
        result(PARALLEL, 128, 128, skipped="over 64 processes"),
    ]
