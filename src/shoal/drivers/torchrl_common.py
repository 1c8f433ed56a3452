"""What the drivers of torchrl's environments share: specs, leaves and names of an `EnvBase`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchrl.data.tensor_specs import Composite, NonTensor, StackedComposite
from torchrl.envs import TransformedEnv
from torchrl.envs.common import EnvBase, _EnvWrapper

from shoal.engine.layout import Array
from shoal.engine.schema import ACTION, DONE, OBSERVATION, REWARD, STATE, Key, Leaf, Schema

BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class Details:
    """What the face needs to know of a torchrl environment.

    Attributes:
        specs: its ``input_spec`` and ``output_spec``.
        batch_size: its own batch size.
        device: where its tensors live; None if it does not say.
        supports_set_state: whether it can be reset to a given state.
    """

    specs: Composite
    batch_size: torch.Size
    device: torch.device | None
    supports_set_state: bool


def schema_of(specs: Composite) -> Schema:
    """The leaves that specs of one environment describe.

    Raises:
        RuntimeError: a nested spec is empty.
    """
    inputs, outputs = specs["input_spec"], specs["output_spec"]
    leaves: list[Leaf] = []
    for spec, name, role in (
        (inputs, "full_action_spec", ACTION),
        (inputs, "full_state_spec", STATE),
        (outputs, "full_observation_spec", OBSERVATION),
        (outputs, "full_reward_spec", REWARD),
        (outputs, "full_done_spec", DONE),
    ):
        part = spec[name] if name in spec.keys() else None
        if part is not None:
            leaves.extend(_leaves_of(part, role, ()))
    return Schema(tuple(leaves))


def _leaves_of(spec: Any, role: str, prefix: Key) -> Iterator[Leaf]:
    for name in spec.keys():
        child, key = spec[name], (*prefix, name)
        if child is None:
            continue
        if is_opaque(child):
            yield Leaf(key, role, "object", (), fixed=False)
        elif isinstance(child, Composite):
            if child.is_empty():
                raise RuntimeError(
                    f"the environment has an empty nested spec at {'.'.join(key)!r} ({role}); remove it with "
                    "torchrl.envs.transforms.RemoveEmptySpecs"
                )
            yield from _leaves_of(child, role, key)
        else:
            shape = tuple(child.shape)
            yield Leaf(key, role, dtype_name(child.dtype), shape, fixed=all(size >= 0 for size in shape))


def is_opaque(spec: Any) -> bool:
    """Whether values of a spec travel whole: Python objects, tensorclasses, stacks of unequal parts."""
    if isinstance(spec, (NonTensor, StackedComposite)):
        return True
    if isinstance(spec, Composite):
        return spec.data_cls is not None
    parts = getattr(spec, "_specs", None)
    return spec.dtype is None or bool(parts and any(isinstance(part, NonTensor) for part in parts))


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name as numpy spells it (``"float32"``), or ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def as_tensor(array: Array, dtype: str) -> torch.Tensor:
    """The tensor over an array's memory, of the leaf's own dtype; an ordinary one, also under ``inference_mode``."""
    with torch.inference_mode(False):
        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if dtype == BFLOAT16 else tensor


def details_of(env: EnvBase) -> Details:
    """What the face needs to know of this environment."""
    return Details(env.specs.clone(), env.batch_size, env.device, bool(env._supports_set_state))


def td_key(key: Key) -> str | Key:
    """A leaf's key as TensorDict spells it."""
    return key[0] if len(key) == 1 else key


def node_sizes(*specs: Any) -> dict[Key, torch.Size]:
    """Batch size of each nested node that composite specs describe, by key."""
    sizes: dict[Key, torch.Size] = {}

    def visit(spec: Any, prefix: Key) -> None:
        for name in spec.keys():
            child = spec[name]
            if child is not None and hasattr(child, "keys"):
                sizes.setdefault((*prefix, name), torch.Size(child.shape))
                visit(child, (*prefix, name))

    for spec in specs:
        if spec is not None:
            visit(spec, ())
    return sizes


def set_where_defined(env: Any, name: str, value: Any, row: int) -> None:
    """Sets an attribute of the environment, or of one that it wraps: where it is defined.

    Raises:
        AttributeError: it is defined nowhere.
    """
    target = env
    while not _defines(target, name):
        if isinstance(target, TransformedEnv):
            target = target.base_env
        elif isinstance(target, _EnvWrapper):
            target = target._env
        elif hasattr(target, "has_wrapper_attr") and target.has_wrapper_attr(name):
            target.set_wrapper_attr(name, value)
            return
        else:
            raise AttributeError(f"the environment of row {row} ({text_of(env)}) has no attribute {name!r}")
    setattr(target, name, value)


def _defines(target: Any, name: str) -> bool:
    own = getattr(target, "__dict__", {})
    parts = (own.get(part, ()) for part in ("_modules", "_parameters", "_buffers"))
    return name in own or hasattr(type(target), name) or any(name in part for part in parts)


def without_locks(state: Any) -> Any:
    """A state dict with None in place of the locks in it, which cannot be sent."""
    if isinstance(state, dict):
        copy = type(state)()
        for key, value in state.items():
            copy[key] = without_locks(value)
        return copy
    return None if hasattr(state, "acquire") and hasattr(state, "release") else state


def text_of(env: Any) -> str:
    """The environment as text; its class where that fails."""
    try:
        return str(env)
    except Exception:
        return f"{type(env).__name__}()"
