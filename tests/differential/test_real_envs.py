"""Environments that people train on: every engine gives what a plain loop gives, and what torchrl gives."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import pytest
from torchrl.envs import DMControlEnv, EnvBase, GymEnv, GymWrapper, StepCounter, TransformedEnv

from tests.differential.engines import ENGINES, Case, check, rows_of
from tests.differential.harness import Auto, Reset, Rollout, Script, Seed, Step
from tests.zoo.gymnasium_envs import GYM_ZOO

SCRIPTS: dict[str, Script] = {
    "thirty steps": [Seed(42), Reset(), *[Auto()] * 30, Reset((True, False, True)), *[Auto()] * 3],
    "one seed": [Seed(7, static=True), Reset(), *[Step()] * 2, Step((False, True, False)), Reset(), Auto()],
    "rollouts": [Seed(1), Rollout(15, break_when_any_done=False), Rollout(15)],
}


def humanoid() -> EnvBase:
    """dm_control's humanoid, asked to stand, cut after 5 steps."""
    return TransformedEnv(DMControlEnv("humanoid", "stand"), StepCounter(max_steps=5))


def gym_env(name: str, steps: int) -> EnvBase:
    """A registered environment through torchrl's ``GymEnv``."""
    return GymEnv(name, max_episode_steps=steps)


def torchrl_cartpole() -> EnvBase:
    """What a Gymnasium factory is promised to equal."""
    return GymWrapper(gymnasium.make("CartPole-v1", max_episode_steps=9))


def _make(name: str, steps: int) -> functools.partial[Any]:
    return functools.partial(gymnasium.make, name, max_episode_steps=steps)


def _case(factory: Any) -> Case:
    return Case(rows_of(factory), scripts=SCRIPTS)


CASES: dict[str, Case] = {
    "CartPole-v1": _case(_make("CartPole-v1", 9)),
    "Pendulum-v1": _case(_make("Pendulum-v1", 7)),
    "Acrobot-v1": _case(_make("Acrobot-v1", 11)),
    "MountainCarContinuous-v0": _case(_make("MountainCarContinuous-v0", 8)),
    "FrozenLake-v1": _case(_make("FrozenLake-v1", 12)),
    "HalfCheetah-v5": _case(_make("HalfCheetah-v5", 6)),
    "Hopper-v5": _case(_make("Hopper-v5", 20)),
    "pixels": _case(GYM_ZOO["pixels"]),
    "dict": _case(GYM_ZOO["dict"]),
}

TORCHRL_CASES: dict[str, Case] = {
    "CartPole-v1 in GymWrapper": _case(torchrl_cartpole),
    "Pendulum-v1 in GymEnv": _case(functools.partial(gym_env, "Pendulum-v1", 7)),
    "HalfCheetah-v5 in GymEnv": _case(functools.partial(gym_env, "HalfCheetah-v5", 6)),
    "humanoid": _case(humanoid),
}


@pytest.mark.parametrize("engine", ["serial", "grouped"])
@pytest.mark.parametrize("name", CASES)
def test_gymnasium_env_gives_what_a_plain_loop_gives(name: str, engine: str) -> None:
    check(name, CASES[name], ENGINES[engine])


@pytest.mark.parametrize("name", ["CartPole-v1", "HalfCheetah-v5"])
def test_one_process_a_row_gives_what_a_plain_loop_gives(name: str) -> None:
    check(name, CASES[name], ENGINES["parallel"])


@pytest.mark.parametrize("engine", ["serial", "grouped"])
@pytest.mark.parametrize("name", TORCHRL_CASES)
def test_torchrl_env_gives_what_a_plain_loop_gives(name: str, engine: str) -> None:
    check(name, TORCHRL_CASES[name], ENGINES[engine])


@pytest.mark.parametrize("name", [*CASES, *TORCHRL_CASES])
def test_plain_loop_gives_what_torchrl_serial_gives(name: str) -> None:
    check(name, (CASES | TORCHRL_CASES)[name], ENGINES["torchrl-serial"])


@pytest.mark.parametrize("name", ["CartPole-v1", "HalfCheetah-v5", "pixels", "humanoid"])
def test_plain_loop_gives_what_torchrl_parallel_gives(name: str) -> None:
    check(name, (CASES | TORCHRL_CASES)[name], ENGINES["torchrl-parallel"])
