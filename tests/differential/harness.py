"""Drive any batched environment by a script of commands, keep all it returns, and compare two such traces.

The oracle is `PlainLoop`: N single environments, driven one by one with row slices of what the batch was given, their
results stacked. It knows nothing of batching beyond that, so where it and a batched environment differ, the latter is
wrong (or the contract departs on purpose, and a test says so).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)
from torch import Tensor
from torchrl._utils import seed_generator
from torchrl.data import Composite, NonTensor
from torchrl.envs import EnvBase, GymWrapper

Mask = tuple[bool, ...]
Key = str | tuple[str, ...]


# ---------------------------------------------------------------------------------------------------------- scripts


@dataclass(frozen=True)
class Seed:
    """``set_seed(seed, static_seed=static)``."""

    seed: int
    static: bool = False


@dataclass(frozen=True)
class Reset:
    """``reset``: of all rows, or of those in the mask.

    Args:
        rows: the rows to reset; ``None`` calls ``reset()`` without a TensorDict.
        carry: the input carries the present root; else it carries the mask alone.
        whole: with ``rows=None``, give the present root without any mask.
        kwargs: keyword arguments for all rows.
        list_of_kwargs: keyword arguments for each row.
    """

    rows: Mask | None = None
    carry: bool = True
    whole: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)
    list_of_kwargs: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True)
class Step:
    """``step`` with the next action of the trace, and ``step_mdp`` to get to the following root.

    Args:
        rows: the rows to step (``"_step"``); ``None`` gives no mask.
        extra: the input's root holds entries that no spec knows.
        preset: keys of floats, with their shapes, that the input's next already holds.
        auto: call ``step_and_maybe_reset`` instead.
    """

    rows: Mask | None = None
    extra: bool = False
    preset: tuple[tuple[Key, tuple[int, ...]], ...] = ()
    auto: bool = False


def Auto(rows: Mask | None = None, extra: bool = False, **kwargs: Any) -> Step:
    """``step_and_maybe_reset`` with the next action of the trace."""
    return Step(rows, extra, auto=True, **kwargs)


@dataclass(frozen=True)
class Rollout:
    """``rollout`` with a policy that plays the next actions of the trace."""

    steps: int
    break_when_any_done: bool = True
    break_when_all_done: bool = False
    auto_reset: bool = True


Command = Seed | Reset | Step | Rollout


def _short(command: Command) -> str:
    """A command as it would be written, without what it leaves at its default."""
    given = [
        f"{one.name}={getattr(command, one.name)!r}"
        for one in fields(command)
        if getattr(command, one.name) != one.default
    ]
    return f"{type(command).__name__}({', '.join(one for one in given if not one.endswith('={}'))})"


Script = Sequence[Command]


def actions_needed(script: Script) -> int:
    """How many batches of actions a script plays."""
    return sum(command.steps if isinstance(command, Rollout) else int(isinstance(command, Step)) for command in script)


# ------------------------------------------------------------------------------------------------------------ rows


def as_single(env: Any) -> EnvBase:
    """A single environment as torchrl sees it: a Gymnasium env is wrapped in torchrl's ``GymWrapper``."""
    return GymWrapper(env) if isinstance(env, gymnasium.Env) else env


class Wrapped:
    """A picklable factory that wraps a Gymnasium env as `as_single` does, for engines that know only torchrl's."""

    def __init__(self, factory: Callable[..., Any]) -> None:
        self.factory = factory

    def __call__(self, **kwargs: Any) -> EnvBase:
        return as_single(self.factory(**kwargs))


def stack(rows: Sequence[TensorDictBase]) -> TensorDictBase:
    """Rows to a batch: dense where they stack, lazy where they do not."""
    return LazyStackedTensorDict.maybe_dense_stack(list(rows), 0)


def split(batch: TensorDictBase) -> list[TensorDictBase]:
    """A batch to rows whose containers are their own."""
    return [batch[index].copy() for index in range(batch.shape[0])]


def per_row(batch: TensorDictBase, change: Callable[[TensorDictBase, int], TensorDictBase]) -> TensorDictBase:
    """Apply a change to each row of a batch that may be lazily stacked."""
    return stack([change(row, index) for index, row in enumerate(split(batch))])


