"""The contract that serial and parallel environments share: masks, keys, devices, results, life cycle."""

from __future__ import annotations

import functools
import operator
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torchrl._utils import seed_generator
from torchrl.data.utils import DEVICE_TYPING
from torchrl.envs import batched_envs as reference
from torchrl.envs.common import EnvBase
from torchrl.envs.utils import (
    _aggregate_end_of_traj,
    _make_compatible_policy,
    _terminated_or_truncated,
    _update_during_reset,
)

from shoal.drivers.torchrl_common import node_sizes, td_key
from shoal.engine import pickling
from shoal.engine.faults import FaultLog, FaultRecord, RestartPolicy
from shoal.engine.pool import DEFAULT_TIMEOUT
from shoal.engine.protocol import Opcode, ResetInput
from shoal.engine.recovery import Engine
from shoal.engine.rows import Builder
from shoal.engine.schema import NEXT, REWARD, ROOT
from shoal.envs.arguments import (
    Factory,
    checked_policy,
    checked_processes,
    copied,
    default_timeout,
    factories_of_rows,
    kwargs_of_rows,
)
from shoal.envs.plain import PlainWay
from shoal.envs.remote import RemoteAttributes
from shoal.envs.results import Results
from shoal.envs.rollout import draws_in_place, in_place, policy_rollout, random_rollout
from shoal.envs.session import Session
from shoal.envs.specs import batch_specs
from shoal.envs.stats import Stats
from shoal.envs.views import Views

_IN_PLACE = frozenset(
    {"tensordict", "auto_reset", "break_when_any_done", "break_when_all_done", "return_contiguous", "trust_policy"}
)
"""Arguments of a rollout that may be written in place."""

_UNTIL_USED = ("_session", "_results", "_view_of")


