"""Drives any torchrl `EnvBase`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torchrl.data.tensor_specs import Composite, NonTensor, StackedComposite
from torchrl.envs import GymEnv, GymWrapper, TransformedEnv
from torchrl.envs.common import EnvBase, _EnvWrapper

from shoal.drivers.base import Description, Driver, Messages
from shoal.drivers.gymnasium import GymnasiumDriver
from shoal.drivers.plain_step import PlainStep, plain_copy, steps_plainly
from shoal.engine.errors import EnvError
from shoal.engine.layout import Array, bytes_of
from shoal.engine.protocol import ResetInput, StepInput
from shoal.engine.schema import (
    ACTION,
    DONE,
    INPUT,
    NEXT,
    OBSERVATION,
    REWARD,
    ROOT,
    STATE,
    Key,
    Leaf,
    Schema,
)

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
        env, details = self.env, _details(self.env)
        return Description("torchrl", schema_of(details.specs), details, _text(env), _chains_seed(env), native=False)

    def attach(self, schema: Schema, arrays: dict[str, dict[Key, Array]], *, sent: bool) -> None:
        self._sent = sent
        self._schema = schema
        self._nodes = node_sizes(*(spec[name] for spec in (self.env.output_spec, self.env.input_spec) for name in spec))
        self._buffers = {
            area: {key: as_tensor(array, schema.by_area[area][key].dtype) for key, array in slots.items()}
            for area, slots in arrays.items()
        }
        self._inputs = [(_td_key(key), buffer) for key, buffer in self._buffers[INPUT].items()]
        self._outputs = {
            area: [
                (key, _td_key(key), self._buffers[area].get(key), leaf) for key, leaf in schema.by_area[area].items()
            ]
            for area in (NEXT, ROOT)
        }
        dones = [key for key, leaf in schema.by_area[NEXT].items() if leaf.role == DONE]
        self._dones = [_td_key(key) for key in dones]
        written = arrays[NEXT]
        self._flags = [bytes_of(written[key]) for key in dones] if set(dones) <= written.keys() else None
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
        self._plain_step = PlainStep(self.env) if flat and steps_plainly(self.env) else None
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
            return any(b"\x01" in flags.tobytes() for flags in self._flags)
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
                tensordict.set(_td_key(leaf_key), value)
            if given.carried:
                tensordict.set("next", self._tensordict(given.carried))
        return tensordict

    def _tensordict(self, leaves: dict[Key, Any]) -> TensorDictBase:
        tensordict = TensorDict({}, batch_size=self.env.batch_size, device=self.env.device)
        for key, value in leaves.items():
            if value is not None:
                for depth in range(1, len(key)):
                    if _td_key(key[:depth]) not in tensordict.keys(True):
                        size = self._nodes.get(key[:depth], self.env.batch_size)
                        tensordict.set(_td_key(key[:depth]), TensorDict({}, batch_size=size, device=self.env.device))
                tensordict.set(_td_key(key), value)
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


class GymWrapperDriver(GymnasiumDriver):
    """Drives a torchrl `GymEnv` or `GymWrapper` natively: the environment inside of it, with plain numpy writes.

    Gives, bit for bit, what the wrapper would give; only for environments that `drives_natively` accepts.

    Args:
        env: the wrapper; the driver owns it.
        row: its index in the batch, for messages.
    """

    def __init__(self, env: GymWrapper, row: int) -> None:
        super().__init__(env._env, row, categorical=env._categorical_action_encoding, frame_skip=env.wrapper_frame_skip)
        env.set_spec_lock_()
        self.env = env
        self._seeds_torch = False

    def describe(self) -> Description:
        details = _details(self.env)
        return Description("torchrl", schema_of(details.specs), details, _text(self.env), chains_seed=True, native=True)

    def attach(self, schema: Schema, arrays: dict[str, dict[Key, Array]], *, sent: bool) -> None:
        super().attach(schema, arrays, sent=sent)
        self._seeds_torch = sent

    def seed(self, seed: int | None, static: bool) -> int | None:
        if self._seeds_torch and seed is not None:
            torch.manual_seed(seed % 2**63)
        return super().seed(seed, static)

    def state_dict(self) -> Any:
        return without_locks(self.env.state_dict())

    def load_state_dict(self, state: Any, kwargs: dict[str, Any]) -> None:
        self.env.load_state_dict(state, **kwargs)

    def get_attr(self, path: tuple[str, ...]) -> Any:
        return Driver.get_attr(self, path)

    def set_attr(self, name: str, value: Any) -> None:
        set_where_defined(self.env, name, value, self._row)


_OWN_METHODS = ("_step", "_reset", "_set_seed", "read_obs", "read_reward", "read_done", "read_action")


def drives_natively(env: EnvBase) -> bool:
    """Whether an environment is exactly torchrl's own wrapper, with nothing overridden and no reader added."""
    return (
        type(env) in (GymEnv, GymWrapper)
        and isinstance(env._env, gymnasium.Env)
        and env.batch_size == ()
        and (env.device is None or env.device.type == "cpu")
        and not env.info_dict_reader
        and not env.run_type_checks
        and env._convert_actions_to_numpy
        and not any(name in env.__dict__ for name in _OWN_METHODS)
        and _spaces_agree(env)
    )


def _spaces_agree(env: GymWrapper) -> bool:
    """Whether the wrapper's specs are what the spaces of the environment inside of it give."""
    try:
        inner = GymnasiumDriver(env._env, -1, categorical=env._categorical_action_encoding)
    except TypeError:
        return False
    return inner.as_wrapped() and set(inner.schema().leaves) == set(schema_of(env.specs).leaves)


def _details(env: EnvBase) -> Details:
    return Details(env.specs.clone(), env.batch_size, env.device, bool(env._supports_set_state))


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
            raise AttributeError(f"the environment of row {row} ({_text(env)}) has no attribute {name!r}")
    setattr(target, name, value)


def _defines(target: Any, name: str) -> bool:
    own = getattr(target, "__dict__", {})
    parts = (own.get(part, ()) for part in ("_modules", "_parameters", "_buffers"))
    return name in own or hasattr(type(target), name) or any(name in part for part in parts)


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


def without_locks(state: Any) -> Any:
    """A state dict with None in place of the locks in it, which cannot be sent."""
    if isinstance(state, dict):
        copy = type(state)()
        for key, value in state.items():
            copy[key] = without_locks(value)
        return copy
    return None if hasattr(state, "acquire") and hasattr(state, "release") else state


def _leaf(tensordict: TensorDictBase, name: str | Key) -> Any:
    """A leaf, or None; the short way where that is a look into a dict."""
    if type(tensordict) is TensorDict and isinstance(name, str):
        return tensordict._tensordict.get(name)
    return tensordict.get(name, None)


def _td_key(key: Key) -> str | Key:
    return key[0] if len(key) == 1 else key


def _text(env: Any) -> str:
    try:
        return str(env)
    except Exception:
        return f"{type(env).__name__}()"


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
