"""torchrl factories: every engine gives what a plain loop over single environments gives, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import (
    Compose,
    EnvBase,
    RenameTransform,
    RewardSum,
    StepCounter,
    Transform,
    TransformedEnv,
)

from tests.differential.engines import ENGINES, ROWS, Case, assert_same_face, check, rows_of
from tests.differential.harness import (
    Auto,
    Playback,
    Reset,
    Rollout,
    Script,
    Seed,
    Step,
    assert_same,
    make_actions,
    stack,
)
from tests.zoo.torchrl_envs import (
    TORCHRL_ZOO,
    CountingEnv,
    DifferentiableEnv,
    Leaf,
    described,
)

MINE = ("serial", "grouped")
GROUPED = (
    "plain",
    "dtypes",
    "two_actions",
    "state",
    "done_only",
    "agents_done_alone",
    "agents_and_root_done",
    "two_teams",
    "batched_agents",
    "pendulum",
    "text_action",
    "text_batched",
    "tensorclass",
    "dynamic_text",
    "in_place",
    "recurrent",
    "gymnasium_info",
)
ONE_PROCESS_A_ROW = ("wide_done", "text", "transformed")

BY_MASK = frozenset({"partial reset by mask alone"})
UNTIL_ALL = frozenset({"rollout until all are done"})
PARTIAL_AUTO = frozenset({"partial auto-reset"})
EVERYTHING = frozenset({"everything"})

# scripts in which a single torchrl environment is no guide: its rollout cannot stop entry by entry where end signals
# are nested or wide, or where leaves are text; and where only nested levels have masks, its reset returns only them
NESTED_ENDS = ("wide_done", "agents_done_alone", "agents_and_root_done", "two_teams", "batched_agents", "text_batched")
SKIP = dict.fromkeys(NESTED_ENDS, UNTIL_ALL) | {"agents_done_alone": UNTIL_ALL | BY_MASK}
# what torchrl's SerialEnv gets wrong: see tests/zoo/README.md
SERIAL_SKIP = {
    "done_only": EVERYTHING,
    "terminated_only": EVERYTHING,
    "text_batched": EVERYTHING,
    "dynamic": UNTIL_ALL | {"partial step"} | PARTIAL_AUTO,
    "dynamic_alone": UNTIL_ALL | {"partial step"} | PARTIAL_AUTO,
    "dynamic_text": UNTIL_ALL | {"partial step"} | PARTIAL_AUTO,
}
TORCHRL_PARALLEL = ("nested", "state", "done_only", "agents_done_alone", "batched", "text", "transformed")


def _case(name: str) -> Case:
    zoo = TORCHRL_ZOO[name]
    return Case(
        rows_of(zoo),
        dynamic=zoo.dynamic,
        skip=SKIP.get(name, frozenset()),
        torchrl_skip={
            "SerialEnv": SERIAL_SKIP.get(name, frozenset()) | BY_MASK,
            "ParallelEnv": BY_MASK | PARTIAL_AUTO | {"preset next"},
        },
    )


CASES: dict[str, Case] = {name: _case(name) for name in TORCHRL_ZOO}

MULTI_TASK: dict[str, Case] = {
    "other lengths": Case(tuple(functools.partial(CountingEnv, max_steps=n) for n in (2, 3, 7))),
    "other shapes": Case(
        tuple(described(observations=(Leaf(("observation",), shape=(n,)),)) for n in (1, 2, 3)),
        dynamic=True,
        skip=UNTIL_ALL,
    ),
    "other keys": Case(
        tuple(
            described(observations=(Leaf(("shared",)), Leaf((colour, "own")))) for colour in ("red", "green", "blue")
        ),
        dynamic=True,
        skip=UNTIL_ALL,
    ),
    "other actions": Case(
        tuple(described(actions=(Leaf(("action",), shape=(n,)),)) for n in (1, 2, 3)), dynamic=True, skip=UNTIL_ALL
    ),
    "text in all rows": Case(
        tuple(
            described(observations=(Leaf(("observation",)), Leaf(("message",), "text")), shortest=n) for n in (2, 3, 4)
        ),
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


@pytest.mark.parametrize("name", ["agents_and_root_done", "text"])
def test_messages_give_what_buffers_give(name: str) -> None:
    check(name, CASES[name], ENGINES["messages"])


@pytest.mark.parametrize(("name", "engine"), pairs(MULTI_TASK, MINE))
def test_multi_task_engine_gives_what_a_plain_loop_gives(name: str, engine: str) -> None:
    check(name, MULTI_TASK[name], ENGINES[engine])


@pytest.mark.parametrize("name", [name for name in CASES if SERIAL_SKIP.get(name) != EVERYTHING])
def test_plain_loop_gives_what_torchrl_serial_gives(name: str) -> None:
    check(name, CASES[name], ENGINES["torchrl-serial"])


@pytest.mark.parametrize("name", TORCHRL_PARALLEL)
def test_plain_loop_gives_what_torchrl_parallel_gives(name: str) -> None:
    check(name, CASES[name], ENGINES["torchrl-parallel"])


@pytest.mark.parametrize("name", [name for name in CASES if name != "text_action"])
def test_specs_are_those_that_torchrl_gives(name: str) -> None:
    env = ENGINES["serial"].build(CASES[name])
    reference = ENGINES["torchrl-serial"].build(CASES[name])
    try:
        assert_same_face(reference, env)
    finally:
        env.close(raise_if_closed=False)
        reference.close(raise_if_closed=False)


@pytest.mark.parametrize("engine", MINE)
def test_reset_arguments_reach_every_row(engine: str) -> None:
    script: Script = [
        Seed(1),
        Reset(kwargs={"start": 7}),
        *[Auto()] * 3,
        Reset(list_of_kwargs=({"start": 1}, {}, {"start": 3})),
        Step(),
        Reset(kwargs={"start": 2}, list_of_kwargs=({}, {"start": 4}, {})),
        Step(),
        Reset((True, False, True), list_of_kwargs=({"start": 5}, {"start": 9}, {})),
        Step(),
    ]
    factory = functools.partial(CountingEnv, max_steps=100)
    check("counting", Case(rows_of(factory), scripts={"reset arguments": script}), ENGINES[engine])


@pytest.mark.parametrize("engine", MINE)
@pytest.mark.parametrize("name", ["recurrent", "primed"])
def test_recurrent_state_in_next_reaches_the_rows(name: str, engine: str) -> None:
    hidden = (("hidden", (2,)),)
    script: Script = [
        Seed(1),
        Reset(),
        Step(preset=hidden),
        Auto(preset=hidden),
        Auto(preset=(*hidden, ("other", (3,)))),
        *[Auto(preset=hidden)] * 3,
        Step((True, False, True), preset=hidden),
    ]
    check(name, Case(rows_of(TORCHRL_ZOO[name]), scripts={"recurrent": script}), ENGINES[engine])


@pytest.mark.parametrize("engine", MINE)
def test_masks_of_batched_rows(engine: str) -> None:
    """Masks that pick some entries of a row's own batch: the row is reset, and only those entries of it."""
    factory = TORCHRL_ZOO["batched"]
    env = ENGINES[engine].build(Case(rows_of(factory)))
    plain = [factory() for _ in range(ROWS)]
    actions = make_actions(rows_of(factory), 3)
    mask = torch.tensor([[True, False, False, True], [False] * 4, [True] * 4]).unsqueeze(-1)
    try:
        env.set_seed(5, static_seed=True)
        for single in plain:
            single.set_seed(5)
        root = env.reset()
        roots = [single.reset() for single in plain]
        assert_same(stack(roots), root)
        for action in actions:
            root = env.step_mdp(env.step(root.update(action)))
            roots = [
                single.step_mdp(single.step(row.update(action[index])))
                for index, (single, row) in enumerate(zip(plain, roots, strict=True))
            ]
        given = root.copy().set("_reset", mask)
        wanted = [
            single.reset(row.copy().set("_reset", mask[index])) if mask[index].any() else row
            for index, (single, row) in enumerate(zip(plain, roots, strict=True))
        ]
        assert_same(stack(wanted), env.reset(given))
    finally:
        env.close()