def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Counts the time in a method that moves the rows, for `BatchedEnv.stats`."""

    @functools.wraps(method)
    def call(self: BatchedEnv, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:  # a command that fails has taken its time too
            session: Session | None = self.__dict__["_session"]
            if session is not None:
                session.meter.moving += time.perf_counter() - start

    return call


class BatchedEnv(RemoteAttributes, Views, EnvBase):  # type: ignore[misc]
    """What `SerialEnv` and `ParallelEnv` have in common; not to be used itself.

    Args:
        num_workers: number N of sub-environments, the rows of the batch.
        create_env_fn: builds one sub-environment, or a sequence of N such factories. A factory returns a torchrl
            `EnvBase` or a `gymnasium.Env`; the latter behaves as if wrapped in torchrl's ``GymWrapper``.

    Keyword Args:
        create_env_kwargs: keyword arguments of the factories: one dict, copied for each row, or a sequence of N dicts.
        share_individual_td: ``True`` for results that are lazy stacks of one TensorDict a row; ``None`` (default) for
            that only where the rows do not stack.
        device: where results live; ``None`` for the sub-environments' device.
        use_buffers: how leaves travel: ``None`` (default) by shared memory where their shape is fixed and by message
            elsewhere, ``False`` always by message; ``True`` like ``None``, with a warning where some leaf cannot.
        shared_memory: whether buffers lie in anonymous shared memory (default).
        memmap: whether buffers lie in a file on disk instead; pass ``shared_memory=False`` with it.
        num_threads: torch threads of this process while the environment is started; ``None`` leaves them alone.
        num_sub_threads: threads of the numeric libraries in a worker, set before an environment is built.
        mp_start_method: how workers start, see `ParallelEnv`.
        processes: how many workers carry the rows, see `ParallelEnv`.
        step_timeout: seconds that one command may take, see `ParallelEnv`.
        build_timeout: seconds that building the sub-environments may take, see `ParallelEnv`.
        on_failure: ``"raise"`` (default): a fault is raised. ``"restart"``: the sub-environment is built anew, in a new
            worker process if its own is gone; its row comes back truncated, with its last good observation and no
            reward, and the fault is logged and listed in `faults`. A `RestartPolicy` says how often, and how fast;
            after that the fault is raised.
        shutdown_timeout: seconds that workers have to close on their own before they are killed.
        serial_for_single: ``ParallelEnv(1, ..., serial_for_single=True)`` returns a `SerialEnv`.
        non_blocking: accepted; copies between devices are complete before a result is returned.
        policy_proof: accepted, without effect, as in torchrl.
        consolidate: accepted; messages are always packed in one block.
        metadata_from_workers: accepted; specs always come from the workers.
        auto_wrap_envs: accepted; lambdas always work.
        daemon: accepted; workers always end with this process.
        pin_memory: gone.
        allow_step_when_done: gone.

    Raises:
        RuntimeError: a sequence of another length than N; ``shared_memory`` and ``memmap`` together.
        TypeError: something else than factories was given.
        ValueError: ``pin_memory`` or ``allow_step_when_done``, which are gone; sub-environments on several devices and
            no ``device``.
    """

    _parallel = False
    auto_complete_done_specs = False  # each sub-environment has completed its own

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Factory | Sequence[Factory],
        *,
        create_env_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        pin_memory: bool = False,
        share_individual_td: bool | None = None,
        shared_memory: bool = True,
        memmap: bool = False,
        policy_proof: Callable[..., Any] | None = None,
        device: DEVICE_TYPING | None = None,
        allow_step_when_done: bool = False,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        serial_for_single: bool = False,
        non_blocking: bool = False,
        mp_start_method: str | None = None,
        use_buffers: bool | None = None,
        metadata_from_workers: bool = False,
        consolidate: bool = True,
        daemon: bool = False,
        shutdown_timeout: float = 10.0,
        auto_wrap_envs: bool = True,
        processes: int | None = None,
        step_timeout: float | None = None,
        build_timeout: float | None = None,
        on_failure: str | RestartPolicy = "raise",
    ) -> None:
        super().__init__(device=None)
        num_workers = operator.index(num_workers)
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, found {num_workers}")
        for name, value in (("pin_memory", pin_memory), ("allow_step_when_done", allow_step_when_done)):
            if value:
                raise ValueError(f"{name}=True is not supported any more; leave it out")
        if shared_memory and memmap:
            raise RuntimeError("shared_memory and memmap exclude each other: pass shared_memory=False with memmap=True")
        if mp_start_method is not None and not self._parallel:
            raise TypeError(
                f"{type(self).__name__} starts no processes: mp_start_method={mp_start_method!r} has no use"
            )
        self.num_workers = num_workers
        self.create_env_fn, self._single_task = factories_of_rows(create_env_fn, num_workers)
        self.create_env_kwargs = kwargs_of_rows(create_env_kwargs, num_workers)
        self.share_individual_td = share_individual_td
        self.policy_proof = policy_proof
        self.num_threads = num_threads
        self.num_sub_threads = num_sub_threads
        self.serial_for_single = serial_for_single
        self.consolidate = consolidate
        self.daemon = daemon
        self.shutdown_timeout = float(shutdown_timeout)
        self.step_timeout = default_timeout() if step_timeout is None else float(step_timeout)
        self.build_timeout = max(self.step_timeout, DEFAULT_TIMEOUT) if build_timeout is None else float(build_timeout)
        self._policy = checked_policy(on_failure)
        self._faults = FaultLog()
        self._share_memory = shared_memory
        self._memmap = memmap
        self._non_blocking = non_blocking
        self._mp_start_method = mp_start_method
        self._use_buffers = use_buffers
        self._processes = checked_processes(processes, num_workers)
        self._asked_device = None if device is None else torch.device(device)
        self._threads_before: int | None = None
        self._seeds: list[Any] | None = None
        self.__dict__.update(dict.fromkeys(_UNTIL_USED))
        self.is_closed = True
        self._open()

    # Life cycle.

    def _make_engine(self, builders: list[Builder]) -> Engine:
        raise NotImplementedError

    def _open(self) -> Session:
        """Brings up the sub-environments, and with them the specs; that does not count as a start."""
        with torch.inference_mode(False):
            return self._open_ordinarily()

    def _open_ordinarily(self) -> Session:
        builders = [
            Builder(factory, copied(kwargs))  # what changes later counts from the next start on
            for factory, kwargs in zip(self.create_env_fn, self.create_env_kwargs, strict=True)
        ]
        engine = self._make_engine(builders)
        try:
            session = Session(
                engine, use_buffers=self._use_buffers is not False, policy=self._policy, faults=self._faults
            )
            session.timeout = self.step_timeout
            self._take_specs(session)
        except BaseException:
            engine.close()
            raise
        self.__dict__["_session"] = session
        return session

    def _take_specs(self, session: Session) -> None:
        rows = session.rows
        if self._use_buffers and any(not leaf.fixed for row in rows for leaf in row.schema.leaves):
            warnings.warn(
                "use_buffers=True was passed, but some leaves have no fixed shape; those travel by message",
                stacklevel=4,
            )
        alike = self._single_task or all(row.schema == rows[0].schema for row in rows)
        if self._single_task:
            for index, row in enumerate(rows):
                if row.schema != rows[0].schema:
                    raise RuntimeError(
                        f"the same factory gave row 0 and row {index} different leaves: {rows[0].schema.leaves} and "
                        f"{row.schema.leaves}; pass a list of factories for environments that differ"
                    )
        lazy = self.share_individual_td is True
        if not alike:
            if self.share_individual_td is False:
                raise ValueError(
                    "share_individual_td=False, but the sub-environments have different leaves and do not stack"
                )
            lazy = True
        device = self._asked_device
        if device is None:
            devices = {row.device for row in rows}
            if len(devices) > 1:
                raise ValueError(
                    f"the sub-environments live on several devices ({', '.join(map(str, devices))}): say with device= "
                    "where the results are to live"
                )
            device = devices.pop()
        input_spec, output_spec = batch_specs(rows, alike=self._single_task)
        if device is not None:
            input_spec, output_spec = input_spec.to(device), output_spec.to(device)
        size = torch.Size([len(rows), *rows[0].batch_size])
        self.__dict__["_device"] = device
        self.__dict__["_batch_size"] = size
        self.__dict__["_input_spec"] = input_spec
        self.__dict__["_output_spec"] = output_spec
        self.__dict__["_lazy_results"] = lazy
        self.__dict__["_dummy_env_str"] = rows[0].text
        self.empty_cache()
        self.set_spec_lock_()
        self._make_results(session, list(range(len(rows))))

    def _make_results(self, session: Session, rows: list[int]) -> None:
        nodes = node_sizes(*(self.output_spec[name] for name in self.output_spec.keys()))
        schema = session.rows[rows[0]].schema
        single = [key[0] for key in self._keys([*self.reset_keys, *self.done_keys]) if len(key) == 1]
        rewards = [
            key[0]
            for key, leaf in schema.by_area[NEXT].items()
            if leaf.role == REWARD and len(key) == 1 and key not in schema.by_area[ROOT]
        ]
        not_root = frozenset({"next", "_step", *single, *rewards})
        results = Results(
            session, rows, self.batch_size, self.device, nodes, lazy=self._lazy_results, not_root=not_root
        )
        # Like the specs, these stay known when the environment is closed.
        self.__dict__["_dynamic"] = not results.dense
        self.__dict__["_set_state"] = all(session.rows[row].supports_set_state for row in rows)
        self.__dict__["_results"] = results

    @staticmethod
    def _keys(keys: Sequence[Any]) -> list[tuple[str, ...]]:
        return [(key,) if isinstance(key, str) else tuple(key) for key in keys]

    def _started(self, *, stepping: bool = False) -> Session:
        """The session, started if it was not.

        Raises:
            RuntimeError: a step of an environment that a fault has closed: it has lost where it was.
        """
        if self.__dict__["_view_of"] is not None:
            return self._viewed()
        lost: Session | None = self.__dict__["_session"]
        if stepping and lost is not None and lost.closed:
            raise RuntimeError(
                "a fault has closed the environment, and the state of its rows is gone with it: reset it, which starts "
                "it afresh, before it steps again"
            )
        if self.is_closed:
            self.start()
        session: Session = self.__dict__["_session"]
        return session

    @property
    def is_closed(self) -> bool:
        """Whether the environment is not started: never used yet, closed, or ended by a fault."""
        session: Session | None = self.__dict__.get("_session")
        return not self.__dict__.get("_in_use", False) or session is None or session.closed

    @is_closed.setter
    def is_closed(self, value: bool) -> None:
        self.__dict__["_in_use"] = not value

    def _viewed(self) -> Session:
        session: Session | None = self.__dict__["_session"]
        if session is None or session.closed:
            raise RuntimeError(
                "this is a view of rows of an environment, and it or the environment has been closed: take a new view"
            )
        return session

    def start(self) -> None:
        """Starts the environment; its first use does the same.

        Raises:
            RuntimeError: it is started already.
        """
        if not self.is_closed:
            raise RuntimeError("the environment is started already")
        session = self.__dict__["_session"]
        if session is None or session.closed:
            self._open()
        if self.num_threads is not None:
            if self._threads_before is None:  # a start after a fault finds our own number
                self._threads_before = torch.get_num_threads()
            torch.set_num_threads(self.num_threads)
        self.is_closed = False

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Closes the sub-environments and ends the workers; the next use starts them afresh. Specs stay readable.

        Args:
            raise_if_closed: whether closing a closed environment is an error.

        Raises:
            RuntimeError: the environment is closed already.
        """
        session: Session | None = self.__dict__.get("_session")
        if session is None and raise_if_closed and self.is_closed:
            raise RuntimeError("the environment is closed already")
        self.is_closed = True
        self.__dict__["_session"] = self.__dict__["_results"] = None
        if self.__dict__["_view_of"] is not None:
            return  # the rows belong to the environment that this is a view of
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None
        if session is not None and not session.closed:
            session.close()

    @property
    def step_timeout(self) -> float:
        """Seconds that one command of a `ParallelEnv` may take."""
        return float(self.__dict__["_step_timeout"])

    @step_timeout.setter
    def step_timeout(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"step_timeout must be a positive number of seconds, found {seconds!r}")
        self.__dict__["_step_timeout"] = float(seconds)
        session: Session | None = self.__dict__.get("_session")
        if session is not None:
            session.timeout = float(seconds)

    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        """Within this context each command of a `ParallelEnv` may take so many seconds, whatever ``step_timeout`` is.

        Example:
            >>> with env.time_limit(60.0):  # the first reset loads a level
            ...     tensordict = env.reset()
        """
        before, self.step_timeout = self.step_timeout, seconds
        try:
            yield
        finally:
            self.step_timeout = before

    def stats(self) -> Stats:
        """Where the time went since the start: per row and process the time in the environments, and the time of this
        process in waiting for them, in the face and outside. Always on; `print` it for a table.

        Raises:
            RuntimeError: the environment is not started.
        """
        session: Session | None = self.__dict__["_session"]
        if session is None or session.closed:
            raise RuntimeError("there are no stats of an environment that is not started: start it, or reset it, first")
        return session.meter.stats(session.engine)

    @property
    def faults(self) -> list[FaultRecord]:
        """What has happened to which row and when: the last 1,000 faults, the oldest first.

        They are numbered from 1 on, so the last one's ``number`` is how many there have been.
        """
        return self._faults.records

    def __enter__(self) -> BatchedEnv:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(raise_if_closed=False)

    def _reconfigured(self) -> None:
        """Forgets sub-environments that were built before their configuration changed."""
        session: Session | None = self.__dict__.get("_session")
        if session is not None:
            self.__dict__["_session"] = self.__dict__["_results"] = None
            session.close()

    def update_kwargs(self, kwargs: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Changes the factories' keyword arguments for the next start.

        Args:
            kwargs: one dict for all rows, or N of them.

        Raises:
            RuntimeError: another number of dicts than rows.
        """
        new = [kwargs] * self.num_workers if isinstance(kwargs, Mapping) else list(kwargs)
        if len(new) != self.num_workers:
            raise RuntimeError(f"update_kwargs was given {len(new)} dicts for {self.num_workers} sub-environments")
        for old, change in zip(self.create_env_kwargs, new, strict=True):
            old.update(change)
        if self.is_closed:
            self._reconfigured()

    def configure_parallel(
        self,
        *,
        use_buffers: bool | None = None,
        shared_memory: bool | None = None,
        memmap: bool | None = None,
        mp_start_method: str | None = None,
        num_threads: int | None = None,
        num_sub_threads: int | None = None,
        non_blocking: bool | None = None,
        daemon: bool | None = None,
        shutdown_timeout: float | None = None,
    ) -> BatchedEnv:
        """Changes how the environment runs, before its first use; see the class for the arguments.

        Raises:
            RuntimeError: it is started already.
        """
        if not self.is_closed:
            raise RuntimeError("configure_parallel must be called before the environment is started")
        changes = {
            "_use_buffers": use_buffers,
            "_share_memory": shared_memory,
            "_memmap": memmap,
            "_mp_start_method": mp_start_method,
            "num_threads": num_threads,
            "num_sub_threads": num_sub_threads,
            "_non_blocking": non_blocking,
            "daemon": daemon,
            "shutdown_timeout": None if shutdown_timeout is None else float(shutdown_timeout),
        }
        for name, value in changes.items():
            if value is not None:
                setattr(self, name, value)
        self._reconfigured()
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.update(dict.fromkeys(_UNTIL_USED))
        state["create_env_fn"] = _Factories(state["create_env_fn"])
        state.update(_in_use=False, _threads_before=None, _collector=None, _faults=FaultLog())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__dict__["create_env_fn"] = state["create_env_fn"].factories

    def __repr__(self) -> str:
        return f"{type(self).__name__}(\n\tenv={self._dummy_env_str}, \n\tbatch_size={self.batch_size})"

    # Data.

    def _set_seed(self, seed: int | None) -> None:
        """Not used: `set_seed` seeds the sub-environments."""

    @_timed
    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        session, results = self._started(), self.__dict__["_results"]
        places, mask_keys = self._places_to_reset(tensordict)
        given = self._reset_given(tensordict, kwargs, places)
        rows = self._engine_rows(places)
        everywhere = len(places) == len(results.rows)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._parallel):
            if places:
                values = session.run(Opcode.RESET, None if everywhere and results.whole else rows, given)
            if everywhere:
                return results.read(ROOT, values)
            rest = None if tensordict is None else tensordict.exclude(*mask_keys)
            return results.latest(rest, places)

    def _engine_rows(self, places: Sequence[int]) -> list[int]:
        rows = self.__dict__["_results"].rows
        return [rows[place] for place in places]

    def _places_to_reset(self, tensordict: TensorDictBase | None) -> tuple[list[int], list[Any]]:
        """The rows to reset, and the keys of the masks that say so."""
        everywhere = list(range(self.num_workers))
        if tensordict is None:
            return everywhere, []
        if "_reset" in tensordict.keys():
            mask = tensordict.get("_reset")
            keys: list[Any] = ["_reset"]
        else:
            keys = [key for key in self.reset_keys if tensordict.get(key, None) is not None]
            if not keys:
                return everywhere, []
            mask = _aggregate_end_of_traj(tensordict, reset_keys=self.reset_keys)
        if not mask.ndim:
            return (everywhere if bool(mask) else []), keys
        rows = mask.reshape(mask.shape[0], -1).any(-1)
        if rows.shape[0] != self.num_workers:
            raise RuntimeError(
                f'the mask under "_reset" has shape {tuple(mask.shape)}: expected a leading dimension of '
                f"{self.num_workers}, one entry a row"
            )
        return rows.nonzero().flatten().tolist(), keys

    def _reset_given(
        self, tensordict: TensorDictBase | None, kwargs: dict[str, Any], places: list[int]
    ) -> dict[int, ResetInput] | None:
        kwargs = dict(kwargs)
        own = kwargs.pop("list_of_kwargs", None)
        if own is not None and len(own) != self.num_workers:
            raise RuntimeError(f"list_of_kwargs has {len(own)} dicts for {self.num_workers} sub-environments")
        parts = None
        if tensordict is not None and not tensordict.is_empty():
            parts = tensordict.unbind(0)
        if parts is None and not kwargs and own is None:
            return None
        given = {}
        session, rows = self.__dict__["_session"], self.__dict__["_results"].rows
        masks = dict.fromkeys(self._keys(self.reset_keys))
        for place in places:
            schema = session.rows[rows[place]].schema
            leaves = None
            if parts is not None and not session.rows[rows[place]].native:  # a Gymnasium reset reads no leaves
                wanted = {**schema.by_area["input"], **schema.by_area[NEXT], **masks}
                found = {key: parts[place].get(td_key(key), None) for key in wanted}
                leaves = {key: _detached(value, self._parallel) for key, value in found.items() if value is not None}
            merged = copied({**kwargs, **(own[place] if own is not None else {})})
            if leaves or merged:
                given[rows[place]] = ResetInput(leaves or None, merged)
        return given or None

    def _reset_proc_data(self, tensordict: TensorDictBase | None, tensordict_reset: TensorDictBase) -> TensorDictBase:
        if tensordict is None:
            return tensordict_reset
        results: Results = self.__dict__["_results"]
        masks = [mask for key in self.reset_keys if (mask := tensordict.get(key, None)) is not None]
        if masks and not results.whole_rows and not all(bool(mask.all()) for mask in masks):
            pairs = zip(tensordict.unbind(0), tensordict_reset.unbind(0), strict=True)
            return results.stack(self._reset_in_parts(given.clone(), fresh) for given, fresh in pairs)
        for key in self.reset_keys:
            tensordict.pop(key, None)
        return results.merged(tensordict, tensordict_reset)

    def _reset_in_parts(self, given: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        """One row's result where parts of it may have been reset alone: see `_root_in_parts`."""
        if any(bool(mask.any()) for key in self.reset_keys if (mask := given.get(key, None)) is not None):
            return _update_during_reset(fresh, given, self.reset_keys).update(fresh)
        return given.exclude(*self.reset_keys).update(fresh)

    def _plain_way(self, tensordict: TensorDictBase, *, resets: bool) -> PlainWay | None:
        """The short way, where a step (which may reset) can take it: the step's input is written then."""
        known = self.__dict__
        results = known["_results"]
        if results is None or results.plain is None or not known.get("_in_use"):
            return None
        way = results.plain
        if way.session.closed or (resets and not results.whole_rows):
            return None
        return way if way.write_input(tensordict) else None

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Steps the sub-environments.

        Args:
            tensordict: of the batch's size, with the actions. A mask under ``"_step"`` picks the rows that move; the
                others' next repeats the input's values, with zeros where it has none. Leaves in its ``"next"`` reach
                the sub-environments whose specs know them, and stay in the result where they do not.

        Returns:
            The input with ``"next"`` set.

        Raises:
            RuntimeError: an action is missing or has the wrong shape.
        """
        start = time.perf_counter()
        way = self._plain_way(tensordict, resets=False)
        if way is None:
            return self._step_long(tensordict)
        try:
            way.run(Opcode.STEP, tensordict)
        finally:
            way.session.meter.moving += time.perf_counter() - start
        return tensordict

    @_timed
    def _step_long(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._assert_tensordict_shape(tensordict)
        preset = tensordict.get("next", None)
        following = self._step(tensordict)
        results: Results = self.__dict__["_results"]
        mask = tensordict.get("_step", None)
        if mask is not None and not mask.any():
            tensordict.pop("_step")
        tensordict.set("next", results.completed(following, preset))
        return tensordict

    @property
    def _step_mdp(self) -> Callable[[TensorDictBase], TensorDictBase]:
        """What takes a step's result to the root of the following step. Where rows differ, each has keys of its own."""
        session: Session | None = self.__dict__["_session"]
        results: Results | None = self.__dict__["_results"]
        if session is not None and results is not None and not session.alike:
            return results.advance
        torchrls: Callable[[TensorDictBase], TensorDictBase] = super()._step_mdp
        way = None if results is None else results.plain
        if way is None:
            return torchrls
        plainly = way.advance

        def step_mdp(tensordict: TensorDictBase) -> TensorDictBase:
            after = plainly(tensordict)
            return torchrls(tensordict) if after is None else after

        return step_mdp

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        session, results = self._started(stepping=True), self.__dict__["_results"]
        places = self._places_to_step(tensordict)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._parallel):
            given = results.write_input(tensordict, places)
            values = session.run(Opcode.STEP, self._addressed(places), given)
            return results.read(NEXT, values, places, tensordict if places is not None else None)

    def _addressed(self, places: list[int] | None) -> list[int] | None:
        results = self.__dict__["_results"]
        if places is None:
            return None if results.whole else results.rows
        return self._engine_rows(places)

    def _places_to_step(self, tensordict: TensorDictBase) -> list[int] | None:
        """The rows that a mask under ``"_step"`` picks; None for all."""
        mask = tensordict.get("_step", None)
        if mask is None or mask.all():
            return None
        rows = mask.reshape(mask.shape[0], -1)
        if not (rows == rows[:, :1]).all():
            raise ValueError(
                'a mask under "_step" must pick whole sub-environments: all entries of a row the same. To step a part '
                "of a batched sub-environment, put the partial step into the sub-environment"
            )
        picked: list[int] = rows[:, 0].nonzero().flatten().tolist()
        return picked

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Steps, and resets the rows that are done, in one exchange with the workers.

        Args:
            tensordict: of the batch's size, with the actions; a mask under ``"_step"`` picks the rows that move.

        Returns:
            The input with ``"next"`` set (rows that are done keep their terminal observation there), and the root for
            the following step (rows that are done hold the first observation of their new episode).

        Raises:
            RuntimeError: an action is missing or has the wrong shape.
        """
        start = time.perf_counter()
        way = self._plain_way(tensordict, resets=True)
        if way is None:
            return self._step_and_maybe_reset_long(tensordict)  # type: ignore[no-any-return]
        try:
            after = way.run(Opcode.STEP_AND_MAYBE_RESET, tensordict)
        finally:
            way.session.meter.moving += time.perf_counter() - start
        return tensordict, after

    @_timed
    def _step_and_maybe_reset_long(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        self._assert_tensordict_shape(tensordict)
        session, results = self._started(stepping=True), self.__dict__["_results"]
        places = self._places_to_step(tensordict)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._parallel):
            given = results.write_input(tensordict, places)
            values = session.run(Opcode.STEP_AND_MAYBE_RESET, self._addressed(places), given)
            rest = tensordict if places is not None else None
            following = results.read(NEXT, values, places, rest)
            fresh = results.read(ROOT, values, places, rest, following)
        preset = tensordict.get("next", None)
        tensordict.pop("_step", None)
        tensordict.set("next", results.completed(following, preset))
        if results.whole_rows or places is not None:
            return tensordict, results.merged(self._root_of(tensordict), fresh)
        return tensordict, self._root_in_parts(tensordict, fresh)

    def rollout(self, max_steps: int, policy: Any = None, callback: Any = None, **kwargs: Any) -> TensorDictBase:
        """Steps ``max_steps`` times, or until a row is done; see torchrl's ``EnvBase.rollout`` for the arguments.

        Each step is written to its final place, but with ``break_when_all_done``, a callback, ``out`` and other
        arguments that few use: these take torchrl's own loop, which stacks the steps at the end.
        """
        odd = callback is not None or kwargs.get("break_when_all_done") or self._post_step_mdp_hooks is not None
        if odd or max_steps < 1 or not kwargs.keys() <= _IN_PLACE:
            return super().rollout(max_steps, policy, callback, **kwargs)
        until_done = kwargs.get("break_when_any_done") is not False
        if policy is not None:
            trust = kwargs.get("trust_policy", False)
            policy = _make_compatible_policy(
                policy, self.observation_spec, env=self, fast_wrap=True, trust_policy=trust
            )
        tensordict = kwargs.get("tensordict")
        if kwargs.get("auto_reset", True):
            root = self.reset(tensordict)
        elif tensordict is not None:
            root = self.maybe_reset(tensordict)
        else:
            raise RuntimeError("tensordict must be provided when auto_reset is False")
        session, results = self._started(stepping=True), self.__dict__["_results"]
        if policy is None and not until_done and draws_in_place(session, results, root):
            start = time.perf_counter()
            try:
                return random_rollout(self, results.plain, root, max_steps)
            finally:
                session.meter.moving += time.perf_counter() - start
        if in_place(session, results, root, max_steps if until_done else 0):
            contiguous = kwargs.get("return_contiguous", False) is not False  # None is yes, where shapes are fixed
            return policy_rollout(
                self, results.plain, root, policy or self.rand_action, max_steps, until_done, contiguous
            )
        kwargs.update(tensordict=root, auto_reset=False, trust_policy=True)  # it is wrapped already
        return super().rollout(max_steps, policy, **kwargs)

    def _root_in_parts(self, tensordict: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        """The root where parts of a row (agents, entries of its own batch) may be done alone: the parts that were reset
        forget the action, as they do in a single environment."""
        results, roots = self.__dict__["_results"], []
        restarted = self.__dict__["_session"].restarted
        for part, fresh_part, row in zip(tensordict.unbind(0), fresh.unbind(0), results.rows, strict=True):
            root = results.root_of_row(part, row)
            if row in restarted:  # no part of it has lived on
                roots.append(root.update(fresh_part))
                continue
            done = _terminated_or_truncated(root, full_done_spec=self.output_spec["full_done_spec"][0], key="_reset")
            fresh_part = fresh_part.copy()
            roots.append(_update_during_reset(fresh_part, root, self.reset_keys) if done else root.update(fresh_part))
        return results.stack(roots)

    def _root_of(self, tensordict: TensorDictBase) -> TensorDictBase:
        """What of a step's input goes on to the following step: everything but next, masks, rewards and dones."""
        dropped = ["next", "_step", *self.reset_keys, *self.done_keys]
        schema = self.__dict__["_session"].rows[self.__dict__["_results"].rows[0]].schema
        dropped += [key for key in self.reward_keys if tuple(self._keys([key])[0]) not in schema.by_area[ROOT]]
        return tensordict.exclude(*dropped).copy()  # nested parts too: they are written to

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seeds the sub-environments: row 0 with ``seed``, each further row with the next value of torchrl's chain.

        Args:
            seed: any integer.
            static_seed: whether all rows get the same seed.

        Returns:
            The next value of the chain (``seed`` itself if static).
        """
        session, rows = self._started(), self.__dict__["_results"].rows
        following = None if seed is None else operator.index(seed)
        self._seeds = []
        if all(session.rows[row].chains_seed for row in rows):
            given = {}
            for row in rows:
                given[row] = (following, static_seed)
                self._seeds.append(following)
                if following is not None and not static_seed:
                    following = seed_generator(following)
            session.run(Opcode.SEED, rows, given)
            return following
        for row in rows:
            self._seeds.append(following)
            values = session.run(Opcode.SEED, [row], {row: (following, static_seed)})
            assert values is not None
            following = values[row]
        return following

    def state_dict(self, *args: Any, **kwargs: Any) -> OrderedDict[str, Any]:
        """The sub-environments' states: ``{"worker0": ..., "worker1": ..., ...}``, without locks in them."""
        session, rows = self._started(), self.__dict__["_results"].rows
        values = session.run(Opcode.STATE_DICT, rows)
        assert values is not None
        return OrderedDict((f"worker{place}", values[row]) for place, row in enumerate(rows))

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Takes what `state_dict` gave, or one sub-environment's state for all of them."""
        session, rows = self._started(), self.__dict__["_results"].rows
        states = [state_dict[f"worker{place}"] if "worker0" in state_dict else state_dict for place in range(len(rows))]
        session.run(
            Opcode.LOAD_STATE_DICT, rows, {row: (state, kwargs) for row, state in zip(rows, states, strict=True)}
        )

    def to(self, device: DEVICE_TYPING) -> BatchedEnv:
        """Moves the results; the sub-environments stay where they are."""
        device = torch.device(device)
        if device == self.device:
            return self
        self._asked_device = device
        self.__dict__["_device"] = device
        for name in ("_input_spec", "_output_spec"):
            self.__dict__[name] = self.__dict__[name].to(device)
        self.empty_cache()
        self.set_spec_lock_()
        session, results = self.__dict__["_session"], self.__dict__["_results"]
        if session is not None:
            self._make_results(session, results.rows)
        return self

    def add_truncated_keys(self) -> EnvBase:
        """Not possible here.

        Raises:
            RuntimeError: always; call it on the sub-environments.
        """
        raise RuntimeError(
            "add_truncated_keys must be called on the sub-environments, in their factory, not on the batch"
        )

    @property
    def _supports_set_state(self) -> bool:
        return bool(self.__dict__.get("_set_state", False))

    @property
    def _has_dynamic_specs(self) -> bool:
        return bool(self.__dict__["_dynamic"])

    @property
    def non_blocking(self) -> bool:
        """Whether copies between devices may be asynchronous; they are complete before a result is returned."""
        return self._non_blocking


class _Factories:
    """Factories on their way through pickle, which takes no lambdas."""

    def __init__(self, factories: list[Factory]) -> None:
        self.factories = factories

    def __getstate__(self) -> bytes:
        return pickling.dumps(self.factories)

    def __setstate__(self, state: bytes) -> None:
        self.factories = pickling.loads(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Factories:
        return _Factories(list(self.factories))


def _detached(value: Any, parallel: bool) -> Any:
    """A value of the caller's as a sub-environment gets it: it never changes the caller's own."""
    if isinstance(value, torch.Tensor) or is_tensor_collection(value):
        return value.detach().cpu() if parallel else value.clone()
    return value


reference.BatchedEnvBase.register(BatchedEnv)

__all__ = ["BatchedEnv"]