def merge(batch: TensorDictBase, other: TensorDictBase) -> TensorDictBase:
    """A new batch: the first updated by the second."""
    if isinstance(batch, LazyStackedTensorDict) or isinstance(other, LazyStackedTensorDict):
        others = split(other)
        return per_row(batch, lambda row, index: row.update(others[index]))
    return batch.copy().update(other)


def is_leaf(kind: type) -> bool:
    """Whether a class of values is a leaf: a tensor or a non-tensor."""
    return not is_tensor_collection(kind) or issubclass(kind, (NonTensorData, NonTensorStack))


def make_actions(factories: Sequence[Callable[[], Any]], count: int, seed: int = 0) -> list[TensorDictBase]:
    """Batches of random actions, drawn from the rows' own specs, the same for every engine."""
    singles: dict[int, EnvBase] = {}
    for factory in factories:
        if id(factory) not in singles:
            singles[id(factory)] = as_single(factory())
    batches = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for step in range(count):
            rows = []
            for index, factory in enumerate(factories):
                env = singles[id(factory)]
                row = env.full_action_spec.rand()
                for key, spec in env.full_action_spec.items(True, True):
                    if isinstance(spec, NonTensor):
                        row[key] = NonTensorData(f"command {step} of row {index}", batch_size=env.batch_size)
                rows.append(row)
            batches.append(stack(rows))
    for env in singles.values():
        env.close(raise_if_closed=False)
    return batches


def _level(key: Key) -> tuple[str, ...]:
    """The key of the TensorDict that holds a leaf; empty for the root."""
    return key[:-1] if isinstance(key, tuple) else ()


