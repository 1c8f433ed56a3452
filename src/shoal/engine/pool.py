"""The parent's side of the worker processes: start, command, wait, notice, close."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.drivers.base import Description
from shoal.engine.channel import Channel, UnreadableMessage, wait_for
from shoal.engine.errors import Fault, WorkerDied, WorkerTimeout, raise_faults
from shoal.engine.exchange import KILL, LOOK_SECONDS, Exchange, readable, rows_in_words
from shoal.engine.faults import log
from shoal.engine.launch import (
    ForkLauncher,
    Launcher,
    PortableLauncher,
    TemplateLauncher,
    default_start_method,
)
from shoal.engine.layout import Area, Array, Layout
from shoal.engine.memory import create_block
from shoal.engine.protocol import Answer, Control, Opcode
from shoal.engine.rows import Builder, same_leaves
from shoal.engine.schema import Key, Schema
from shoal.engine.signals import Completion, Signals, can_share_semaphores
from shoal.engine.worker import default_dtype

DEFAULT_TIMEOUT = 10_000.0
"""Seconds that a command may take unless said otherwise."""

_START_GRACE = 1.0
_LAST_GRACE = 0.5
_REBUILD_GRACE = 10.0


@dataclass(frozen=True)
class PoolOptions:
    """How to run a pool.

    Attributes:
        processes: how many workers carry the rows.
        start_method: ``"forkserver"``, ``"spawn"`` or ``"fork"``; None for what suits the platform.
        num_threads: threads of the numeric libraries in a worker.
        memmap: whether buffers lie in a file on disk.
        step_timeout: seconds that one command may take.
        build_timeout: seconds that building the environments may take.
        shutdown_timeout: seconds that workers have to close on their own.
        rebuilds: whether lost workers may be started again, and environments built anew, after a fault.
        portable: whether to take the road of platforms without Linux's means.
    """

    processes: int
    start_method: str | None = None
    num_threads: int = 1
    memmap: bool = False
    step_timeout: float = DEFAULT_TIMEOUT
    build_timeout: float = DEFAULT_TIMEOUT
    shutdown_timeout: float = 10.0
    rebuilds: bool = False
    portable: bool = not can_share_semaphores()


def split_rows(n_rows: int, processes: int) -> list[range]:
    """Deals N rows out to so many processes, in order and as evenly as can be: 17 on 6 are 3, 3, 3, 3, 3, 2."""
    size, rest = divmod(n_rows, processes)
    starts = [worker * size + min(worker, rest) for worker in range(processes + 1)]
    return [range(starts[worker], starts[worker + 1]) for worker in range(processes)]


class Pool:
    """Runs the rows of a batch in worker processes.

    All workers start at once; each builds the environments of its rows. A pool is used by one thread at a time.

    Args:
        builders: how to build each row's environment.
        options: how to run.

    Raises:
        Exception: what a factory raised, after everything was ended.
        WorkerDied: a worker process ended while it built.
    """

    def __init__(self, builders: Sequence[Builder], options: PoolOptions) -> None:
        self.closed = True  # until there is something to close
        self._options = options
        self._groups = split_rows(len(builders), options.processes)
        self._builders = builders if options.rebuilds else []
        self._owner = os.getpid()
        self._channels: dict[int, Channel] = {}
        self._launcher: Launcher | None = None
        self._exchange: Exchange | None = None
        self._data: Any = None
        self._layout = Layout()
        self._schemas: Sequence[Schema] = ()
        self._attached = False
        self._claims: dict[str, int] = {}
        self._running = False
        self._built_in = 0.0
        self.descriptions: list[Description] = []
        self.arrays: dict[str, dict[Key, Array]] = {}
        self.row_arrays: list[dict[str, dict[Key, Array]]] = []
        self.areas: dict[str, Area] = {}

        n_rows = len(builders)
        size = Control.bytes_for(options.processes, n_rows)
        signals = _portable_signals(options.processes) if options.portable else None
        self._block = create_block(size, named=options.portable)
        self._control = Control(self._block.buffer, options.processes, n_rows, signals=signals, fresh=True)
        self.closed = False
        _live_pools.add(self)
        start = time.monotonic()
        try:
            self._start(builders)
        except BaseException as error:
            self.close_after(error, _START_GRACE)
            raise
        self._built_in = time.monotonic() - start

    def _start(self, builders: Sequence[Builder]) -> None:
        launcher = self._launcher = self._make_launcher(builders)
        self._exchange = Exchange(self._control, self._groups, launcher, self._channels, gathers=self._options.rebuilds)
        workers = range(self._options.processes)
        for worker in workers:
            self._launch(worker, builders)
        descriptions: dict[int, Description] = {}
        for built in self._each_built(workers, self._options.build_timeout):
            raise_faults(built.faults)
            descriptions.update(built.values)
        self.descriptions = [descriptions[row] for row in range(len(builders))]
        launcher.look()
        log.info("%d rows on %d workers: processes %s", len(builders), len(workers), sorted(launcher.pids.values()))

    def _make_launcher(self, builders: Sequence[Builder]) -> Launcher:
        options = self._options
        method = options.start_method or default_start_method()
        if options.portable:
            return PortableLauncher(self._block, self._control.signals)  # type: ignore[arg-type]
        if method == "fork":
            return ForkLauncher(self._block)  # type: ignore[arg-type]
        factories = {id(builder.factory): builder.factory for builder in builders}
        warm = [Builder(factory, {}).pack().data for factory in list(factories.values())[:64]]
        return TemplateLauncher(self._block, options.num_threads, warm, fork=method == "forkserver")  # type: ignore[arg-type]

    def _launch(self, worker: int, builders: Sequence[Builder]) -> None:
        assert self._launcher is not None
        rows = self._groups[worker]
        particulars = {
            "index": worker,
            "rows": rows,
            "n_workers": self._options.processes,
            "n_rows": len(builders),
            "num_threads": self._options.num_threads,
            "rebuilds": self._options.rebuilds,
            "default_dtype": default_dtype(),
            "control": self._block.handle(),
        }
        self._channels[worker] = self._launcher.launch(particulars, [builders[row] for row in rows])

    def _each_built(self, workers: Sequence[int], limit: float) -> Iterator[Answer]:
        """What each of these workers says of the environments that it has built, as soon as it does.

        Raises:
            WorkerDied, WorkerTimeout: a worker will not say anything any more.
        """
        assert self._exchange is not None
        deadline = time.monotonic() + limit
        waiting = {self._channels[worker].sock: worker for worker in workers}
        while waiting:
            for sock in readable(list(waiting), LOOK_SECONDS):
                yield self._exchange.receive(waiting.pop(sock), Opcode.BUILD, deadline, limit)
            self._exchange.check(list(waiting.values()), Opcode.BUILD, deadline, limit)

    def attach(self, schemas: Sequence[Schema]) -> None:
        """Creates the block of buffered leaves, and has every worker open it."""
        self._schemas, self._layout = schemas, Layout.of(schemas)
        self._data = create_block(self._layout.size, memmap=self._options.memmap, named=self._options.portable)
        self.arrays, self.areas = self._layout.batch(self._data.buffer), self._layout.areas(self._data.buffer)
        self.row_arrays = [self._layout.row(self._data.buffer, row) for row in range(len(schemas))]
        self.fresh = np.frombuffer(self._control.fresh, bool)
        self.row_times: Array = np.asarray(self._control.row_times)
        self.worker_times: Array = np.asarray(self._control.worker_times)
        try:
            self._attach(range(self._options.processes))
        except BaseException as error:
            self.close_after(error)
            raise
        self._attached = True

    def _attach(self, workers: Sequence[int]) -> None:
        assert self._exchange is not None
        deadline = time.monotonic() + DEFAULT_TIMEOUT
        for worker in workers:
            attachment = ({row: self._schemas[row] for row in self._groups[worker]}, self._layout, self._data.handle())
            descriptors = () if self._options.portable else (self._data.descriptor,)
            patience = self._exchange.patience(worker, Opcode.ATTACH, deadline, DEFAULT_TIMEOUT)
            try:
                self._channels[worker].send(attachment, 0, descriptors, patience)
            except OSError:
                raise self._exchange.death(worker, Opcode.ATTACH) from None
        for worker in workers:
            self._exchange.receive(worker, Opcode.ATTACH, deadline, DEFAULT_TIMEOUT)

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Keeps other threads out for several commands, see `execute_claimed`.

        Raises:
            RuntimeError: the pool is closed, belongs to another process, or is in use by another thread.
        """
        self._claim()
        try:
            self._running = True
            yield
        finally:  # no call comes before the assignment: a Ctrl-C could come with its start
            self._running = False
            self._claims.pop("thread", None)

    def _claim(self) -> None:
        if self.closed:
            raise RuntimeError("the pool is closed")
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"this environment belongs to process {self._owner}, and this is a fork of it (process {os.getpid()}): "
                "build an environment of its own here"
            )
        thread = threading.get_ident()
        # Atomic, and harmless where a Ctrl-C comes right after it: the claim is this thread's own then.
        if self._claims.setdefault("thread", thread) != thread:
            raise RuntimeError("the environment is in use by another thread at this moment: use it from one at a time")
        if self._running:
            raise RuntimeError("the environment is in the middle of a command of this thread: wait for its end")

    def execute(
        self,
        opcode: Opcode,
        rows: Sequence[int] | None = None,
        given: dict[int, Any] | None = None,
        timeout: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Answer | None:
        """Runs one command on some rows and waits until all of them have answered.

        Args:
            opcode: the command.
            rows: the rows that take part; None for all.
            given: arguments by row; rows without any may be missing.
            timeout: seconds; None for the pool's ``step_timeout``.
            meanwhile: what the caller would like to do while the workers are at it; it is not done where there is
                more to do than to wait.

        Returns:
            What does not lie in the buffers, or None if everything does.

        Raises:
            WorkerDied: a worker process ended; the pool is closed then. With the option ``rebuilds``, that is among the
                answer's faults instead, and the pool lives.
            WorkerTimeout: an answer was late; likewise.
            RuntimeError: the pool is closed.
        """
        self._claim()
        try:
            self._running = True
            return self.execute_claimed(opcode, rows, given, timeout, meanwhile)
        finally:  # as in `claim`
            self._running = False
            self._claims.pop("thread", None)

    def execute_claimed(
        self,
        opcode: Opcode,
        rows: Sequence[int] | None = None,
        given: dict[int, Any] | None = None,
        timeout: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Answer | None:
        """`execute`, for the thread that holds the `claim`."""
        exchange = self._exchange
        assert exchange is not None
        try:
            limit = self._options.step_timeout if timeout is None else timeout
            return exchange.run(opcode, rows, given, limit, meanwhile)
        except BaseException as error:
            if self.closed:
                raise RuntimeError(
                    f"the environment was closed, by another thread or a signal, in the middle of {opcode.command!r}"
                ) from error
            if exchange.broken or isinstance(error, (WorkerDied, WorkerTimeout)):
                self.close_after(error)
            raise

    def rebuild(self, rows: Sequence[int]) -> list[Fault]:
        """Builds the environments of rows anew, lost workers of theirs included; for the thread with the `claim`.

        Returns:
            What went wrong with that.
        """
        exchange = self._exchange
        assert exchange is not None
        # How long it took the first time says what to expect; a constructor or a close that hangs must not hold the
        # others up for as long as a first build may take.
        limit = min(
            self._options.build_timeout, max(self._options.step_timeout, 10.0 * self._built_in + _REBUILD_GRACE)
        )
        lost = [worker for worker in exchange.lost if not set(self._groups[worker]).isdisjoint(rows)]
        faults: list[Fault] = []
        for worker in lost:
            if not set(self._groups[worker]) <= set(rows):
                # It was lost after it had answered: nobody knows yet that its other rows are gone too.
                faults.extend(exchange.faults_of([worker], Opcode.REBUILD))
                continue
            try:
                faults.extend(self._revive(worker, exchange, limit))
            except BaseException as error:  # Ctrl-C, or a process that does not end: nobody knows how far it has come
                self.close_after(error)
                raise
        rest = [row for row in rows if not any(row in self._groups[worker] for worker in lost)]
        if rest:
            answer = self.execute_claimed(Opcode.REBUILD, rest, None, limit)
            faults.extend([] if answer is None else answer.faults)
        return faults

    def _revive(self, worker: int, exchange: Exchange, limit: float) -> list[Fault]:
        """Puts another process in the place of a lost worker."""
        launcher = self._launcher
        assert launcher is not None
        channel = self._channels.pop(worker, None)
        if channel is not None:
            channel.close()
        launcher.forget(worker)
        exchange.forget(worker)
        launched = False
        try:
            self._launch(worker, self._builders)
            launched = True
            built = next(self._each_built([worker], limit))
            for row, description in built.values.items():
                same_leaves(row, self.descriptions[row].schema, description.schema)
            if built.faults:
                exchange.given_up(worker, exchange.death(worker, Opcode.BUILD, wait=0.0), Opcode.BUILD)
                return built.faults
            self._attach([worker])
        except (WorkerDied, WorkerTimeout) as error:
            return exchange.given_up(worker, error, Opcode.BUILD)
        except Exception as error:
            if launched:
                exchange.given_up(worker, exchange.death(worker, Opcode.BUILD, wait=0.0), Opcode.BUILD)
            return [Fault.capture(row, Opcode.BUILD.command, error, remote=False) for row in self._groups[worker]]
        exchange.revived(worker)
        launcher.look()
        log.info("%s live in process %s now", rows_in_words(self._groups[worker]), launcher.pids.get(worker))
        return []

    def carriers(self) -> tuple[list[range], list[int]]:
        """The rows and the process id of each worker."""
        assert self._launcher is not None
        self._launcher.look()
        return self._groups, [self._launcher.pids.get(worker, -1) for worker in range(len(self._groups))]

    def close_after(self, error: BaseException, grace: float = _LAST_GRACE) -> None:
        """Closes, and says so in the error that is the reason."""
        if isinstance(error, (WorkerDied, WorkerTimeout)) and not self.closed:
            error.args = (f"{error}. The environment is closed; its next reset starts it afresh",)
        self.close(grace)

    def close(self, timeout: float | None = None) -> list[Fault]:
        """Ends the workers: asks each to close its environments, then ends, then kills it.

        Args:
            timeout: seconds for them to close on their own; None for the pool's ``shutdown_timeout``.

        Returns:
            What environments raised in their own close.
        """
        if self.closed or os.getpid() != self._owner:
            return []
        self.closed = True
        _live_pools.discard(self)
        launcher = self._launcher
        faults: list[Fault] = []
        with ExitStack() as last:  # each of these is done, whatever happens to the others
            last.callback(self._let_go)
            if launcher is not None:
                launcher.closing = True
                last.callback(launcher.close)
                last.callback(self._kill, launcher)
                self._end_workers(launcher, self._options.shutdown_timeout if timeout is None else timeout, faults)
        return faults

    def _let_go(self) -> None:
        for channel in self._channels.values():
            channel.close()
        # The memory goes when the last array over it does; ours go first.
        self.arrays, self.areas, self.row_arrays = {}, {}, []
        for name in ("fresh", "row_times", "worker_times"):
            self.__dict__.pop(name, None)
        self._launcher = self._exchange = None
        del self._control
        self._block.close()
        if self._data is not None:
            self._data.close()
        del self._block, self._data

    def _kill(self, launcher: Launcher) -> None:
        for worker in self._channels:
            launcher.kill(worker, KILL)

    def __del__(self) -> None:
        if not getattr(self, "closed", True):
            self.close(self.last_grace())

    def last_grace(self) -> float:
        """Seconds to close that workers have when nobody asked for it: fewer if they are in the middle of a command."""
        interrupted = self._exchange is not None and self._exchange.interrupted
        return min(self._options.shutdown_timeout, 0.3 if interrupted else 1.0)

    def _end_workers(self, launcher: Launcher, timeout: float, faults: list[Fault]) -> None:
        workers = list(self._channels)
        if self._attached and self._exchange is not None:
            self._exchange.close_all(workers)
        else:
            for worker in workers:  # they read their channels, once they have built their rows
                try:
                    self._channels[worker].send(None, patience=_give_up)
                except OSError:
                    pass
        if timeout > 0 and self._heard_out(launcher, workers, time.monotonic() + timeout, faults):
            return
        late = [worker for worker in workers if worker not in launcher.exitcodes]
        if timeout > 0 and late:
            rows = [row for worker in late for row in self._groups[worker]]
            pids = ", ".join(str(launcher.pids.get(worker)) for worker in late)
            log.warning("%s (pid %s) did not close within %g s: ended", rows_in_words(rows), pids, timeout)
        for number, grace in ((signal.SIGTERM, 0.2), (KILL, _LAST_GRACE)):
            for worker in workers:
                launcher.kill(worker, number)
            if launcher.wait_ended(workers, grace):
                break

    def _heard_out(self, launcher: Launcher, workers: list[int], deadline: float, faults: list[Fault]) -> bool:
        """Whether all workers have ended in time. Takes in what they have to say until then: of their close, which
        counts, and of a command that nobody waits for any more, in the way of which they could not end."""

        def patience(sock: socket.socket, writing: bool) -> None:
            if time.monotonic() >= deadline:
                raise BrokenPipeError("the worker does not come to an end")
            wait_for(sock, writing, 0.02)

        talking = {self._channels[worker].sock: self._channels[worker] for worker in workers}
        while True:
            launcher.look()
            ended = all(worker in launcher.exitcodes for worker in workers)
            for sock in readable(list(talking), 0.0 if ended else 0.02):
                try:
                    _, message = talking[sock].receive(patience)
                except UnreadableMessage:
                    continue
                except (EOFError, OSError):
                    del talking[sock]
                    continue
                if isinstance(message, Answer):
                    faults.extend(fault for fault in message.faults if fault.command == Opcode.CLOSE.command)
            if ended and not readable(list(talking), 0.0):
                return True
            if time.monotonic() >= deadline:
                return ended
            if not talking:
                launcher.look(0.02)


_live_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def _close_live_pools() -> None:
    """Leaving the interpreter ends all workers."""
    for pool in list(_live_pools):
        pool.close(pool.last_grace())


def _portable_signals(n_workers: int) -> Signals:
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    first, second = (Completion(context.Semaphore(0), context.Semaphore(0)) for _ in range(2))
    return Signals([context.Semaphore(0) for _ in range(n_workers)], (first, second))


def _give_up(sock: socket.socket, writing: bool) -> None:
    raise BrokenPipeError("the worker does not read, or has nothing to say")
