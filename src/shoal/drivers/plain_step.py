"""The short way through torchrl's ``EnvBase.step``, for environments and results that are plain.

Around an environment's own ``_step``, torchrl completes its flags, checks shapes, nests the result below ``"next"`` and
takes that apart again in ``step_mdp``: some 100 us that mostly find nothing to do. Here is what is left of it where all
is as it should be: a look at each value. Whatever is not goes torchrl's own way.

Below a `TransformedEnv` is another environment's ``_step``, which goes the short way too; the transforms are torchrl's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import Compose, Transform, TransformedEnv
from torchrl.envs.common import EnvBase
from torchrl.envs.utils import _StepMDP

from shoal.drivers.gym_wrapper import NativeStep, steps_natively

_OURS = ("step", "_step_proc_data", "_step_mdp", "step_and_maybe_reset", "_step_and_maybe_reset", "maybe_reset")
"""What a class must have left as torchrl made it."""

_Tensor = torch.Tensor


class PlainStep:
    """Steps one environment as its ``step`` and ``step_mdp`` would.

    Args:
        env: the environment; `steps_plainly` has said yes.
        row: its index in the batch, for messages.

    Attributes:
        from_next: names of the root's leaves that a step takes from its result.
    """

    def __init__(self, env: EnvBase, row: int) -> None:
        mdp = env._step_mdp
        self._env = env
        self._step = inner_step(env, row)
        self._flags = Flags(env)
        self._excluded = frozenset(mdp.exclude_from_root)
        self.from_next = tuple(mdp.keys_from_next)
        self._rewards = [(name, spec.shape) for name, spec in env.full_reward_spec.items()]

    def __call__(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Steps.

        Args:
            tensordict: the root with the action; nobody else holds it.

        Returns:
            The result and the following root.
        """
        env = self._env
        following = self._step(tensordict)
        if self._is_complete(tensordict, following):
            root = self._advance(tensordict, following)
            if root is not None:
                return following, root
        following = env._step_proc_data(following)
        tensordict.set("next", following)
        return tensordict.get("next"), env._step_mdp(tensordict)

    def _is_complete(self, tensordict: TensorDictBase, following: TensorDictBase) -> bool:
        """Whether a result has all rewards and flags, in their shapes; a flag that repeats another is added to it."""
        if (
            type(following) is not TensorDict
            or type(tensordict) is not TensorDict
            or following.batch_size != tensordict.batch_size
            or following.device != tensordict.device
        ):
            return False
        values = following._tensordict
        for name, shape in self._rewards:
            value = values.get(name)
            if type(value) is not _Tensor or value.shape != shape:
                return False
        return self._flags.complete(following)

    def _advance(self, tensordict: TensorDictBase, following: TensorDict) -> TensorDictBase | None:
        """The following root; None where it is not all plain tensors."""
        excluded, values, root = self._excluded, following._tensordict, {}
        for name, value in tensordict._tensordict.items():
            if name not in excluded:
                if type(value) is not _Tensor:
                    return None
                root[name] = value
        for name in self.from_next:
            value = values.get(name)
            if value is not None:
                if type(value) is not _Tensor:
                    return None
                root[name] = value
        return plain_tensordict(root, tensordict)


class Flags:
    """Completes the done flags of results, as ``EnvBase._complete_done`` does.

    Args:
        env: the environment.
    """

    def __init__(self, env: EnvBase) -> None:
        self._shapes = {name: getattr(spec, "shape", None) for name, spec in env.full_done_spec.items()}
        theirs = getattr(type(env)._complete_done, "__func__", None) is EnvBase._complete_done.__func__
        self._twins = theirs and self._shapes.keys() == {"done", "terminated"}

    def complete(self, following: TensorDictBase) -> bool:
        """Whether a result has all flags in their shapes now; one that repeats the other is added to it."""
        if type(following) is not TensorDict or following.is_locked:
            return False
        values, missing = following._tensordict, None
        for name, shape in self._shapes.items():
            value = values.get(name)
            if value is None:
                if not self._twins or missing:
                    return False
                missing = name
            elif type(value) is not _Tensor or value.shape != shape:
                return False
        if missing is not None:
            if "truncated" in values:
                return False
            values[missing] = values["done" if missing == "terminated" else "terminated"]
        return True


