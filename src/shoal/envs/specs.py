"""From what a driver tells of a sub-environment to torchrl specs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import torch
import torchrl.envs.libs.utils  # noqa: F401 - later, it would keep the frames of whoever imports it alive
from torchrl.data.tensor_specs import Binary, Bounded, Composite, TensorSpec
from torchrl.envs import GymWrapper
from torchrl.envs.libs.gym import _gym_to_torchrl_spec_transform

from shoal.drivers import torchrl_common as torchrl_driver
from shoal.drivers.base import Description
from shoal.drivers.gymnasium import Details
from shoal.drivers.spaces import ARRAY, Plan
from shoal.engine.schema import REWARD, Schema


@dataclass(frozen=True)
class RowSpecs:
    """One sub-environment as its batch sees it.

    Attributes:
        schema: its leaves.
        specs: its ``input_spec`` and ``output_spec``.
        batch_size: its own batch size.
        device: where its tensors live; None if it does not say.
        text: the environment as text.
        supports_set_state: whether it can be reset to a given state.
        chains_seed: whether the seed that follows it in the chain can be computed without it.
        native: whether its driver works on arrays alone, so that no gradient can pass through it.
    """

    schema: Schema
    specs: Composite
    batch_size: torch.Size
    device: torch.device | None
    text: str
    supports_set_state: bool
    chains_seed: bool
    native: bool


def row_specs(description: Description) -> RowSpecs:
    """The specs of a described sub-environment.

    Raises:
        RuntimeError: a nested spec is empty.
    """
    if description.family == "gymnasium":
        return _of_gymnasium(description)
    details: torchrl_driver.Details = description.details
    return RowSpecs(
        schema=description.schema,
        specs=details.specs,
        batch_size=details.batch_size,
        device=details.device,
        text=description.text,
        supports_set_state=details.supports_set_state,
        chains_seed=description.chains_seed,
        native=description.native,
    )


class _Spaces(gymnasium.Env[Any, Any]):
    """The spaces of an environment that lives elsewhere."""

    def __init__(self, observation: Any, action: Any, reward: Any) -> None:
        self.observation_space = observation
        self.action_space = action
        if reward is not None:
            self.reward_space = reward


def _of_gymnasium(description: Description) -> RowSpecs:
    details: Details = description.details
    schema = description.schema
    if details.reward.space is None:
        # The wrapper's reward has torch's default dtype, which a worker without torch does not know.
        dtype = torchrl_driver.dtype_name(torch.get_default_dtype())
        leaves = [replace(leaf, dtype=dtype) if leaf.role == REWARD else leaf for leaf in schema.leaves]
        schema = Schema(tuple(leaves))
    specs = _wrapper_specs(details)
    if specs is None or set(torchrl_driver.schema_of(specs).leaves) != set(schema.leaves):
        specs = _own_specs(details)
    return RowSpecs(
        schema=schema,
        specs=specs,
        batch_size=torch.Size([]),
        device=None,
        text=f"GymWrapper(env={description.text}, batch_size=torch.Size([]))",
        supports_set_state=False,
        chains_seed=description.chains_seed,
        native=description.native,
    )


def _wrapper_specs(details: Details) -> Composite | None:
    """The specs that torchrl's own wrapper makes of the spaces, or None where it cannot."""
    try:
        stub = _Spaces(details.observation_space, details.action_space, details.reward.space)
        return GymWrapper(stub).specs.clone()
    except Exception:
        return None


def _own_specs(details: Details) -> Composite:
    """Specs for spaces that torchrl's wrapper refuses; the same where it does not."""
    stub = _Spaces(gymnasium.spaces.Box(-1, 1, (1,)), gymnasium.spaces.Box(-1, 1, (1,)), details.reward.space)
    wrapper = GymWrapper(stub)
    wrapper.set_spec_lock_(False)
    wrapper.observation_spec = _spec_of(details.observation)
    action = _spec_of(details.action)
    for name in reversed(details.action_key):
        action = Composite({name: action})
    wrapper.full_action_spec = action
    return wrapper.specs.clone()


def _spec_of(plan: Plan) -> TensorSpec:
    if plan.stacked is not None:
        return torch.stack([_spec_of(plan.stacked)] * plan.length, 0)
    if plan.encoding is None:
        return Composite({name: _spec_of(child) for name, child in plan.children.items()})
    encoding, space = plan.encoding, plan.encoding.space
    if encoding.kind == ARRAY and isinstance(space, gymnasium.spaces.MultiBinary):
        return Binary(shape=encoding.shape, dtype=getattr(torch, encoding.dtype))
    if encoding.kind == ARRAY and isinstance(space, gymnasium.spaces.MultiDiscrete):
        low, high = torch.as_tensor(space.start), torch.as_tensor(space.start + space.nvec - 1)
        return Bounded(low, high, shape=encoding.shape, dtype=getattr(torch, encoding.dtype))
    return _gym_to_torchrl_spec_transform(space)


def batch_specs(rows: Sequence[RowSpecs], *, alike: bool) -> tuple[Composite, Composite]:
    """Input and output specs of the batch, without a device.

    Args:
        rows: the sub-environments.
        alike: whether the first one speaks for all.
    """
    inputs, outputs = (
        rows[0].specs[name].expand(len(rows), *rows[0].specs[name].shape)
        if alike
        else torch.stack([row.specs[name] for row in rows], 0)
        for name in ("input_spec", "output_spec")
    )
    return inputs, outputs
