"""EnvPool's C++ threads under the contract of the batched environments."""

from __future__ import annotations

import difflib
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl._utils import seed_generator
from torchrl.data.tensor_specs import Categorical, Composite
from torchrl.data.utils import DEVICE_TYPING
from torchrl.envs.common import EnvBase
from torchrl.envs.libs import envpool as reference

from shoal.drivers.gymnasium import DONE_KEYS, Details, GymnasiumDriver
from shoal.drivers.spaces import ARRAY, CATEGORICAL, ONE_HOT, Encoding, Plan
from shoal.drivers.torchrl_common import td_key
from shoal.engine.layout import Array
from shoal.engine.schema import Key
from shoal.envs.specs import batch_specs, row_specs

_OURS = ("task_id", "env_type", "num_envs")
_SEEDS = ("seed", "env_seed")


@dataclass
class _Moved:
    """What EnvPool gave for some rows, in their order; every array has the rows as its first dimension."""

    observations: dict[Key, Array]
    reward: Array
    terminated: Array
    truncated: Array


class MultiThreadedEnv(EnvBase):  # type: ignore[misc]
    """N environments of EnvPool, which steps them on C++ threads in this process.

    Only tasks that EnvPool implements can be run (``envpool.list_all_envs()``), those with one player. Keys, dtypes and
    shapes are those of torchrl's ``GymWrapper`` around one such environment, with N in front: the observation's leaves
    (``"observation"``, ``"pixels"``, or the keys of a dict), ``"reward"`` (float32, ``[N, 1]``), ``"done"``,
    ``"terminated"`` and ``"truncated"`` (bool, ``[N, 1]``). Results own their memory.

    It needs the current ``envpool`` release (``pip install shoal[envpool]``) and drives it through its Gymnasium
    interface; torchrl's class of the same name needs the retired ``gym``. What else differs from torchrl's class: the
    leaves have the shapes above, discrete actions are one-hot unless asked otherwise, rows that are done are reset at
    once by `step_and_maybe_reset`, and rows can step alone.

    What EnvPool decides:

    - A row whose episode is over, or has not begun, begins a new one when it is stepped without a reset: the action is
      ignored, next holds the first observation, a reward of 0, and is not done.
    - An episode that ends in the very step that reaches the time limit is truncated, and not terminated as well.
    - Seeds are fixed when a pool is built. `set_seed` therefore builds a new one: all rows lose their episodes and must
      be reset. Without a seed every pool has EnvPool's own default, 42, and gives the same episodes.
    - Values that EnvPool puts in ``info`` are left out.

    Args:
        num_workers: number N of environments, the rows of the batch.
        env_name: EnvPool's name of the task; Gymnasium's prefix ``"ALE/"`` is dropped.

    Keyword Args:
        create_env_kwargs: options of the task and of the pool, as ``envpool.make`` takes them (``num_threads``,
            ``max_episode_steps``, ``seed``, ...).
        categorical_action_encoding: whether discrete values are int64 numbers rather than one-hot vectors.
        disable_env_checker: accepted; EnvPool has no checker.
        frame_skip: how often an action is repeated, at most to the episode's end; rewards are summed.
        device: where results live; ``None`` for CPU tensors in TensorDicts without a device.
        allow_done_after_reset: whether an environment may be done when it has just been reset.

    Raises:
        ImportError: ``envpool`` is not installed.
        ValueError: a task that EnvPool does not have or that has several players; ``num_workers`` or ``frame_skip``
            below 1; options in ``create_env_kwargs`` that this class sets itself.
        TypeError: actions that are neither one array nor one choice; an option that the task does not have.

    Examples:
        >>> from shoal.envs.envpool import MultiThreadedEnv
        >>> env = MultiThreadedEnv(3, "Pendulum-v1")
        >>> env.rollout(5)["next", "reward"].shape
        torch.Size([3, 5, 1])
        >>> env.close()
    """

    _has_frame_skip = True  # torchrl adds a transform that skips frames to classes that do not say this

    def __init__(
        self,
        num_workers: int,
        env_name: str,
        *,
        create_env_kwargs: Mapping[str, Any] | None = None,
        categorical_action_encoding: bool = False,
        disable_env_checker: bool | None = None,
        frame_skip: int | None = None,
        device: DEVICE_TYPING | None = None,
        allow_done_after_reset: bool = False,
    ) -> None:
        super().__init__(device=device, allow_done_after_reset=allow_done_after_reset)
        self.num_workers = operator.index(num_workers)
        if self.num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, found {num_workers}")
        self.frame_skip = 1 if frame_skip is None else operator.index(frame_skip)
        if self.frame_skip < 1:
            raise ValueError(f"frame_skip must be at least 1, found {frame_skip}")
        self.env_name = env_name.replace("ALE/", "")
        self.create_env_kwargs: dict[str, Any] = deepcopy(dict(create_env_kwargs or {}))
        self._seeds: list[int] | None = None
        self._pool: Any = None
        self._latest: dict[Key, Array] = {}
        self._ended = False
        self.is_closed = True
        self._take_specs(categorical_action_encoding)

    def _take_specs(self, categorical: bool) -> None:
        """Reads the task's spaces, for which no pool need be built."""
        spec = self._task_spec()
        with _quiet_spaces():
            spaces = _Spaces(_unbounded(spec.observation_space), spec.action_space)
        description = GymnasiumDriver(spaces, 0, categorical=categorical).describe()
        details: Details = description.details
        action = details.action.encoding
        if action is None or action.kind not in (ARRAY, ONE_HOT, CATEGORICAL) or len(action.sizes) > 1:
            raise TypeError(f"the actions of EnvPool's {self.env_name!r} are no single array: {spec.action_space}")
        one_hot = GymnasiumDriver(spaces, 0).describe()
        rows = [row_specs(one_hot)] * self.num_workers
        input_spec, output_spec = batch_specs(rows, alike=True)
        if categorical:
            _make_categorical(output_spec["full_observation_spec"], details.observation.leaves())
            _make_categorical(input_spec["full_action_spec"], details.action.leaves(("action",)))
        if self.device is not None:
            input_spec, output_spec = input_spec.to(self.device), output_spec.to(self.device)
        self.__dict__["_batch_size"] = torch.Size([self.num_workers])
        self.__dict__["_input_spec"] = input_spec
        self.__dict__["_output_spec"] = output_spec
        self._observations = details.observation.leaves()
        self._sources = dict(_sources(details.observation))
        self._action = action
        shape = list(spec.action_array_spec.values())[-1].shape
        self._action_shape = tuple(size for size in shape if size != -1)
        self._raw = {
            key: np.zeros((self.num_workers, *encoding.space.shape), encoding.space.dtype)
            for key, encoding in self._observations.items()
        }
        self.empty_cache()
        self.set_spec_lock_()

    def _task_spec(self) -> Any:
        library = self.lib
        if self.env_name not in library.list_all_envs():
            alike = difflib.get_close_matches(self.env_name, library.list_all_envs(), 3)
            hint = f"; did you mean {' or '.join(alike)}?" if alike else "; envpool.list_all_envs() has their names"
            raise ValueError(f"EnvPool has no task {self.env_name!r}{hint}")
        taken = [name for name in _OURS if name in self.create_env_kwargs]
        if taken:
            raise ValueError(f"create_env_kwargs must not have {', '.join(taken)}: MultiThreadedEnv sets that itself")
        spec = library.make_spec(self.env_name, **self._options())
        # EnvPool aborts the whole process where such a task is built for fewer players than it has.
        if spec.config.max_num_players != 1:
            raise ValueError(
                f"EnvPool's {self.env_name!r} has up to {spec.config.max_num_players} players: MultiThreadedEnv runs "
                "tasks with one player"
            )
        if spec.config.batch_size not in (0, self.num_workers):
            raise ValueError(
                f"create_env_kwargs has batch_size={spec.config.batch_size}: a step here answers for all "
                f"{self.num_workers} rows, so leave it out (a mask under '_step' picks rows)"
            )
        return spec

    def _options(self) -> dict[str, Any]:
        options = {"num_envs": self.num_workers, **self.create_env_kwargs}
        if self._seeds is not None:
            options = {name: value for name, value in options.items() if name not in _SEEDS}
            options["env_seed"] = self._seeds
        return options

    @property
    def lib(self) -> Any:
        """The ``envpool`` module.

        Raises:
            ImportError: it is not installed.
        """
        try:
            return import_module("envpool")
        except ImportError as error:
            raise ImportError(
                "MultiThreadedEnv needs the envpool package, which is not installed here: pip install shoal[envpool]"
            ) from error

    # Life cycle.

    def start(self) -> None:
        """Builds the pool; the first use does the same.

        Raises:
            RuntimeError: it is started already.
        """
        if not self.is_closed:
            raise RuntimeError("the environment is started already")
        self._build()

    def _build(self) -> None:
        self._pool = self.lib.make_gymnasium(self.env_name, **self._options())
        with _quiet_spaces():
            _ = self._pool.observation_space  # the pool reads it in its first answer, and keeps it
        self._latest = {key: array.copy() for key, array in self._raw.items()}
        self._latest.update({key: np.zeros(self.num_workers, np.bool_) for key in DONE_KEYS})
        self.is_closed = self._ended = False

    def _started(self) -> Any:
        if self.is_closed:
            self.start()
        return self._pool

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Ends the pool and its threads; the next use builds a new one, with the same seeds. Specs stay readable.

        Args:
            raise_if_closed: whether closing a closed environment is an error.

        Raises:
            RuntimeError: the environment is closed already.
        """
        if self._ended and raise_if_closed:
            raise RuntimeError("the environment is closed already")
        pool, self._pool, self._latest = self._pool, None, {}
        self.is_closed = self._ended = True
        if pool is not None:
            pool.close()

    def __enter__(self) -> MultiThreadedEnv:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(raise_if_closed=False)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.update(_pool=None, _latest={}, is_closed=True, _ended=False, _collector=None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(env={self.env_name}, num_workers={self.num_workers}, "
            f"batch_size={self.batch_size}, device={self.device})"
        )

    # Seeds.

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seeds the rows: row 0 with ``seed``, each further row with the next value of torchrl's chain.

        EnvPool fixes seeds when it builds a pool, so this builds a new one: all rows must be reset. EnvPool's seeds are
        of 32 bits with a sign; a seed reaches it modulo 2**32.

        Args:
            seed: any integer that torchrl's chain takes; ``None`` changes nothing.
            static_seed: whether all rows get the same seed.

        Returns:
            The next value of the chain (``seed`` itself if static).
        """
        if seed is None:
            return None
        following: int = operator.index(seed)
        seeds = []
        for _ in range(self.num_workers):
            seeds.append((following + 2**31) % 2**32 - 2**31)
            if not static_seed:
                following = seed_generator(following)
        self._seeds = seeds
        self.close(raise_if_closed=False)
        self._build()
        return following

    def _set_seed(self, seed: int | None) -> None:
        """Not used: `set_seed` seeds the rows."""

    # Data.

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        if kwargs:
            raise TypeError(
                f"EnvPool's resets take no arguments, found {', '.join(kwargs)}: seed with set_seed, and configure "
                "with create_env_kwargs"
            )
        self._started()
        mask = None if tensordict is None else tensordict.get("_reset", None)
        rows = self._rows(mask, "_reset")
        if rows is None:
            self._reset_rows(None)
            return self._result(self._encoded(self._latest))
        if len(rows):
            self._reset_rows(rows)
        assert tensordict is not None  # it has the mask
        return self._result(self._where(rows, self._encoded(self._latest), tensordict))

    def _reset_proc_data(self, tensordict: TensorDictBase | None, tensordict_reset: TensorDictBase) -> TensorDictBase:
        if tensordict is None:
            return tensordict_reset
        tensordict.pop("_reset", None)
        return tensordict.update(tensordict_reset)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        pool = self._started()
        rows = self._rows(tensordict.get("_step", None), "_step")
        actions = self._actions(tensordict, rows)
        moved = self._move(pool, actions, rows)
        done = moved.terminated | moved.truncated
        raw = dict(moved.observations)
        raw.update(zip(DONE_KEYS, (done, moved.terminated, moved.truncated), strict=True))
        self._remember(raw, rows)
        leaves = self._encoded(raw)
        leaves["reward",] = torch.from_numpy(moved.reward).to(torch.float32, copy=True).reshape(-1, 1)
        if rows is None:
            return self._result(leaves)
        index = torch.from_numpy(rows).long()
        whole = {
            key: value.new_zeros(self.num_workers, *value.shape[1:]).index_copy_(0, index, value)
            for key, value in leaves.items()
        }
        return self._result(self._where(rows, whole, tensordict))

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Steps, and resets the rows that are done.

        Args:
            tensordict: of the batch's size, with the actions; a mask under ``"_step"`` (bool, ``[N]`` or ``[N, 1]``)
                picks the rows that move.

        Returns:
            The input with ``"next"`` set (rows that are done keep their terminal observation there), and the root for
            the following step (rows that are done hold the first observation of their new episode).

        Raises:
            RuntimeError: an action is missing or has the wrong shape.
            ValueError: an action is outside of its discrete space.
        """
        moved = self._rows(tensordict.get("_step", None), "_step")
        tensordict = self.step(tensordict)
        tensordict.pop("_step", None)
        over = self._latest["done",].copy()
        if moved is not None:
            over[np.setdiff1d(np.arange(self.num_workers), moved)] = False
        if over.any():
            self._reset_rows(np.flatnonzero(over).astype(np.int32))
        own = self._encoded(self._latest)
        if moved is not None:
            own = self._where(moved, own, tensordict.get("next"))
        root: TensorDictBase = self._step_mdp(tensordict)
        return tensordict, root.update(self._result(own))

    def _rows(self, mask: torch.Tensor | None, name: str) -> Array | None:
        """The rows that a mask picks, as EnvPool numbers them; None for all.

        Raises:
            RuntimeError: the mask has not one entry a row.
        """
        if mask is None:
            return None
        if mask.numel() == 1 and not mask.ndim:
            mask = mask.expand(self.num_workers)
        if mask.numel() != self.num_workers or mask.shape[0] != self.num_workers:
            raise RuntimeError(
                f"the mask under {name!r} has shape {tuple(mask.shape)}: expected ({self.num_workers}, 1) or "
                f"({self.num_workers},), one entry a row"
            )
        picked = mask.reshape(-1).cpu().numpy()
        return None if picked.all() else np.flatnonzero(picked).astype(np.int32)

    def _actions(self, tensordict: TensorDictBase, rows: Array | None) -> Array:
        """The actions of the rows that move, as EnvPool takes them."""
        encoding, found = self._action, tensordict.get("action", None)
        expected = (self.num_workers, *encoding.shape)
        if found is None:
            raise RuntimeError(
                f"the input has no 'action': expected an action of shape {expected} "
                f"({self.num_workers} rows of {encoding.shape}, {encoding.dtype})"
            )
        if tuple(found.shape) != expected:
            raise RuntimeError(
                f"the input's 'action' has shape {tuple(found.shape)}: expected {expected}, {self.num_workers} rows of "
                f"{encoding.shape}"
            )
        dtype = getattr(torch, encoding.dtype)
        if found.dtype != dtype and not torch.can_cast(found.dtype, dtype):
            raise RuntimeError(f"the input's 'action' has dtype {found.dtype}: expected {dtype}")
        value = found.detach().to("cpu", dtype)
        if rows is not None:
            value = value[torch.from_numpy(rows).long()]
        if encoding.kind == ONE_HOT:
            value = value.argmax(-1) + encoding.start
        elif encoding.kind == CATEGORICAL:
            # Not every task of EnvPool looks: some would read memory that is not theirs.
            if (value < 0).any() or (value >= encoding.sizes[0]).any():
                raise ValueError(f"the input's 'action' is outside of {encoding.space}: {value.tolist()}")
            value = value + encoding.start
        array: Array = value.numpy()
        return array.reshape(len(array), *self._action_shape)

    def _move(self, pool: Any, actions: Array, rows: Array | None) -> _Moved:
        """Steps some rows, ``frame_skip`` times or to the end of their episodes."""
        moved = self._answer(*pool.step(actions, rows)[:4])
        for _ in range(self.frame_skip - 1):
            alive = np.flatnonzero(~(moved.terminated | moved.truncated))
            if not len(alive):
                break
            names = alive.astype(np.int32) if rows is None else rows[alive]
            more = self._answer(*pool.step(actions[alive], names)[:4])
            for key, array in more.observations.items():
                moved.observations[key][alive] = array
            moved.reward[alive] += more.reward
            moved.terminated[alive], moved.truncated[alive] = more.terminated, more.truncated
        return moved

    def _answer(self, observation: Any, reward: Array, terminated: Array, truncated: Array) -> _Moved:
        return _Moved(self._read(observation), reward, terminated, truncated)

    def _read(self, observation: Any) -> dict[Key, Array]:
        """The leaves of an observation as EnvPool gives them."""
        found = {}
        for key, path in self._sources.items():
            value = observation
            for name in path:
                value = value[name]
            found[key] = value
        return found

    def _reset_rows(self, rows: Array | None) -> dict[Key, Array]:
        """Resets rows, all of them for None. Returns their raw leaves in that order."""
        raw = self._read(self._pool.reset(rows)[0])
        count = self.num_workers if rows is None else len(rows)
        raw.update({key: np.zeros(count, np.bool_) for key in DONE_KEYS})
        self._remember(raw, rows)
        return raw

    def _remember(self, raw: dict[Key, Array], rows: Array | None) -> None:
        """Keeps the rows' latest values. EnvPool never writes again to an array it gave; no result may share one."""
        if rows is None:
            self._latest = raw
            return
        for key, array in raw.items():
            self._latest[key][rows] = array.reshape(len(rows), *self._latest[key].shape[1:])

    def _encoded(self, raw: dict[Key, Array]) -> dict[Key, torch.Tensor]:
        """Tensors of leaves, in memory of their own."""
        leaves = {key: _encode(encoding, raw[key], key) for key, encoding in self._observations.items()}
        leaves.update({key: torch.from_numpy(raw[key]).clone().reshape(-1, 1) for key in DONE_KEYS})
        return leaves

    def _where(self, rows: Array, leaves: dict[Key, torch.Tensor], rest: TensorDictBase) -> dict[Key, torch.Tensor]:
        """``leaves`` with the values that ``rest`` has for the other rows, in the place of their own."""
        mask = torch.zeros(self.num_workers, dtype=torch.bool)
        mask[torch.from_numpy(rows).long()] = True
        result = {}
        for key, value in leaves.items():
            other = rest.get(td_key(key), None)
            if other is not None and other.shape == value.shape:
                wide = mask.reshape(-1, *[1] * (value.ndim - 1))
                value = torch.where(wide, value, other.detach().to(value.device, value.dtype))
            result[key] = value
        return result

    def _result(self, leaves: dict[Key, torch.Tensor]) -> TensorDictBase:
        if self.device is not None:
            leaves = {key: value.to(self.device) for key, value in leaves.items()}
        return TensorDict(
            {td_key(key): value for key, value in leaves.items()}, batch_size=self.batch_size, device=self.device
        )


