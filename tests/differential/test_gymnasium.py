"""Gymnasium factories: every engine gives what a plain loop over torchrl's ``GymWrapper`` gives, bit for bit."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium import spaces

from shoal.engine import launch
from tests.differential.engines import ENGINES, Case, assert_same_face, check, rows_of
from tests.differential.harness import Auto, Reset, Script, Seed, Step, as_single, make_actions, rollout_values
from tests.zoo.gymnasium_envs import GYM_ZOO, CountingEnv, SampledEnv

MINE = ("serial", "grouped")
GROUPED = (
    "box_float32",
    "box_float16",
    "box_uint8",
    "box_int64",
    "box_0d",
    "box_empty",
    "discrete",
    "multidiscrete_unequal",
    "multibinary",
    "dict",
    "dict_state",
    "tuple_in_dict",
    "text",
    "sequence",
    "pixels",
    "action_box_float64",
    "action_discrete",
    "action_multidiscrete_unequal",
    "action_dict",
    "action_tuple",
    "action_masked",
    "in_place_dict",
    "both_ends",
    "vector_reward",
    "slow",
    "reward_nan",
    "one_step_episodes",
)
ONE_PROCESS_A_ROW = ("box_float32", "dict_nested", "text_in_dict", "action_dict", "sequence_in_dict", "in_place")
TORCHRL_PARALLEL = ("box_float64", "dict_nested", "multidiscrete_unequal", "text_in_dict", "both_ends")

BY_MASK = frozenset({"partial reset by mask alone"})
TORCHRL_SKIP = {"SerialEnv": BY_MASK, "ParallelEnv": BY_MASK | {"preset next", "partial auto-reset"}}
TORCHRL_SKIP_DYNAMIC = {"SerialEnv": BY_MASK | {"partial step", "partial auto-reset", "rollout until all are done"}}

CASES: dict[str, Case] = {
    name: Case(rows_of(case), dynamic=case.dynamic, torchrl_skip=TORCHRL_SKIP_DYNAMIC if case.dynamic else TORCHRL_SKIP)
    for name, case in GYM_ZOO.items()
    if not case.wrapper_fault
}


def _box(shape: tuple[int, ...], dtype: type) -> spaces.Box:
    return spaces.Box(-1.0, 1.0, shape, dtype)


MULTI_TASK: dict[str, Case] = {
    "other lengths": Case(tuple(functools.partial(CountingEnv, max_steps=n) for n in (2, 3, 7))),
    "other shapes": Case(
        tuple(functools.partial(SampledEnv, _box((n,), np.float32)) for n in (1, 2, 3)),
        dynamic=True,
        skip=frozenset({"rollout until all are done"}),
    ),
    "other keys": Case(
        tuple(
            functools.partial(SampledEnv, spaces.Dict({"shared": _box((2,), np.float32), key: _box((1,), np.float32)}))
            for key in ("red", "green", "blue")
        ),
        dynamic=True,
        skip=frozenset({"rollout until all are done"}),
    ),
}


def pairs(cases: Iterable[str], engines: tuple[str, ...]) -> list[Any]:
    """Test parameters: the engines of one case next to each other, so that the oracle runs once."""
    return [pytest.param(name, engine, id=f"{name}-{engine}") for name in cases for engine in engines]


@pytest.mark.parametrize(
    ("name", "engine"), [pair for name in CASES for pair in pairs([name], MINE if name in GROUPED else ("serial",))]
)
def test_engine_gives_what_a_plain_loop_gives(name: str, engine: str) -> None:
    check(name, CASES[name], ENGINES[engine])


@pytest.mark.parametrize("name", ONE_PROCESS_A_ROW)
def test_one_process_a_row_gives_what_a_plain_loop_gives(name: str) -> None:
    check(name, CASES[name], ENGINES["parallel"])


@pytest.mark.parametrize(("name", "engine"), pairs(MULTI_TASK, MINE))
def test_multi_task_engine_gives_what_a_plain_loop_gives(name: str, engine: str) -> None:
    check(name, MULTI_TASK[name], ENGINES[engine])


@pytest.mark.parametrize("name", CASES)
def test_plain_loop_gives_what_torchrl_serial_gives(name: str) -> None:
    check(name, CASES[name], ENGINES["torchrl-serial"])


@pytest.mark.parametrize("name", TORCHRL_PARALLEL)
def test_plain_loop_gives_what_torchrl_parallel_gives(name: str) -> None:
    check(name, CASES[name], ENGINES["torchrl-parallel"])


@pytest.mark.parametrize("name", ["box_float32", "dict_nested", "text_in_dict", "multidiscrete_equal"])
def test_messages_give_what_buffers_give(name: str) -> None:
    check(name, CASES[name], ENGINES["messages"])


@pytest.mark.parametrize("engine", MINE)
def test_reset_arguments_reach_every_row(engine: str) -> None:
    script: Script = [
        Seed(1),
        Reset(kwargs={"options": {"start": 7}}),
        *[Auto()] * 3,
        Reset(list_of_kwargs=({"options": {"start": 1}}, {}, {"options": {"start": 3}})),
        Step(),
        Reset(kwargs={"options": {"start": 2}}, list_of_kwargs=({}, {"options": {"start": 4}}, {})),
        Step(),
        Reset((True, False, True), list_of_kwargs=({"options": {"start": 5}}, {"options": {"start": 9}}, {})),
        Step(),
        Reset(kwargs={"seed": 5}),
        Step(),
    ]
    for name in ("counting", "box_float32"):
        check(name, Case(rows_of(GYM_ZOO[name]), scripts={"reset arguments": script}), ENGINES[engine])


@pytest.mark.parametrize("engine", MINE)
def test_one_row_and_many_rows(engine: str) -> None:
    for count in (1, 2, 7):
        script: Script = [Seed(count), Reset(), *[Auto()] * 8, Reset((True,) * count), Step()]
        check(f"{count} rows", Case(rows_of(GYM_ZOO["dict"], count), scripts={"rows": script}), ENGINES[engine])


@pytest.mark.parametrize("name", CASES)
def test_specs_are_those_of_the_wrapped_envs(name: str) -> None:
    env = ENGINES["serial"].build(CASES[name])
    reference = ENGINES["torchrl-serial"].build(CASES[name])
    try:
        assert_same_face(reference, env)
    finally:
        env.close(raise_if_closed=False)
        reference.close(raise_if_closed=False)


@pytest.mark.parametrize("engine", MINE)
@pytest.mark.parametrize("kind", [int, np.int64, np.int32, np.uint32])
def test_any_integer_seeds(engine: str, kind: type) -> None:
    script: Script = [Seed(kind(17)), Reset(), Auto()]
    check("seeds", Case(rows_of(GYM_ZOO["box_float32"]), scripts={"seed": script}), ENGINES[engine])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["dict", "text"])
def test_no_script_makes_a_worker_import_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_held", None)  # the template that tests share has imported torch for others
    case = CASES[name]
    others = set(psutil.Process().children(recursive=True))
    env = ENGINES["grouped"].build(case)
    specs = as_single(case.factories[0]())
    actions = make_actions(case.factories, 30)
    guilty = []
    try:
        for script_name, script in case.scripts.items():
            rollout_values(env, script, actions, specs)
            workers = set(psutil.Process().children(recursive=True)) - others
            if any("libtorch" in Path(f"/proc/{worker.pid}/maps").read_text() for worker in workers):
                guilty.append(script_name)
                break
    finally:
        env.close()
    assert not guilty, f"torch was imported by a worker during {guilty}"
