"""An exception in one line."""

from __future__ import annotations

import os
from functools import partial

import gymnasium as gym
import pytest

from shoal import ParallelEnv, SerialEnv
from shoal.cli.failures import Failure
from shoal.cli.loops import loop_for
from shoal.engine.errors import WorkerTraceback
from tests.support import Trouble

SUPPORT = os.path.relpath(str(Trouble.trouble.__code__.co_filename))


def failure_of(act: partial[object]) -> Failure:
    try:
        act()
    except Exception as error:
        return Failure.of(error)
    raise AssertionError("nothing was raised")


def fails_with(message: str) -> None:
    raise ValueError(message)


def test_the_first_line_of_the_message_with_its_type_and_its_place() -> None:
    failure = failure_of(partial(fails_with, "boom\nand more"))
    line = fails_with.__code__.co_firstlineno + 1
    assert failure.text == f"ValueError: boom ({os.path.relpath(__file__)}:{line})"
    assert failure.trace.startswith("Traceback")
    assert "and more" in failure.trace


def test_an_exception_without_a_message_is_its_type() -> None:
    assert failure_of(partial(fails_with, "")).text.startswith("ValueError (")


def test_a_place_inside_shoal_is_left_out() -> None:
    assert failure_of(partial(loop_for, 3)).text.endswith("expected a gymnasium.Env or a torchrl EnvBase")


def test_where_several_rows_have_failed_the_place_is_that_of_the_first() -> None:
    trace = "in row {}, command 'step', process 1:\nTraceback:\n  File \"{}.py\", line {}, in step\n"
    error = ValueError("boom")
    error.__cause__ = WorkerTraceback(
        "\n" + "\n".join([trace.format(0, "/elsewhere/one", 1), trace.format(1, "two", 2)])
    )
    assert Failure.of(error).text == "ValueError: boom (/elsewhere/one.py:1)"


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_an_exception_of_a_row_has_the_row_what_it_did_and_the_place_in_the_environment(kind: type) -> None:
    env = kind(2, partial(Trouble, "raise", "step", 1))
    try:
        loop = loop_for(env)
        loop.prepare()
        failure = failure_of(partial(loop.run, 0.1))
    finally:
        env.close()
    assert failure.text.startswith(f"ValueError: boom (row 0, step_and_maybe_reset, {SUPPORT}:")
    assert "in trouble" in failure.trace


def test_an_environment_of_gymnasium_is_known() -> None:
    assert loop_for(gym.make("CartPole-v1")).family == "gymnasium"