class _Spaces(gymnasium.Env[Any, Any]):
    """The spaces of one environment of a pool."""

    def __init__(self, observation: Any, action: Any) -> None:
        self.observation_space = observation
        self.action_space = action


@contextmanager
def _quiet_spaces() -> Iterator[None]:
    """Silences what Gymnasium says of the precision of EnvPool's bounds, which no user can change."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting.*")
        yield


def _unbounded(space: Any) -> Any:
    """A space without the bounds that EnvPool gives where it knows none.

    Those are C++'s ``numeric_limits::min`` and ``max``; for floats the former is the smallest positive number, so that
    EnvPool's own negative values lie outside.
    """
    if isinstance(space, gymnasium.spaces.Dict):
        return gymnasium.spaces.Dict({name: _unbounded(child) for name, child in space.items()})
    if not isinstance(space, gymnasium.spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return space
    limits = np.finfo(space.dtype)
    low = np.where(space.low == limits.tiny, -np.inf, space.low)
    high = np.where(space.high == limits.max, np.inf, space.high)
    return gymnasium.spaces.Box(low, high, space.shape, space.dtype)


def _sources(plan: Plan, key: Key = (), path: tuple[Any, ...] = ()) -> Iterable[tuple[Key, tuple[Any, ...]]]:
    """Of each leaf: its key, and the names that lead to it in EnvPool's observation."""
    if plan.encoding is not None:
        yield key, path
    for name, child in plan.children.items():
        source = plan.sources[name]
        yield from _sources(child, (*key, name), path if source is None else (*path, source))


