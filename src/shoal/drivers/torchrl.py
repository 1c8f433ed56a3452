"""Drives any torchrl `EnvBase`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torchrl.envs import TransformedEnv
from torchrl.envs.common import EnvBase

from shoal.drivers.base import Description, Driver, Messages
from shoal.drivers.plain_step import PlainStep, plain_copy, steps_plainly
from shoal.drivers.torchrl_common import (
    as_tensor,
    details_of,
    dtype_name,
    node_sizes,
    schema_of,
    set_where_defined,
    td_key,
    text_of,
    without_locks,
)
from shoal.engine.errors import EnvError
from shoal.engine.layout import Array, bytes_of
from shoal.engine.protocol import ResetInput, StepInput
from shoal.engine.schema import DONE, INPUT, NEXT, ROOT, Key, Schema


class TorchRLDriver(Driver):
    """Drives one torchrl environment through its public methods.

    Args:
        env: the environment; the driver owns it.
        row: its index in the batch, for messages.
    """

    env: EnvBase

    def __init__(self, env: EnvBase, row: int) -> None:
        env.set_spec_lock_()
        _check_transforms(env)
        self.env = env
        self._row = row
        self._root: TensorDictBase | None = None
        self._sent = False

    def describe(self) -> Description:
        env, details = self.env, details_of(self.env)
        return Description("torchrl", schema_of(details.specs), details, text_of(env), _chains_seed(env), native=False)

    def attach(self, schema: Schema, arrays: dict[str, dict[Key, Array]], *, sent: bool) -> None:
        self._sent = sent
        self._schema = schema
        self._nodes = node_sizes(*(spec[name] for spec in (self.env.output_spec, self.env.input_spec) for name in spec))
        self._buffers = {
            area: {key: as_tensor(array, schema.by_area[area][key].dtype) for key, array in slots.items()}
            for area, slots in arrays.items()
        }
        self._inputs = [(td_key(key), buffer) for key, buffer in self._buffers[INPUT].items()]
        self._outputs = {
            area: [(key, td_key(key), self._buffers[area].get(key), leaf) for key, leaf in schema.by_area[area].items()]
            for area in (NEXT, ROOT)
        }
        dones = {key: leaf for key, leaf in schema.by_area[NEXT].items() if leaf.role == DONE}
        self._dones = [td_key(key) for key in dones]
        written = arrays[NEXT]
        seen = all(key in written and leaf.dtype == "bool" for key, leaf in dones.items())
        self._flags = [bytes_of(written[key]) for key in dones] if seen else None
        kind = type(self.env)
        self._in_parts = (
            kind.step_and_maybe_reset in (EnvBase.step_and_maybe_reset,)
            and kind.maybe_reset is EnvBase.maybe_reset
            and not self.env.__dict__.get("_torchrl_native_autoreset", False)
            and self.env.__dict__.get("_compiled_step_and_maybe_reset") is None
        )
        flat = all(
            len(key) == 1 and leaf.dtype != "object" for area in schema.by_area.values() for key, leaf in area.items()
        )
        self._plain_step = PlainStep(self.env, self._row) if flat and steps_plainly(self.env) else None
        root = {name for _, name, _, _ in self._outputs[ROOT]}
        self._root_is_next = self._plain_step is not None and root <= set(self._plain_step.from_next)

    def reset(self, given: ResetInput | None) -> Messages | None:
        leaves = None if given is None else given.leaves
        if leaves and self._root is None:  # it was never reset: there is nothing that a mask could leave as it is
            leaves = {key: value for key, value in leaves.items() if key[-1] != "_reset"}
        kwargs = {} if given is None else given.kwargs
        root = self.env.reset(self._tensordict(leaves) if leaves else None, **kwargs)
        if leaves and self._root is not None:
            root = self._completed(root, leaves)
        self._root = root
        return self._write(ROOT, root)

    def _completed(self, root: TensorDictBase, leaves: dict[Key, Any]) -> TensorDictBase:
        """The root after a reset, with the row's own latest values in the parts that were not reset.

        A mask may pick some entries or agents of the row only. What the caller carries for the others is in the result
        already; what it left out, torchrl fills with zeros, or leaves out too.
        """
        masks = {key[:-1]: mask for key, mask in leaves.items() if key[-1] == "_reset"}
        if () in masks:
            masks = {(): masks[()]}
        if not masks or (() in masks and bool(masks[()].all())):
            return root
        assert self._root is not None
        for key, name, _, _ in self._outputs[ROOT]:
            old, new = self._root.get(name, None), root.get(name, None)
            if key in leaves or old is None:
                continue
            above = [mask for prefix, mask in masks.items() if key[: len(prefix)] == prefix]
            if new is None or not above:
                root.set(name, old)
            elif isinstance(new, torch.Tensor) and new.shape == old.shape:
                mask = above[0].any(-1)
                root.set(name, torch.where(mask.reshape(*mask.shape, *[1] * (new.ndim - mask.ndim)), new, old))
        return root

    def step(self, given: StepInput | None) -> Messages | None:
        tensordict = self._step_input(given)
        if self._plain_step is not None and (given is None or not given.carried):
            following, self._root = self._plain_step(tensordict)
        else:
            tensordict, self._root = self._advance(self.env.step(tensordict))
            following = tensordict.get("next")
        return self._write(NEXT, following)

    def step_and_maybe_reset(self, given: StepInput | None) -> Messages | None:
        env, tensordict = self.env, self._step_input(given)
        root_is_next = False
        if self._in_parts:
            if self._plain_step is not None and (given is None or not given.carried):
                following, root = self._plain_step(tensordict)
                root_is_next = self._root_is_next
            else:
                tensordict, root = self._advance(env.step(tensordict))
                following = tensordict.get("next")
            messages = self._write(NEXT, following)
            self.was_reset = done = self._any_done(following)  # now: a reset may write to the same tensors
            if done:
                root = env.maybe_reset(root)
        else:
            tensordict, root = env.step_and_maybe_reset(tensordict)
            following = tensordict.get("next")
            messages = self._write(NEXT, following)
            done = self._any_done(following)
        self._root = root
        # Where nothing is done, what the root shares with next is the same; hooks and transforms may have set the rest.
        self.was_reset = done or (
            not root_is_next
            and any(_leaf(root, name) is not _leaf(following, name) for _, name, _, _ in self._outputs[ROOT])
        )
        more = self._write(ROOT, root) if self.was_reset else None
        if more:
            return {**messages, **more} if messages else more
        return messages

    def _any_done(self, following: TensorDictBase) -> bool:
        """Whether a result that was just written is done."""
        if self._flags is not None:
            return any(flags.tobytes().strip(b"\0") for flags in self._flags)
        return any(bool(_leaf(following, name).any()) for name in self._dones)

    def _advance(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        env = self.env
        root = env._step_mdp(tensordict)
        if env._post_step_mdp_hooks is not None:
            tensordict, root = env._post_step_mdp_hooks(tensordict, root)
        return tensordict, root

    def _step_input(self, given: StepInput | None) -> TensorDictBase:
        env = self.env
        if self._root is None:
            tensordict = TensorDict({}, batch_size=env.batch_size, device=env.device)
        else:
            tensordict = plain_copy(self._root)
        for key, buffer in self._inputs:
            # A copy: the environment may keep it, and the next command writes to the buffer.
            if type(tensordict) is TensorDict and isinstance(key, str):
                tensordict._tensordict[key] = buffer.clone()  # of the leaf's own shape and dtype: nothing to check
            else:
                tensordict.set(key, buffer.clone())
        if given is not None:
            for leaf_key, value in given.leaves.items():
                tensordict.set(td_key(leaf_key), value)
            if given.carried:
                tensordict.set("next", self._tensordict(given.carried))
        return tensordict

    def _tensordict(self, leaves: dict[Key, Any]) -> TensorDictBase:
        tensordict = TensorDict({}, batch_size=self.env.batch_size, device=self.env.device)
        for key, value in leaves.items():
            if value is not None:
                for depth in range(1, len(key)):
                    if td_key(key[:depth]) not in tensordict.keys(True):
                        size = self._nodes.get(key[:depth], self.env.batch_size)
                        tensordict.set(td_key(key[:depth]), TensorDict({}, batch_size=size, device=self.env.device))
                tensordict.set(td_key(key), value)
        return tensordict

    def _write(self, area: str, tensordict: TensorDictBase) -> Messages | None:
        messages: Messages | None = None
        for key, name, buffer, leaf in self._outputs[area]:
            value = _leaf(tensordict, name)
            if value is None:
                raise EnvError(
                    f"row {self._row}: the environment gave no {'.'.join(key)!r} ({leaf.role}), as its specs promise; "
                    f"it gave {sorted(map(str, tensordict.keys(True, True)))}"
                )
            if buffer is not None:
                if value.shape != buffer.shape or value.dtype != buffer.dtype:
                    raise EnvError(
                        f"row {self._row}: the environment's {'.'.join(key)!r} ({leaf.role}) has shape "
                        f"{tuple(value.shape)} and dtype {dtype_name(value.dtype)}, its spec says "
                        f"{tuple(buffer.shape)} and {leaf.dtype}; change the spec or the value"
                    )
                buffer.copy_(value.detach() if value.requires_grad else value)
                continue
            if messages is None:
                messages = {}
            messages[area, key] = self._message(value)
        return messages

    def _message(self, value: Any) -> Any:
        """A value in memory of its own; without its graph and on the CPU if it leaves this process."""
        if not isinstance(value, torch.Tensor) and not is_tensor_collection(value):
            return value
        if self._sent:
            return value.detach().cpu() if isinstance(value, torch.Tensor) else value.detach().to("cpu")
        return value.clone()

    def seed(self, seed: int | None, static: bool) -> int | None:
        if self._sent and seed is not None:
            # Environments that draw from torch's own generator repeat too; nobody else uses it in this process.
            torch.manual_seed(seed % 2**63)
        following: int | None = self.env.set_seed(seed, static_seed=static)
        return following

    def state_dict(self) -> Any:
        return without_locks(self.env.state_dict())

    def load_state_dict(self, state: Any, kwargs: dict[str, Any]) -> None:
        self.env.load_state_dict(state, **kwargs)

    def set_attr(self, name: str, value: Any) -> None:
        set_where_defined(self.env, name, value, self._row)

    def close(self) -> None:
        self.env.close()


def _check_transforms(env: EnvBase) -> None:
    """Lets transforms that must not live in a worker say so."""
    if isinstance(env, TransformedEnv):
        check: Callable[[], None] | None = getattr(env.transform, "_check_batched_worker_compat", None)
        if check is not None:
            check()
        _check_transforms(env.base_env)


def _chains_seed(env: EnvBase) -> bool:
    """Whether ``set_seed`` gives what the chain gives: nobody has overridden it."""
    while isinstance(env, TransformedEnv) and type(env).set_seed is TransformedEnv.set_seed:
        env = env.base_env
    return type(env).set_seed is EnvBase.set_seed


def _leaf(tensordict: TensorDictBase, name: str | Key) -> Any:
    """A leaf, or None; the short way where that is a look into a dict."""
    if type(tensordict) is TensorDict and isinstance(name, str):
        return tensordict._tensordict.get(name)
    return tensordict.get(name, None)
