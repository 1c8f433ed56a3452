"""The batched engines under test, built the same way from the same factories, and the check they all must pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torchrl.envs
from tensordict import TensorDictBase
from torchrl.data import Composite
from torchrl.envs import EnvBase

from tests.differential.harness import (
    Auto,
    PlainLoop,
    Reset,
    Rollout,
    Script,
    Seed,
    Step,
    Trace,
    Wrapped,
    actions_needed,
    as_single,
    assert_same_traces,
    make_actions,
    rollout_values,
    root_keys,
)

Factory = Callable[..., Any]

ROWS = 3

SCRIPTS: dict[str, Script] = {
    "auto-reset": [Seed(3), Reset(), *[Auto()] * 10],
    "extra entries": [Seed(11), Reset(), *[Auto(extra=True)] * 4, *[Step(extra=True)] * 2],
    "partial reset": [
        Seed(3, static=True),
        Reset(),
        *[Step()] * 3,
        Reset((True, False, True)),
        Step(),
        Reset((False, True, False)),
        Auto(),
        Reset((True, True, True)),
        Auto(),
    ],
    "partial reset by mask alone": [Seed(5), Reset(), *[Step()] * 2, Reset((True, False, True), carry=False), Step()],
    "whole reset with input": [Seed(5), Reset(), Step(), Reset(whole=True), Step()],
    "partial step": [
        Seed(7),
        Reset(),
        Auto(),
        Step((False, True, True)),
        Step((True, True, True)),
        Step((False, False, False)),
        Step(),
        Reset(),
        Step((True, False, False)),
        Step(),
    ],
    "partial auto-reset": [Seed(7), Reset(), Auto(), Auto((True, False, True)), Auto((False, True, True)), Auto()],
    "preset next": [
        Seed(2),
        Reset(),
        Step(preset=(("carried", (2,)),)),
        Auto(preset=(("carried", (2,)), (("deep", "carried"), ()))),
        Auto(),
    ],
    "rollout": [Seed(3), Rollout(12), Rollout(4)],
    "rollout without a break": [Seed(3), Rollout(12, break_when_any_done=False), Reset(), Auto()],
    "rollout until all are done": [Seed(3), Rollout(12, break_when_any_done=False, break_when_all_done=True)],
    "rollout from here": [Seed(3), Reset(), Step(), Rollout(5, break_when_any_done=False, auto_reset=False)],
}
"""What every engine is driven through, each script on its own, for three rows."""


@dataclass(frozen=True, eq=False)
class Case:
    """A batch of environments to drive.

    Args:
        factories: one for each row.
        dynamic: some leaf has no fixed shape, so rollouts are not contiguous.
        skip: scripts that make no sense here: a plain torchrl environment fails in them too.
        torchrl_skip: for each torchrl class, the scripts in which it is known to be at fault (see the zoo's README).
        scripts: scripts to use instead of `SCRIPTS`.
    """

    factories: tuple[Factory, ...]
    dynamic: bool = False
    skip: frozenset[str] = frozenset()
    torchrl_skip: Mapping[str, frozenset[str]] = field(default_factory=dict)
    scripts: Mapping[str, Script] = field(default_factory=lambda: SCRIPTS)

    @property
    def create_env_fn(self) -> Factory | list[Factory]:
        """What a batched environment is given: one factory where all rows are the same task."""
        first = self.factories[0]
        return first if all(factory is first for factory in self.factories) else list(self.factories)


@dataclass(frozen=True)
class EngineKind:
    """One way to run a batch.

    Args:
        build: makes the batched environment from a case.
        torchrl: the name of torchrl's own class, if it is one: compared only in what torchrl promises.
    """

    build: Callable[[Case], EnvBase]
    torchrl: str = ""


def _shoal_serial(case: Case) -> EnvBase:
    from shoal import SerialEnv

    return SerialEnv(len(case.factories), case.create_env_fn)


def _shoal_parallel(case: Case, processes: int | None = None, **options: Any) -> EnvBase:
    from shoal import ParallelEnv

    rows = len(case.factories)
    if processes is not None:
        options["processes"] = min(processes, rows)
    return ParallelEnv(rows, case.create_env_fn, **options)


def _wrapped(case: Case) -> Factory | list[Factory]:
    factories = case.create_env_fn
    return [Wrapped(one) for one in factories] if isinstance(factories, list) else Wrapped(factories)


def _torchrl_serial(case: Case) -> EnvBase:
    return torchrl.envs.SerialEnv(len(case.factories), _wrapped(case))


def _torchrl_parallel(case: Case) -> EnvBase:
    # forked, because the reference takes 6 s and more to spawn
    return torchrl.envs.ParallelEnv(len(case.factories), _wrapped(case), mp_start_method="fork")


ENGINES: dict[str, EngineKind] = {
    "serial": EngineKind(_shoal_serial),
    "parallel": EngineKind(_shoal_parallel),
    "grouped": EngineKind(functools.partial(_shoal_parallel, processes=2)),
    "messages": EngineKind(functools.partial(_shoal_parallel, processes=2, use_buffers=False)),
    "torchrl-serial": EngineKind(_torchrl_serial, torchrl="SerialEnv"),
    "torchrl-parallel": EngineKind(_torchrl_parallel, torchrl="ParallelEnv"),
}


@functools.lru_cache(maxsize=4)
def _expected(case: Case) -> dict[str, Trace]:
    """The plain loop's traces of all scripts of a case, made once for all engines."""
    plain = PlainLoop(case.factories)
    try:
        return {
            name: rollout_values(plain, script, _actions(case), plain.envs[0], contiguous=not case.dynamic)
            for name, script in case.scripts.items()
            if name not in case.skip
        }
    finally:
        plain.close(raise_if_closed=False)


@functools.lru_cache(maxsize=4)
def _actions(case: Case) -> list[TensorDictBase]:
    """As many actions as the longest script of a case needs."""
    return make_actions(case.factories, max(actions_needed(script) for script in case.scripts.values()))


def check(name: str, case: Case, kind: EngineKind) -> None:
    """An engine gives what the plain loop gives, under every script, and never touches what it has returned.

    Args:
        name: the case's name.
        case: the batch.
        kind: the engine.

    Raises:
        AssertionError: listing every script that went wrong, with the command, key and rows that differ.
    """
    expected = _expected(case)
    avoid = case.torchrl_skip.get(kind.torchrl, frozenset()) if kind.torchrl else frozenset()
    specs = as_single(case.factories[0]())
    env = kind.build(case)
    wrong = []
    try:
        for script_name, trace in expected.items():
            if script_name in avoid:
                continue
            script = case.scripts[script_name]
            try:
                actual = rollout_values(env, script, _actions(case), specs, contiguous=not case.dynamic)
                assert_same_traces(trace, actual, only=root_keys(specs) if kind.torchrl else None)
                actual.assert_unmoved()
            except AssertionError as error:
                wrong.append(f"{script_name}: {error}")
            except Exception as error:
                wrong.append(f"{script_name}: {type(error).__name__}: {error}")
    finally:
        env.close(raise_if_closed=False)
        specs.close(raise_if_closed=False)
    assert not wrong, f"{name}, {len(wrong)} of {len(expected)} scripts:\n" + "\n".join(wrong)


def rows_of(factory: Factory, count: int = ROWS) -> tuple[Factory, ...]:
    """The same task in each row."""
    return (factory,) * count


def assert_same_specs(expected: Composite, actual: Composite) -> None:
    """Two trees of specs have the same keys, classes and shapes, and equal leaves.

    The device that a ``Composite`` itself carries is not compared: torchrl's classes set it even where the
    environment has none.
    """
    assert set(actual.keys(True)) == set(expected.keys(True))
    for key in expected.keys(True):
        left, right = expected[key], actual[key]
        assert type(left) is type(right), f"{key}: {type(left).__name__} and {type(right).__name__}"
        assert left.shape == right.shape, f"{key}: {left.shape} and {right.shape}"
        if not isinstance(left, Composite):
            assert left == right, f"{key}: {left} and {right}"
        else:
            assert left.data_cls is right.data_cls, f"{key}: {left.data_cls} and {right.data_cls}"


def assert_same_face(expected: EnvBase, actual: EnvBase) -> None:
    """Two batched environments declare the same."""
    assert_same_specs(expected.output_spec, actual.output_spec)
    assert_same_specs(expected.input_spec, actual.input_spec)
    for name in (
        "batch_size",
        "device",
        "batch_locked",
        "observation_keys",
        "action_keys",
        "reward_keys",
        "done_keys",
        "state_keys",
        "reset_keys",
    ):
        assert getattr(actual, name) == getattr(expected, name), name
