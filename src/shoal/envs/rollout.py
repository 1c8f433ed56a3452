"""Rollouts, each step of which is written to its final place instead of stacked at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torchrl.data import Binary, Categorical, Composite, OneHot
from torchrl.data.tensor_specs import BoundedContinuous, BoundedDiscrete
from torchrl.envs.utils import _terminated_or_truncated

from shoal.engine.pool import Pool
from shoal.engine.protocol import Opcode
from shoal.engine.schema import ACTION, DONE, INPUT, NEXT, ROOT
from shoal.envs.plain import PlainWay
from shoal.envs.results import Results
from shoal.envs.session import Session

_MOST_UNUSED = 1 << 30
"""Bytes that a rollout may set aside for steps that it may not come to. The system gives memory when it is touched."""

_IN_SEQUENCE = frozenset({Binary, BoundedContinuous, BoundedDiscrete, Categorical, OneHot})
"""Specs whose draws of many values are those of few values in a row."""

Policy = Callable[[TensorDictBase], TensorDictBase]


def in_place(session: Session, results: Results, root: TensorDictBase, at_most: int = 0) -> bool:
    """Whether steps from this root can be written in place: plain TensorDicts of flat leaves that all lie in buffers,
    and rows that are done as a whole; and if it is not known how many steps of ``at_most`` there will be, room for
    all of them that does not ask too much."""
    way = results.plain
    if way is None or not results.whole_rows or session.closed or type(root) is not TensorDict or root._has_names():
        return False
    return at_most * sum(buffer.nbytes for area in (ROOT, NEXT) for _, buffer in way.leaves[area]) <= _MOST_UNUSED


def draws_in_place(session: Session, results: Results, root: TensorDictBase) -> bool:
    """Whether, besides, random actions are all that there is to a step: it reads nothing else, and the root has nothing
    else than what the rows give."""
    way = results.plain
    return (
        way is not None
        and in_place(session, results, root)
        and all(leaf.role == ACTION for leaf in session.rows[0].schema.by_area[INPUT].values())
        and set(root.keys()) == {name for name, _ in way.leaves[ROOT]}
    )


def random_rollout(env: Any, way: PlainWay, root: TensorDictBase, steps: int) -> TensorDictBase:
    """What torchrl's ``rollout`` gives with random actions and without a break.

    Args:
        env: draws the actions.
        way: of its rows; `draws_in_place` has said yes.
        root: what the first step starts from.
        steps: how many steps.

    Returns:
        TensorDict of shape ``[N, steps]``.
    """
    session = way.session
    schema = session.rows[0].schema
    roots = {name: _room(value, steps) for name, value in root.items()}
    following = {name: _room(buffer, steps) for name, buffer in way.leaves[NEXT]}
    actions: dict[str, Any] = {}
    for name, value in root.items():
        roots[name][:, 0] = value
    # What a row starts from after a step is never done: those columns are zeros from the start.
    moving = [
        (roots[name].unbind(1), following[name].unbind(1), buffer)
        for name, buffer in way.leaves[ROOT]
        if schema.by_area[ROOT][name,].role != DONE
    ]
    flags = [name for name in roots if schema.by_area[ROOT][name,].role == DONE]
    for name in flags:
        roots[name][:, 1:] = False
    columns = [(following[name].unbind(1), buffer) for name, buffer in way.leaves[NEXT]]
    fresh = session.engine.fresh
    spec = env.input_spec["full_action_spec"]
    # Where rows run in this process, one of them may draw from the same generator between two steps.
    draws = _all_draws(spec, steps) if isinstance(session.engine, Pool) else None
    if draws is not None:
        actions = {name: value.transpose(0, 1).contiguous() for name, value in draws.items()}
        each = draws.unbind(0)
    for step in range(steps):
        action = spec.rand() if draws is None else each[step]
        if not way.write_input(action):
            raise RuntimeError(f"the action spec draws what does not fit the action's leaf: {action}")
        if draws is None:
            for name, value in action.items():
                if step == 0:
                    actions[name] = _room(value, steps)
                actions[name][:, step] = value
        last = step == steps - 1
        session.run(Opcode.STEP if last else Opcode.STEP_AND_MAYBE_RESET)
        for column, buffer in columns:
            column[step].copy_(buffer)
        if last:
            break
        reset = torch.from_numpy(fresh.nonzero()[0]) if fresh.any() else None
        for target, source, buffer in moving:
            target[step + 1].copy_(source[step])
            if reset is not None:
                target[step + 1][reset] = buffer[reset]
    size = torch.Size([root.batch_size[0], steps])
    return _whole(TensorDict._new_unsafe(source={**roots, **actions}, batch_size=size, device=env.device), following)


def _all_draws(spec: Composite, steps: int) -> TensorDictBase | None:
    """Actions for all steps, ``[steps, N]``: what so many draws in a row give, from the same state of the generator to
    the same state, for a fiftieth of their cost. None where a spec draws in another order, or in an unknown way."""
    leaves = list(spec.values(True, True))
    if len(leaves) != 1:  # several would be drawn one after the other, not step by step
        return None
    if type(leaves[0]) not in _IN_SEQUENCE or getattr(leaves[0], "mask", None) is not None:
        return None
    draws: TensorDictBase = spec.expand(steps, *spec.shape).rand()
    return draws


def policy_rollout(
    env: Any, way: PlainWay, root: TensorDictBase, policy: Policy, steps: int, until_done: bool, contiguous: bool
) -> TensorDictBase:
    """What torchrl's ``rollout`` gives with a policy.

    What the policy writes may be anything. As long as it is tensors of the same names, shapes and dtypes, each step is
    written in place; from the first step on where it is not, steps are gathered and stacked.

    Args:
        env: steps where the short way ends.
        way: of its rows; `in_place` has said yes.
        root: what the first step starts from.
        policy: gives each root its action; as torchrl has wrapped it.
        steps: how many steps.
        until_done: whether a row that is done ends it; else such rows are reset.
        contiguous: whether steps that do not stack are an error.

    Returns:
        TensorDict of shape ``[N, steps]``, of fewer steps if a row was done.
    """
    session, clock = way.session, time.perf_counter
    form: _Form | None = None
    record: _Record | None = None
    for step in range(steps):
        root.update(policy(root))
        start = clock()
        form = form or _Form.of(root)
        leaves = None if form is None else form.values(root)
        if leaves is None or not way.write_input(root):
            before = [] if record is None else record.so_far(step)
            return _gathered(env, before, root, policy, steps, until_done, contiguous)
        record = record or _Record(way, root, steps)
        last = step == steps - 1
        took: list[float] = []
        opcode = Opcode.STEP if last or until_done else Opcode.STEP_AND_MAYBE_RESET
        try:
            session.run(opcode, meanwhile=partial(record.write_root, step, leaves, took))
            if took:
                session.meter.engine -= took[0]  # not the engine's, though done in its time
            else:
                record.write_root(step, leaves, took)
            record.write_next(step)
            if until_done and way.any_done():
                return record.whole(step + 1)
            if not last:
                root = way.root_after(root, resets=not until_done)
        finally:
            session.meter.moving += clock() - start
    assert record is not None
    return record.whole(steps)


def _gathered(
    env: Any,
    before: list[TensorDictBase],
    root: TensorDictBase,
    policy: Policy,
    steps: int,
    until_done: bool,
    contiguous: bool,
) -> TensorDictBase:
    """The rest of a rollout, from a root that has its action, gathered and stacked like torchrl does."""
    gathered = before
    while True:
        if until_done or len(gathered) == steps - 1:
            stepped = env.step(root)
            root = env.step_mdp(stepped)
        else:
            stepped, root = env.step_and_maybe_reset(root)
        gathered.append(stepped)
        ended = until_done and _terminated_or_truncated(root, env.output_spec["full_done_spec"], key=None)
        if ended or len(gathered) == steps:
            break
        root.update(policy(root))
    stack = torch.stack if contiguous else LazyStackedTensorDict.maybe_dense_stack
    result: TensorDictBase = stack(gathered, len(env.batch_size))
    result.refine_names(..., "time")
    return result


class _Record:
    """The steps of a rollout, each in its place.

    Args:
        way: of the rows.
        root: the first step's root, with all that the policy has written.
        steps: how many steps there will be.
    """

    def __init__(self, way: PlainWay, root: TensorDictBase, steps: int) -> None:
        self._roots = _rooms(root, steps)
        self._next = {name: _room(buffer, steps) for name, buffer in way.leaves[NEXT]}
        rooms = _Form(self._roots).values(self._roots)
        assert rooms is not None
        self._root_columns = [value.unbind(1) for value in rooms]
        self._next_columns = [(self._next[name].unbind(1), buffer) for name, buffer in way.leaves[NEXT]]

    def write_root(self, step: int, leaves: list[torch.Tensor], took: list[float]) -> None:
        """Writes the values of a step's root; ``took`` gets the seconds of that."""
        start = time.perf_counter()
        for column, value in zip(self._root_columns, leaves, strict=True):
            column[step].copy_(value)
        took.append(time.perf_counter() - start)

    def write_next(self, step: int) -> None:
        """Writes what the rows have given."""
        for column, buffer in self._next_columns:
            column[step].copy_(buffer)

    def so_far(self, steps: int) -> list[TensorDictBase]:
        """The first steps, one by one."""
        whole = _whole(self._roots, self._next)
        return [whole[:, step] for step in range(steps)]

    def whole(self, steps: int) -> TensorDictBase:
        """So many steps as one TensorDict."""
        whole = _whole(self._roots, self._next)
        return whole if steps == whole.shape[1] else whole[:, :steps].contiguous()