def _inside_and_outside(engine: str, factory: Any, transform: Any) -> tuple[EnvBase, EnvBase]:
    inside = ENGINES[engine].build(Case(rows_of(functools.partial(_transformed, factory, transform))))
    outside = TransformedEnv(ENGINES[engine].build(Case(rows_of(factory))), transform())
    return inside, outside


def _nonstop(env: EnvBase, factories: Any, steps: int) -> TensorDictBase:
    env.set_seed(4)
    return env.rollout(steps, Playback(make_actions(factories, steps)), break_when_any_done=False)


def _transformed(factory: Any, transform: Any) -> EnvBase:
    return TransformedEnv(factory(), transform())


def _count_and_sum() -> Transform:
    return Compose(StepCounter(max_steps=5), RewardSum())


def _count_agents() -> Transform:
    return StepCounter(max_steps=3)


def _rename() -> Transform:
    return RenameTransform(in_keys=["observation"], out_keys=[("inner", "position")])


@pytest.mark.parametrize("engine", MINE)
@pytest.mark.parametrize(
    ("name", "transform"),
    [
        ("counting", _count_and_sum),
        ("counting", _rename),
        ("plain", _count_and_sum),
        ("agents_done_alone", _count_agents),
        ("agents_root_done", _count_agents),
        ("batched", _count_and_sum),
        ("gymnasium", _count_and_sum),
    ],
)
def test_a_transform_gives_the_same_inside_and_outside(name: str, transform: Any, engine: str) -> None:
    inside, outside = _inside_and_outside(engine, TORCHRL_ZOO[name], transform)
    try:
        inner, outer = (_nonstop(env, rows_of(TORCHRL_ZOO[name]), 12) for env in (inside, outside))
        assert set(inner.keys(True, True)) == set(outer.keys(True, True))
        assert_same(inner, outer, sizes=False)
    finally:
        inside.close()
        outside.close()