class TransformedStep:
    """What a `TransformedEnv`'s ``_step`` gives.

    Args:
        env: the environment; `inner_step` has found that torchrl's own ``_step`` is in force.
        row: its index in the batch, for messages.
    """

    def __init__(self, env: TransformedEnv, row: int) -> None:
        self._env, self._base, self._transform = env, env.base_env, env.transform
        self._step = inner_step(self._base, row)
        self._flags = Flags(self._base)

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Steps; neither a mask for the step nor leaves of ``"next"`` are in the input."""
        env, transform = self._env, self._transform
        if env.transform is not transform or env.base_env is not self._base:  # somebody has changed it since
            return env._step(tensordict)
        given = transform._inv_call(plain_copy(tensordict))
        following = self._step(given)
        if not self._flags.complete(following):
            self._base._complete_done(self._base.full_done_spec, following)
        return transform._step(given, following)


def inner_step(env: EnvBase, row: int) -> Callable[[TensorDictBase], TensorDictBase]:
    """What gives the result of an environment's ``_step``, the shortest way that there is.

    Args:
        env: the environment.
        row: its index in the batch, for messages.
    """
    if steps_natively(env):
        return NativeStep(env, row)
    if (
        isinstance(env, TransformedEnv)
        and type(env)._step is TransformedEnv._step
        and "_step" not in env.__dict__
        and isinstance(env.transform, Transform)
        and type(env.transform).inv is Transform.inv
    ):
        return TransformedStep(env, row)
    return lambda tensordict: env._step(tensordict)


def plain_tensordict(source: dict[str, torch.Tensor], like: TensorDictBase) -> TensorDictBase:
    """A TensorDict of these leaves, unchecked, of the other's batch size and device."""
    result: TensorDictBase = TensorDict._new_unsafe(
        source=source, batch_size=like.batch_size, device=like.device, nested=False
    )
    return result


def plain_copy(tensordict: TensorDictBase) -> TensorDictBase:
    """A TensorDict with the same tensors; the short way where it is not nested."""
    if type(tensordict) is TensorDict and not tensordict._has_names():
        source = dict(tensordict._tensordict)
        if all(type(value) is _Tensor for value in source.values()):
            return plain_tensordict(source, tensordict)
    return tensordict.copy()


def steps_plainly(env: EnvBase) -> bool:
    """Whether nothing of an environment's class, specs or settings asks for more than `PlainStep` does."""
    kind = type(env)
    return (
        all(getattr(kind, name) is getattr(EnvBase, name) and name not in env.__dict__ for name in _OURS)
        and not env.run_type_checks
        and not _has_hooks(env)
        and not env.__dict__.get("_torchrl_native_autoreset", False)
        and env.__dict__.get("_compiled_step_and_maybe_reset") is None
        and type(env._step_mdp) is _StepMDP
        and all(part is None for part in env._step_mdp.keys_from_next.values())
        and all(
            isinstance(name, str) and hasattr(spec, "shape") and not hasattr(spec, "keys")
            for specs in (env.full_reward_spec, env.full_done_spec)
            for name, spec in specs.items()
        )
    )


def _has_hooks(env: EnvBase) -> bool:
    """Whether something is to be called after ``step_mdp``."""
    if not isinstance(env, TransformedEnv) or type(env)._post_step_mdp_hooks is not TransformedEnv._post_step_mdp_hooks:
        return env._post_step_mdp_hooks is not None
    return _transform_has_hooks(env.transform) or _has_hooks(env.base_env)


def _transform_has_hooks(transform: Transform) -> bool:
    if type(transform) is Compose:
        return any(_transform_has_hooks(part) for part in transform)
    return type(transform)._post_step_mdp_hooks is not Transform._post_step_mdp_hooks