def _encode(encoding: Encoding, array: Array, key: Key) -> torch.Tensor:
    """The tensor of one leaf, ``[rows, *encoding.shape]``, in memory of its own."""
    count, dtype = len(array), getattr(torch, encoding.dtype)
    if encoding.kind == ARRAY:
        # Copied by numpy: torch shares a copy of this size out to threads, which costs more than it saves.
        return torch.from_numpy(array.astype(encoding.dtype).reshape(count, *encoding.shape))
    index = torch.from_numpy(array).to(torch.int64, copy=True).reshape(count) - encoding.start
    if (index < 0).any() or (index >= encoding.sizes[0]).any():
        raise ValueError(f"observation {'.'.join(key)!r}: found {array.tolist()}, outside of {encoding.space}")
    if encoding.kind == ONE_HOT:
        index = torch.zeros(count, encoding.sizes[0], dtype=dtype).scatter_(1, index[:, None], 1)
    result: torch.Tensor = index.to(dtype)
    return result


def _make_categorical(spec: Composite, encodings: dict[Key, Encoding]) -> None:
    """Writes specs of numbers over those of one-hot vectors."""
    for key, encoding in encodings.items():
        if encoding.kind == CATEGORICAL:
            shape = torch.Size([*spec.shape, *encoding.shape])
            spec[td_key(key)] = Categorical(encoding.sizes[0], shape=shape, dtype=getattr(torch, encoding.dtype))


reference.MultiThreadedEnv.register(MultiThreadedEnv)

__all__ = ["MultiThreadedEnv"]