def test_serial_lets_gradients_through() -> None:
    from shoal import SerialEnv

    actions = [torch.full((ROWS, 2), 0.1 * (index + 1), requires_grad=True) for index in range(3)]
    env = SerialEnv(ROWS, DifferentiableEnv)
    root = env.reset()
    total = torch.zeros(())
    for action in actions:
        root = env.step(root.set("action", action))
        total = total + root["next", "reward"].sum()
        root = env.step_mdp(root)
    gradients = torch.autograd.grad(total, actions)
    env.close()

    total = torch.zeros(())
    for row in range(ROWS):
        single = DifferentiableEnv()
        root = single.reset()
        for action in actions:
            root = single.step(root.set("action", action[row]))
            total = total + root["next", "reward"].sum()
            root = single.step_mdp(root)
    for gradient, wanted in zip(gradients, torch.autograd.grad(total, actions), strict=True):
        assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("engine", MINE)
def test_state_dicts_are_those_of_the_rows(engine: str) -> None:
    env = ENGINES[engine].build(Case(rows_of(TORCHRL_ZOO["counting"])))
    try:
        env.reset()
        root = env.reset(list_of_kwargs=[{"start": row} for row in range(ROWS)])
        saved = env.state_dict()
        assert list(saved) == ["worker0", "worker1", "worker2"]
        for row in range(ROWS):
            single = CountingEnv()
            single.reset(start=row)
            wanted = single.state_dict()
            assert list(saved[f"worker{row}"]) == list(wanted)
            assert all(torch.equal(saved[f"worker{row}"][key], wanted[key]) for key in wanted)
        action = make_actions(rows_of(TORCHRL_ZOO["counting"]), 1)[0]
        env.step(root.copy().update(action))
        env.load_state_dict(saved)
        again = env.step(root.copy().update(action))
        assert again["next", "observation"].flatten().tolist() == [1.0, 2.0, 3.0]
        env.load_state_dict(saved["worker1"])
        again = env.step(root.copy().update(action))
        assert again["next", "observation"].flatten().tolist() == [2.0, 2.0, 2.0]
    finally:
        env.close()


@pytest.mark.parametrize("engine", MINE)
def test_state_in_the_input_of_reset_reaches_the_rows(engine: str) -> None:
    """A stateless environment is given other parameters by the input of reset, row by row."""
    env = ENGINES[engine].build(Case(rows_of(TORCHRL_ZOO["pendulum"])))
    singles = [TORCHRL_ZOO["pendulum"]() for _ in range(ROWS)]

    def params(shape: tuple[int, ...], row: int | None = None) -> TensorDictBase:
        gravity = torch.tensor([5.0, 6.0, 7.0]) if row is None else torch.tensor(5.0 + row)
        inner = TensorDict({"gravity": gravity, "step_size": torch.full(shape, 0.1)}, batch_size=shape)
        return TensorDict({"params": inner}, batch_size=shape)

    try:
        env.set_seed(3, static_seed=True)
        for single in singles:
            single.set_seed(3)
        root = env.reset(params((ROWS,)))
        roots = [single.reset(params((), row)) for row, single in enumerate(singles)]
        assert_same(stack(roots), root)
        action = make_actions(rows_of(TORCHRL_ZOO["pendulum"]), 1)[0]
        wanted = [
            single.step(row.update(action[index]))
            for index, (single, row) in enumerate(zip(singles, roots, strict=True))
        ]
        assert_same(stack(wanted), env.step(root.update(action)))
    finally:
        env.close()


@pytest.mark.parametrize("engine", MINE)
def test_one_row_and_many_rows(engine: str) -> None:
    for count in (1, 2, 5):
        script: Script = [Seed(count), Reset(), *[Auto()] * 8, Reset((True,) * count), Step(), Rollout(4)]
        check(f"{count} rows", Case(rows_of(TORCHRL_ZOO["text"], count), scripts={"rows": script}), ENGINES[engine])


@pytest.mark.parametrize("engine", MINE)
def test_a_row_is_what_it_is_alone(engine: str) -> None:
    """``rollout(...)[i]`` of a multi-task batch is what row i alone gives, keys included."""
    case = MULTI_TASK["other keys"]
    env = ENGINES[engine].build(case)
    try:
        env.set_seed(2, static_seed=True)
        actions = make_actions(case.factories, 6)
        whole = env.rollout(6, Playback(actions), break_when_any_done=False, return_contiguous=False)
        for row, factory in enumerate(case.factories):
            single: EnvBase = factory()
            single.set_seed(2)
            alone = Playback([action[row] for action in actions])
            wanted = single.rollout(6, alone, break_when_any_done=False, return_contiguous=False)
            assert_same(wanted, whole[row], f"row {row}")
    finally:
        env.close()