def _whole(roots: TensorDictBase, following: dict[str, torch.Tensor]) -> TensorDictBase:
    size, device = roots.batch_size, roots.device
    roots._tensordict["next"] = TensorDict._new_unsafe(source=following, batch_size=size, device=device, nested=False)
    roots.refine_names(..., "time")
    return roots


class _Form:
    """Names, shapes and dtypes of what a TensorDict holds.

    Args:
        node: the TensorDict; `of` has seen that it is plain.
    """

    def __init__(self, node: TensorDictBase) -> None:
        self._batch_size = node.batch_size
        self._leaves: list[tuple[str, torch.Size, torch.dtype]] = []
        self._nodes: list[tuple[str, _Form]] = []
        for name, value in node._tensordict.items():
            if type(value) is torch.Tensor:
                self._leaves.append((name, value.shape, value.dtype))
            else:
                self._nodes.append((name, _Form(value)))

    @classmethod
    def of(cls, node: TensorDictBase) -> _Form | None:
        """The form of a TensorDict with nothing in it but TensorDicts and tensors, dimensions without names; None for
        others."""
        tree = [node]
        while tree:
            part = tree.pop()
            if type(part) is not TensorDict or part._has_names():
                return None
            tree.extend(value for value in part._tensordict.values() if type(value) is not torch.Tensor)
        return cls(node)

    def values(self, node: TensorDictBase) -> list[torch.Tensor] | None:
        """The tensors of a TensorDict of this form, without gradients and on the CPU, always in the same order; None if
        it is not so."""
        if type(node) is not TensorDict or node.batch_size != self._batch_size or node._has_names():
            return None
        source, found = node._tensordict, []
        if len(source) != len(self._leaves) + len(self._nodes):
            return None
        for name, shape, dtype in self._leaves:
            value = source.get(name)
            if type(value) is not torch.Tensor or value.shape != shape or value.dtype is not dtype:
                return None
            if value.requires_grad or not value.is_cpu:
                return None
            found.append(value)
        for name, form in self._nodes:
            inner = form.values(source.get(name))
            if inner is None:
                return None
            found.extend(inner)
        return found


def _rooms(node: TensorDictBase, steps: int) -> TensorDictBase:
    """The same TensorDicts with room for so many steps, as a second dimension."""
    source = {
        name: _room(value, steps) if type(value) is torch.Tensor else _rooms(value, steps)
        for name, value in node._tensordict.items()
    }
    rows, *rest = node.batch_size
    size = torch.Size([rows, steps, *rest])
    result: TensorDictBase = TensorDict._new_unsafe(source=source, batch_size=size, device=node.device)
    return result


def _room(value: torch.Tensor, steps: int) -> torch.Tensor:
    shape = (value.shape[0], steps, *value.shape[1:])
    try:
        dtype = value.new_empty(0).numpy().dtype
    except TypeError:  # bfloat16, float8 and others that numpy does not know
        return torch.empty(shape, dtype=value.dtype)
    # numpy asks the system for huge pages, which saves most of what it costs to touch so much memory for the first time
    return torch.from_numpy(np.empty(shape, dtype))
