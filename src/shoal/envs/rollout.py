"""A rollout of random actions, each step written to its final place instead of stacked at the end."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from shoal.engine.protocol import Opcode
from shoal.engine.schema import ACTION, DONE, INPUT, NEXT, ROOT
from shoal.envs.results import Results
from shoal.envs.session import Session


def in_place(session: Session, results: Results, root: TensorDictBase) -> bool:
    """Whether a rollout that begins with this root can be written in place: plain TensorDicts of flat leaves that all
    lie in buffers, steps that read actions only, rows that are done as a whole, and nothing else in the root."""
    return (
        results.fast
        and results.whole_rows
        and not session.closed
        and all(leaf.role == ACTION for leaf in session.rows[0].schema.by_area[INPUT].values())
        and type(root) is TensorDict
        and set(root.keys()) == {name for name, _ in results.plain_leaves(ROOT)}
    )


def rollout_in_place(env: Any, session: Session, results: Results, root: TensorDictBase, steps: int) -> TensorDictBase:
    """What torchrl's ``rollout`` gives with random actions and without a break.

    Args:
        env: draws the actions.
        session: runs the steps.
        results: knows the buffers; `in_place` has said yes.
        root: what the first step starts from.
        steps: how many steps.

    Returns:
        TensorDict of shape ``[N, steps]``.
    """
    rows, device = root.batch_size[0], env.device
    schema = session.rows[0].schema
    roots = {name: _room(value, steps) for name, value in root.items()}
    following = {name: _room(buffer, steps) for name, buffer in results.plain_leaves(NEXT)}
    actions: dict[str, Any] = {}
    for name, value in root.items():
        roots[name][:, 0] = value
    # What a row starts from after a step is never done: those columns are zeros from the start.
    moving = [
        (roots[name].unbind(1), following[name].unbind(1), buffer)
        for name, buffer in results.plain_leaves(ROOT)
        if schema.by_area[ROOT][name,].role != DONE
    ]
    flags = [name for name in roots if schema.by_area[ROOT][name,].role == DONE]
    for name in flags:
        roots[name][:, 1:] = False
    columns = [(following[name].unbind(1), buffer) for name, buffer in results.plain_leaves(NEXT)]
    fresh = session.engine.fresh
    draw = env.input_spec["full_action_spec"].rand
    for step in range(steps):
        action = draw()
        if not results.write_plain_input(action):
            raise RuntimeError(f"the action spec draws what does not fit the action's leaf: {action}")
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
    size = torch.Size([rows, steps])
    result: TensorDictBase = TensorDict._new_unsafe(
        source={
            **roots,
            **actions,
            "next": TensorDict._new_unsafe(source=following, batch_size=size, device=device, nested=False),
        },
        batch_size=size,
        device=device,
    )
    result.refine_names(..., "time")
    return result


def _room(value: torch.Tensor, steps: int) -> torch.Tensor:
    return torch.empty((value.shape[0], steps, *value.shape[1:]), dtype=value.dtype)
