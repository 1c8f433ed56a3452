"""Random environments under random scripts: the serial and the parallel engine give what a plain loop gives.

The environments are two classes that take their whole shape as data (`SampledEnv`, `DescribedEnv`), so a failing
example is one line to paste into a test. Most examples run serially, which is cheap; a few start processes.
"""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any

import numpy as np
from gymnasium import spaces
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.differential.engines import ENGINES, ROWS, Case, check, rows_of
from tests.differential.harness import Auto, Command, Mask, Reset, Rollout, Script, Seed, Step
from tests.zoo.gymnasium_envs import SampledEnv
from tests.zoo.torchrl_envs import DescribedEnv, Description, Ends, Key, Leaf

FUZZING = "SHOAL_FUZZ" in os.environ  # `make fuzz`: other examples each time, for as long as asked

SERIAL = settings(
    max_examples=200 if FUZZING else 50,
    deadline=None,
    derandomize=not FUZZING,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
PARALLEL = settings(SERIAL, max_examples=40 if FUZZING else 5, phases=[Phase.explicit, Phase.generate])

# ------------------------------------------------------------------------------------------------------------ scripts

masks: st.SearchStrategy[Mask] = st.tuples(*[st.booleans()] * ROWS)
some: st.SearchStrategy[Mask] = masks.filter(any)


def _steps(auto: bool) -> st.SearchStrategy[list[Command]]:
    step = st.builds(Step, extra=st.booleans(), auto=st.just(auto))
    return st.lists(step, min_size=1, max_size=6).map(list)


def _presets() -> st.SearchStrategy[list[Command]]:
    keys = st.sampled_from([("carried", (2,)), (("policy", "state"), ()), (("deep", "down", "state"), (1, 2))])
    preset = st.lists(keys, min_size=1, max_size=2, unique_by=lambda pair: str(pair[0])).map(tuple)
    return st.builds(lambda one, auto: [Step(preset=one, auto=auto)], preset, st.booleans())


def segments(*, by_mask_alone: bool, until_all: bool, rollouts: bool) -> st.SearchStrategy[list[Command]]:
    """Commands that make sense wherever a root is at hand."""
    choices: list[st.SearchStrategy[list[Command]]] = [
        _steps(auto=True),
        _steps(auto=False),
        _presets(),
        st.builds(lambda rows: [Step(rows)], masks),
        st.builds(lambda rows: [Reset(rows)], some),
        st.just([Reset(whole=True)]),
        st.just([Reset()]),
        # a row that does not step must not be done: what then becomes of it is not for step_and_maybe_reset to say
        st.builds(lambda rows: [Reset(), Auto(rows)], some),
        st.builds(lambda seed: [Seed(seed), Reset()], st.integers(0, 2**31 - 1)),
        st.builds(lambda seed: [Seed(seed, static=True), Reset()], st.integers(0, 2**31 - 1)),
    ]
    if rollouts:
        choices.append(st.builds(lambda steps, stop: [Rollout(steps, stop), Reset()], st.integers(1, 8), st.booleans()))
    if by_mask_alone:
        choices.append(st.builds(lambda rows: [Reset(rows, carry=False)], some))
    if until_all and rollouts:
        choices.append(st.just([Rollout(8, False, True), Reset()]))
    return st.one_of(*choices)


@st.composite
def scripts(draw: st.DrawFn, *, by_mask_alone: bool = True, until_all: bool = True, rollouts: bool = True) -> Script:
    """A whole script: it seeds and resets first."""
    any_segment = segments(by_mask_alone=by_mask_alone, until_all=until_all, rollouts=rollouts)
    parts = draw(st.lists(any_segment, min_size=1, max_size=6))
    return [Seed(draw(st.integers(0, 2**31 - 1))), Reset(), *itertools.chain.from_iterable(parts)]


# --------------------------------------------------------------------------------------------------------- Gymnasium

shapes = st.sampled_from([(), (1,), (3,), (2, 3), (0,), (1, 1, 2)])
boxes = st.builds(
    lambda shape, dtype: spaces.Box(0, 9, shape, dtype),
    shapes,
    st.sampled_from([np.float32, np.float64, np.float16, np.uint8, np.int8, np.int32, np.int64]),
)
flat_spaces = st.one_of(
    boxes,
    st.builds(lambda n: spaces.Discrete(n), st.integers(1, 5)),
    st.builds(lambda nvec: spaces.MultiDiscrete(nvec), st.lists(st.integers(1, 4), min_size=1, max_size=3)),
    st.builds(lambda n: spaces.MultiBinary(n), st.integers(1, 4)),
)
names = st.sampled_from(["a", "b", "c", "left", "observation"])


def _dicts(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(names, inner, min_size=1, max_size=3).map(spaces.Dict)


observation_spaces = st.one_of(
    flat_spaces,
    _dicts(st.one_of(flat_spaces, st.just(spaces.Text(8, min_length=0)))),
    _dicts(st.one_of(flat_spaces, _dicts(flat_spaces))),
)
action_spaces = st.one_of(
    st.builds(
        lambda shape, dtype: spaces.Box(-2, 2, shape, dtype),
        st.sampled_from([(1,), (3,), (2, 2)]),
        st.sampled_from([np.float32, np.float64]),
    ),
    st.builds(lambda n: spaces.Discrete(n), st.integers(1, 5)),
    st.builds(lambda nvec: spaces.MultiDiscrete(nvec), st.lists(st.integers(2, 4), min_size=2, max_size=3)),
    st.builds(lambda n: spaces.MultiBinary(n), st.integers(2, 4)),
    st.builds(
        lambda n: spaces.Dict({"gear": spaces.Discrete(n), "steer": spaces.Box(-1, 1, (2,), np.float32)}),
        st.integers(2, 4),
    ),
)


@st.composite
def gymnasium_cases(draw: st.DrawFn) -> Case:
    """Three rows of one random Gymnasium environment, and a script."""
    factory = functools.partial(
        SampledEnv, draw(observation_spaces), draw(action_spaces), draw(st.integers(3, 6)), draw(st.booleans())
    )
    return Case(rows_of(factory), scripts={"script": draw(scripts())})


@SERIAL
@given(case=gymnasium_cases())
def test_serial_gives_what_a_plain_loop_gives_for_any_gymnasium_env(case: Case) -> None:
    check(str(case.factories[0]), case, ENGINES["serial"])


@PARALLEL
@given(case=gymnasium_cases())
def test_parallel_gives_what_a_plain_loop_gives_for_any_gymnasium_env(case: Case) -> None:
    check(str(case.factories[0]), case, ENGINES["grouped"])


# ------------------------------------------------------------------------------------------------------------ torchrl

dtypes = st.sampled_from(["float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64", "bfloat16"])
tails = st.sampled_from([(), (1,), (2,), (2, 3)])
end_names = st.sampled_from([("done",), ("terminated",), ("done", "terminated"), ("done", "terminated", "truncated")])
actions = st.sampled_from(
    [
        ("float32", (2,), "unbounded"),
        ("float64", (1,), "bounded"),
        ("int64", (), "categorical"),
        ("int64", (3,), "onehot"),
        ("int8", (4,), "binary"),
        ("bool", (3,), "onehot"),
    ]
)


@st.composite
def descriptions(draw: st.DrawFn) -> Description:
    """A random environment: where its leaves are, what they hold, how it ends, whether it is batched or has agents."""
    agents = draw(st.sampled_from([0, 0, 2, 3]))
    batch = draw(st.sampled_from([(), (), (2,), (1, 2)]))
    levels: list[Key] = [(), (), ("inner",), ("inner", "most")]
    if agents:
        levels += [("agents",), ("agents",)]

    def place(name: str, tail: tuple[int, ...]) -> tuple[Key, tuple[int, ...]]:
        level = draw(st.sampled_from(levels))
        return (*level, name), ((agents, *tail) if level == ("agents",) else tail)

    observations = []
    for index in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["tensor"] * 4 + (["text", "object", "dynamic"] if not batch else [])))
        if kind == "tensor":
            key, shape = place(f"observation{index}", draw(tails))
            observations.append(Leaf(key, draw(dtypes), shape))
        elif kind == "dynamic":
            observations.append(Leaf((f"observation{index}",), draw(dtypes), draw(st.sampled_from([(-1,), (-1, 2)]))))
        else:
            observations.append(Leaf((*draw(st.sampled_from(levels[:4])), f"observation{index}"), kind))
    played = []
    for index in range(draw(st.integers(1, 2))):
        dtype, tail, form = draw(actions)
        key, shape = place(f"action{index}", tail)
        played.append(Leaf(key, dtype, shape, form))
    rewards = []
    for index in range(draw(st.integers(1, 2))):
        key, shape = place(f"reward{index}", (1,))
        rewards.append(Leaf(key, draw(st.sampled_from(["float32", "float64"])), shape))
    able = [leaf.key for leaf in observations if leaf.is_tensor and -1 not in leaf.shape]
    states = tuple(draw(st.lists(st.sampled_from(able), max_size=2, unique=True))) if able else ()
    ends = [Ends(names=draw(end_names))]
    if agents:
        team = Ends(("agents",), (agents, 1), draw(end_names))
        ends = draw(st.sampled_from([ends, [team], [*ends, team]]))
    return Description(
        observations=tuple(observations),
        actions=tuple(played),
        rewards=tuple(rewards),
        states=states,
        ends=tuple(ends),
        levels=((("agents",), (agents,)),) if agents else (),
        batch=batch,
        shortest=draw(st.integers(1, 3)),
    )


@st.composite
def torchrl_cases(draw: st.DrawFn) -> Case:
    """Three rows of one random torchrl environment, and a script."""
    description = draw(descriptions())
    dynamic = any(-1 in leaf.shape for leaf in description.observations)
    nested = any(group.level for group in description.ends)
    rooted = any(not group.level for group in description.ends)
    # TensorDict cannot stack steps of which some are ragged in next alone, so neither can anyone's rollout
    script = draw(scripts(by_mask_alone=rooted, until_all=not nested, rollouts=not dynamic))
    return Case(rows_of(functools.partial(DescribedEnv, description)), dynamic=dynamic, scripts={"script": script})


@SERIAL
@given(case=torchrl_cases())
def test_serial_gives_what_a_plain_loop_gives_for_any_torchrl_env(case: Case) -> None:
    check(str(case.factories[0]), case, ENGINES["serial"])


@PARALLEL
@given(case=torchrl_cases())
def test_parallel_gives_what_a_plain_loop_gives_for_any_torchrl_env(case: Case) -> None:
    check(str(case.factories[0]), case, ENGINES["grouped"])