class PlainLoop:
    """The oracle: a plain Python loop over N single environments, in the clothes of a batched one.

    Args:
        factories: one for each row; a Gymnasium env is wrapped in torchrl's ``GymWrapper``.
    """

    def __init__(self, factories: Sequence[Callable[[], Any]]) -> None:
        self.envs = [as_single(factory()) for factory in factories]
        self.num_workers = len(self.envs)
        self.last: list[TensorDictBase | None] = [None] * self.num_workers

    @property
    def batch_size(self) -> torch.Size:
        return torch.Size((self.num_workers, *self.envs[0].batch_size))

    @property
    def reset_keys(self) -> list[Key]:
        return list(self.envs[0].reset_keys)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        seed = int(seed)  # Gymnasium takes no NumPy integer; the batched classes take any
        for env in self.envs:
            env.set_seed(seed)
            seed = seed if static_seed else seed_generator(seed)
        return seed

    def _keep(self, index: int, root: TensorDictBase) -> None:
        env = self.envs[index]
        self.last[index] = root.select(*env.observation_keys, *env.done_keys, strict=False).clone()

    def reset(
        self,
        tensordict: TensorDictBase | None = None,
        list_of_kwargs: Sequence[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> TensorDictBase:
        rows = [None] * self.num_workers if tensordict is None else split(tensordict)
        results = []
        for index, (env, row) in enumerate(zip(self.envs, rows, strict=True)):
            own = {**kwargs, **(list_of_kwargs[index] if list_of_kwargs else {})}
            masks = [] if row is None else [row.get(key) for key in env.reset_keys if key in row.keys(True)]
            if masks and not any(mask.any() for mask in masks):
                last = self.last[index]
                assert last is not None, "a row that is not reset has no state yet"
                result = last.clone().update(row.exclude(*env.reset_keys))
            else:
                result = env.reset(row, **copy.deepcopy(own)).clone()
            self._keep(index, result)
            results.append(result)
        return stack(results)

    def _stay(self, env: EnvBase, row: TensorDictBase) -> TensorDictBase:
        """What a row that does not step shows as its next."""
        following = TensorDict(batch_size=env.batch_size, device=env.device)
        for spec in (env.full_done_spec, env.full_observation_spec, env.full_reward_spec):
            absent = [key for key in spec.keys(True, True) if key not in row.keys(True, is_leaf=is_leaf)]
            present = [key for key in spec.keys(True, True) if key not in absent]
            for level in spec.keys(True):
                node = spec[level]
                if isinstance(node, Composite) and node.data_cls is None and level not in following.keys(True):
                    following.set(level, TensorDict(batch_size=node.shape))
            following.update(row.select(*present).clone())
            for key in absent:
                following.set(key, spec[key].zero())
        return following

    def _step_row(self, index: int, row: TensorDictBase, moves: bool) -> TensorDictBase:
        env = self.envs[index]
        row.pop("_step", None)
        if not moves:
            preset = row.get("next", None)
            following = self._stay(env, row)
            if preset is not None:
                following.update(preset.exclude(*following.keys(True, True)))
            return row.set("next", following)
        return env.step(row).clone()

    def _moves(self, tensordict: TensorDictBase) -> list[bool]:
        mask = tensordict.get("_step", None)
        if mask is None:
            return [True] * self.num_workers
        return [bool(row.any()) for row in mask]

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        moves = self._moves(tensordict)
        results = []
        for index, row in enumerate(split(tensordict)):
            result = self._step_row(index, row, moves[index])
            if moves[index]:
                self._keep(index, result["next"])
            results.append(result)
        return stack(results)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        moves = self._moves(tensordict)
        results, roots = [], []
        for index, (env, row) in enumerate(zip(self.envs, split(tensordict), strict=True)):
            result = self._step_row(index, row, moves[index])
            root = env.step_mdp(result)
            if moves[index]:
                root = env.maybe_reset(root).clone()
                self._keep(index, root)
            results.append(result)
            roots.append(root)
        return stack(results), stack(roots)

    def step_mdp(self, tensordict: TensorDictBase) -> TensorDictBase:
        return stack([env.step_mdp(row) for env, row in zip(self.envs, split(tensordict), strict=True)])

    def _done(self, root: TensorDictBase) -> Tensor:
        """For each entry of the batch, whether it is done: what the outermost end signals say."""
        done = torch.zeros(self.batch_size, dtype=torch.bool)
        for index, (env, row) in enumerate(zip(self.envs, split(root), strict=True)):
            levels = [_level(keys[0]) for keys in env.done_keys_groups]
            for keys, level in zip(env.done_keys_groups, levels, strict=True):
                if any(level != other and level[: len(other)] == other for other in levels):
                    continue
                for key in keys:
                    done[index] |= row.get(key).reshape((*env.batch_size, -1)).any(-1)
        return done

    def _where(self, moving: Tensor, after: TensorDictBase, before: TensorDictBase) -> TensorDictBase:
        """What moved, from the last step; the rest repeats the step before."""
        rows = []
        for index, (new, old) in enumerate(zip(split(after), split(before), strict=True)):
            if moving[index].all():
                rows.append(new)
            elif not moving[index].any():
                rows.append(old)
            else:
                rows.append(torch.where(moving[index], new, old))
        return stack(rows)

    def rollout(
        self,
        max_steps: int,
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        tensordict: TensorDictBase | None = None,
        auto_reset: bool = True,
        break_when_any_done: bool = True,
        break_when_all_done: bool = False,
        return_contiguous: bool = True,
    ) -> TensorDictBase:
        if auto_reset:
            root = self.reset()
        else:
            assert tensordict is not None
            root = per_row(tensordict, lambda row, index: self.envs[index].maybe_reset(row).clone())
        taken: list[TensorDictBase] = []
        moving = torch.ones(self.batch_size, dtype=torch.bool)
        for count in range(max_steps):
            root = merge(root, policy(root))
            if not break_when_any_done and not break_when_all_done:
                if count == max_steps - 1:
                    taken.append(self.step(root))
                else:
                    result, root = self.step_and_maybe_reset(root)
                    taken.append(result)
                continue
            if not moving.all():
                root.set("_step", moving)
            result = self.step(root)
            root = self.step_mdp(result)
            if not moving.all():
                result = self._where(moving, result, taken[-1])
            taken.append(result)
            done = self._done(root)
            if break_when_any_done and done.any():
                break
            if break_when_all_done:
                moving = moving & ~done
                if not moving.any():
                    break
        dim = len(self.batch_size)
        if return_contiguous:
            return LazyStackedTensorDict.maybe_dense_stack(taken, dim)
        return LazyStackedTensorDict.lazy_stack(taken, dim)

    def close(self, *, raise_if_closed: bool = True) -> None:
        for env in self.envs:
            env.close(raise_if_closed=raise_if_closed)


Engine: TypeAlias = Any
"""An ``EnvBase`` with a leading batch dimension of rows, or a `PlainLoop`."""


# ------------------------------------------------------------------------------------------------------------ traces


@dataclass
class Entry:
    """What one command returned: deep copies, and the very same containers to look for later changes."""

    number: int
    command: Command
    values: dict[str, Any]
    views: dict[str, Any]


@dataclass
class Trace:
    """Everything that an engine returned under a script."""

    entries: list[Entry]

    def assert_unmoved(self) -> None:
        """Nothing that was returned has changed since."""
        for entry in self.entries:
            for name, value in entry.values.items():
                where = (
                    f"command {entry.number} ({_short(entry.command)}) {name}, looked at again after the whole script"
                )
                assert_same(value, entry.views[name], where)


def _preset(shape: torch.Size, wanted: tuple[tuple[Key, tuple[int, ...]], ...], count: int) -> TensorDict:
    values = TensorDict(batch_size=shape)
    for number, (key, tail) in enumerate(wanted):
        full = torch.Size((*shape, *tail))
        values[key] = torch.arange(full.numel(), dtype=torch.float32).reshape(full) + 100 * count + number
    return values


class Playback:
    """A policy that plays given actions, whatever it sees."""

    def __init__(self, actions: Iterable[TensorDictBase]) -> None:
        self.actions = iter(actions)

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        row = next(self.actions)
        return merge(tensordict, row) if tensordict.batch_dims else tensordict.copy().update(row)


def _mask(engine: Engine, rows: Mask) -> Tensor:
    shape = engine.batch_size
    return torch.tensor(rows).reshape((-1, *(1 for _ in shape[1:]))).expand(shape).clone()


def _reset_masks(engine: Engine, rows: Mask, specs: EnvBase) -> TensorDict:
    """The masks, one next to each group of end signals, that reset some rows."""
    masks = TensorDict(batch_size=engine.batch_size)
    for keys in specs.done_keys_groups:
        key = keys[0]
        level = _level(key)
        shape = torch.Size((len(rows), *specs.full_done_spec[key].shape))
        mask = torch.tensor(rows).reshape((-1, *(1 for _ in shape[1:]))).expand(shape).clone()
        if level:
            node: Any = specs.full_done_spec
            for depth in range(len(level)):
                node = node[level[depth]]
                if level[: depth + 1] not in masks.keys(True):
                    masks[level[: depth + 1]] = TensorDict(batch_size=(len(rows), *node.shape))
        place = (*level, "_reset")
        masks[place] = mask
    return masks


def rollout_values(
    engine: Engine, script: Script, actions: Sequence[TensorDictBase], specs: EnvBase, *, contiguous: bool = True
) -> Trace:
    """Drive an engine through a script.

    Args:
        engine: a batched environment, or a `PlainLoop`.
        script: the commands.
        actions: one batch of actions for each step of the script, at least.
        specs: one row's environment, to ask for specs; it is neither stepped nor reset.
        contiguous: what to ask of ``rollout``.

    Returns:
        What each command returned.
    """
    supply: Iterator[tuple[int, TensorDictBase]] = enumerate(actions)
    entries: list[Entry] = []
    root: TensorDictBase | None = None

    def record(number: int, command: Command, **results: Any) -> None:
        values = {name: copy_of(result) for name, result in results.items()}
        views = {name: result.copy() if is_tensor_collection(result) else result for name, result in results.items()}
        entries.append(Entry(number, command, values, views))

    for number, command in enumerate(script):
        if isinstance(command, Seed):
            record(number, command, following=engine.set_seed(command.seed, static_seed=command.static))
        elif isinstance(command, Reset):
            given: TensorDictBase | None = None
            if command.rows is not None:
                given = _reset_masks(engine, command.rows, specs)
                if command.carry:
                    assert root is not None
                    given = merge(root, given)
            elif command.whole:
                assert root is not None
                given = root.copy()
            kwargs: dict[str, Any] = copy.deepcopy(command.kwargs)
            if command.list_of_kwargs is not None:
                kwargs["list_of_kwargs"] = [copy.deepcopy(own) for own in command.list_of_kwargs]
            root = engine.reset(given, **kwargs) if given is not None else engine.reset(**kwargs)
            record(number, command, root=root)
        elif isinstance(command, Step):
            assert root is not None
            count, action = next(supply)
            root = merge(root, action)
            if command.extra:
                extra = _preset(engine.batch_size, (("extra", (2,)), (("policy", "logits"), (3,))), count)
                root = merge(root, extra)
            if command.preset:
                preset = _preset(engine.batch_size, command.preset, count)
                root = merge(root, TensorDict({"next": preset}, batch_size=engine.batch_size))
            if command.rows is not None:
                root.set("_step", _mask(engine, command.rows))
            if command.auto:
                result, root = engine.step_and_maybe_reset(root)
                record(number, command, result=result.exclude("_step"), root=root.exclude("_step"))
            else:
                result = engine.step(root)
                root = engine.step_mdp(result)
                record(number, command, result=result.exclude("_step"))
            root = root.exclude("_step")
        else:
            mine = list(itertools.islice(supply, command.steps))
            result = engine.rollout(
                command.steps,
                Playback(action for _, action in mine),
                tensordict=None if command.auto_reset else root,
                auto_reset=command.auto_reset,
                break_when_any_done=command.break_when_any_done,
                break_when_all_done=command.break_when_all_done,
                return_contiguous=contiguous,
            )
            record(number, command, rollout=result)
            root = None
    return Trace(entries)


def plain_loop(
    factories: Sequence[Callable[[], Any]], script: Script, *, seed: int = 0, contiguous: bool = True
) -> Trace:
    """The oracle's trace of a script, with actions drawn from a seed."""
    actions = make_actions(factories, actions_needed(script), seed)
    engine = PlainLoop(factories)
    try:
        return rollout_values(engine, script, actions, engine.envs[0], contiguous=contiguous)
    finally:
        engine.close(raise_if_closed=False)


# -------------------------------------------------------------------------------------------------------- comparing


def copy_of(value: Any) -> Any:
    """A deep copy that shares nothing with the value."""
    if is_tensor_collection(value) and not isinstance(value, (NonTensorData, NonTensorStack)):
        return value.clone()
    return copy.deepcopy(value)


def _same_objects(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return (
            isinstance(left, np.ndarray)
            and isinstance(right, np.ndarray)
            and left.dtype == right.dtype
            and bool(np.array_equal(left, right))
        )
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(_same_objects(a, b) for a, b in zip(left, right, strict=True))
    return type(left) is type(right) and bool(left == right)


def _assert_same_tensors(left: Tensor, right: Tensor, where: str) -> None:
    assert isinstance(right, Tensor), f"{where}: a tensor, but a {type(right).__name__} in the second"
    assert left.shape == right.shape, f"{where}: shapes {tuple(left.shape)} and {tuple(right.shape)}"
    assert left.dtype == right.dtype, f"{where}: dtypes {left.dtype} and {right.dtype}"
    assert left.device == right.device, f"{where}: devices {left.device} and {right.device}"
    left, right = left.detach(), right.detach()
    bits_left, bits_right = left.contiguous(), right.contiguous()
    if left.dtype.is_floating_point:
        both_nan = left.isnan() & right.isnan()
        bits_left, bits_right = left.masked_fill(both_nan, 0), right.masked_fill(both_nan, 0)
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
        bits_left, bits_right = bits_left.view(integer), bits_right.view(integer)
    if torch.equal(bits_left, bits_right):
        return
    wrong = bits_left != bits_right
    first = tuple(wrong.nonzero()[0].tolist())
    rows = sorted({int(place[0]) for place in wrong.nonzero()}) if wrong.ndim else []
    raise AssertionError(
        f"{where}: rows {rows} differ, first at {first}: {left[first].tolist()} and {right[first].tolist()}"
    )


def _names(value: TensorDictBase) -> set[str]:
    return set(value.keys())


def assert_same(left: Any, right: Any, where: str = "result", *, sizes: bool = True, top: bool = True) -> None:
    """Two results are the same: keys, shapes, dtypes, batch sizes at every level, devices, and values bit for bit.

    Args:
        left: the expected result.
        right: the result at hand.
        where: what to call it in the message.
        sizes: compare batch sizes.
        top: this is the outermost level, whose device is compared.

    Raises:
        AssertionError: naming the key and the row.
    """
    if isinstance(left, Tensor):
        _assert_same_tensors(left, right, where)
        return
    if not is_tensor_collection(left):
        assert _same_objects(left, right), f"{where}: {left!r} and {right!r}"
        return
    assert is_tensor_collection(right), f"{where}: a {type(left).__name__}, but a {type(right).__name__} in the second"
    if isinstance(left, (NonTensorData, NonTensorStack)):
        assert isinstance(right, (NonTensorData, NonTensorStack)), f"{where}: {left!r}, and {right!r}"
        assert left.batch_size == right.batch_size, f"{where}: batch sizes {left.batch_size} and {right.batch_size}"
        objects = (_objects(left), _objects(right))
        assert _same_objects(*objects), f"{where}: {str(objects[0])[:300]} and {str(objects[1])[:300]}"
        return
    if sizes:
        assert left.batch_size == right.batch_size, f"{where}: batch sizes {left.batch_size} and {right.batch_size}"
    if top:
        assert left.device == right.device, f"{where}: devices {left.device} and {right.device}"
    if not isinstance(left, TensorDictBase) or not isinstance(right, TensorDictBase):
        kinds = (_kind(left), _kind(right))
        assert kinds[0] is kinds[1], f"{where}: classes {kinds[0].__name__} and {kinds[1].__name__}"
    if any(isinstance(value, LazyStackedTensorDict) for value in (left, right)):
        dim = next(value.stack_dim for value in (left, right) if isinstance(value, LazyStackedTensorDict))
        assert left.batch_size == right.batch_size, f"{where}: batch sizes {left.batch_size} and {right.batch_size}"
        for index, (one, other) in enumerate(zip(left.unbind(dim), right.unbind(dim), strict=True)):
            assert_same(one, other, f"{where}[{index} of dim {dim}]", sizes=sizes, top=False)
        return
    missing, surplus = _names(left) - _names(right), _names(right) - _names(left)
    assert not missing and not surplus, f"{where}: keys {sorted(missing)} are missing, {sorted(surplus)} are too many"
    for name in sorted(_names(left)):
        assert_same(left.get(name), right.get(name), f"{where} {name!r}", sizes=sizes, top=False)


def _kind(value: Any) -> type:
    """The class of a collection, looking through a lazy stack of tensorclasses."""
    return type(value) if not isinstance(value, TensorDictBase) else TensorDictBase


def _objects(value: Any) -> Any:
    """The Python objects in a non-tensor, spread over its batch."""
    if isinstance(value, NonTensorData):
        data = value.data
        for size in reversed(value.batch_size):
            data = [data] * size
        return data
    return [_objects(part) for part in value.unbind(0)]


def assert_same_traces(
    expected: Trace, actual: Trace, *, only: Sequence[Key] | None = None, sizes: bool = True
) -> None:
    """Two engines returned the same under the same script.

    Args:
        expected: the oracle's trace.
        actual: the other engine's.
        only: compare only these keys of each root (and the whole of next): torchrl's own classes drop or zero-fill
            other root entries.
        sizes: compare batch sizes.
    """
    assert len(expected.entries) == len(actual.entries)
    for left, right in zip(expected.entries, actual.entries, strict=True):
        for name in left.values:
            where = f"command {left.number} ({_short(left.command)}) {name}"
            one, other = left.values[name], right.values[name]
            if only is not None and is_tensor_collection(one):
                one, other = (value.select(*only, "next", strict=False) for value in (one, other))
            assert_same(one, other, where, sizes=sizes)


def root_keys(env: EnvBase) -> list[Key]:
    """The keys of a root that every engine must agree on: observations, end signals and state."""
    return [*env.observation_keys, *env.done_keys, *env.state_keys]
