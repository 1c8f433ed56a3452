"""The parent's side of the worker processes: start, command, wait, notice, close."""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.drivers.base import Description
from shoal.engine import pickling
from shoal.engine.channel import Channel, UnreadableMessage, wait_for
from shoal.engine.errors import EnvError, Fault, WorkerDied, WorkerTimeout, raise_faults
from shoal.engine.launch import (
    ForkLauncher,
    Launcher,
    PortableLauncher,
    TemplateLauncher,
    default_start_method,
)
from shoal.engine.layout import Array, Layout
from shoal.engine.memory import create_block
from shoal.engine.protocol import Answer, Control, Flag, Opcode
from shoal.engine.rows import Builder
from shoal.engine.schema import Key, Schema
from shoal.engine.signals import Signals, Waiter, can_share_semaphores

DEFAULT_TIMEOUT = 10_000.0
"""Seconds that a command may take unless said otherwise."""

_LOOK_SECONDS = 0.1
_START_GRACE = 1.0
_LAST_GRACE = 0.5


@dataclass(frozen=True)
class PoolOptions:
    """How to run a pool.

    Attributes:
        processes: how many workers carry the rows.
        start_method: ``"forkserver"``, ``"spawn"`` or ``"fork"``; None for what suits the platform.
        num_threads: threads of the numeric libraries in a worker.
        memmap: whether buffers lie in a file on disk.
        step_timeout: seconds that one command may take.
        shutdown_timeout: seconds that workers have to close on their own.
        portable: whether to take the road of platforms without Linux's means.
    """

    processes: int
    start_method: str | None = None
    num_threads: int = 1
    memmap: bool = False
    step_timeout: float = DEFAULT_TIMEOUT
    shutdown_timeout: float = 10.0
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
        self._options = options
        self._groups = split_rows(len(builders), options.processes)
        self._worker_of = [worker for worker, rows in enumerate(self._groups) for _ in rows]
        self._all = list(range(options.processes))
        self._owner = os.getpid()
        self._sequence = 0
        self._pending: tuple[int, list[int], Opcode] | None = None
        self._channels: list[Channel] = []
        self._launcher: Launcher | None = None
        self._data: Any = None
        self._attached = False
        self._busy = threading.Lock()
        self.closed = False
        self.descriptions: list[Description] = []
        self.arrays: dict[str, dict[Key, Array]] = {}
        self.row_arrays: list[dict[str, dict[Key, Array]]] = []

        n_rows = len(builders)
        size = Control.bytes_for(options.processes, n_rows)
        signals = _portable_signals(options.processes) if options.portable else None
        self._block = create_block(size, named=options.portable)
        self._control = Control(self._block.buffer, options.processes, n_rows, signals=signals, fresh=True)
        self._signals = self._control.signals
        self._ring = [doorbell.release for doorbell in self._signals.doorbells]
        self._waiter = Waiter(self._signals.done)
        _live_pools.add(self)
        try:
            self._start(builders)
        except BaseException:
            self.close(_START_GRACE)
            raise

    def _start(self, builders: Sequence[Builder]) -> None:
        options = self._options
        launcher = self._launcher = self._make_launcher(builders)
        shared = {
            "n_workers": options.processes,
            "n_rows": len(builders),
            "num_threads": options.num_threads,
            "control": self._block.handle(),
        }
        for worker, rows in enumerate(self._groups):
            particulars = {**shared, "index": worker, "rows": rows}
            self._channels.append(launcher.launch(particulars, [builders[row] for row in rows]))
        limit = max(options.step_timeout, DEFAULT_TIMEOUT)
        deadline = time.monotonic() + limit
        descriptions: dict[int, Description] = {}
        waiting = {channel.sock: worker for worker, channel in enumerate(self._channels)}
        while waiting:
            for sock in _readable(list(waiting), _LOOK_SECONDS):
                worker = waiting.pop(sock)
                built: Answer = self._receive(worker, Opcode.BUILD, deadline, limit)
                raise_faults(built.faults)
                descriptions.update(built.values)
            self._check(list(waiting.values()), Opcode.BUILD, deadline, limit)
        self.descriptions = [descriptions[row] for row in range(len(builders))]

    def _make_launcher(self, builders: Sequence[Builder]) -> Launcher:
        options = self._options
        method = options.start_method or default_start_method()
        if options.portable:
            return PortableLauncher(self._block, self._signals)  # type: ignore[arg-type]
        if method == "fork":
            return ForkLauncher(self._block)  # type: ignore[arg-type]
        factories = {id(builder.factory): builder.factory for builder in builders}
        warm = [Builder(factory, {}).pack().data for factory in list(factories.values())[:64]]
        return TemplateLauncher(self._block, options.num_threads, warm, fork=method == "forkserver")  # type: ignore[arg-type]

    def attach(self, schemas: Sequence[Schema]) -> None:
        """Creates the block of buffered leaves, and has every worker open it."""
        layout = Layout.of(schemas)
        self._data = create_block(layout.size, memmap=self._options.memmap, named=self._options.portable)
        self.arrays = layout.batch(self._data.buffer)
        self.row_arrays = [layout.row(self._data.buffer, row) for row in range(len(schemas))]
        deadline = time.monotonic() + DEFAULT_TIMEOUT
        for worker, rows in enumerate(self._groups):
            attachment = ({row: schemas[row] for row in rows}, layout, self._data.handle())
            descriptors = () if self._options.portable else (self._data.descriptor,)
            patience = self._patience(worker, Opcode.ATTACH, deadline, DEFAULT_TIMEOUT)
            self._channels[worker].send(attachment, 0, descriptors, patience)
        for worker in self._all:
            self._receive(worker, Opcode.ATTACH, deadline, DEFAULT_TIMEOUT)
        self._attached = True

    def execute(
        self,
        opcode: Opcode,
        rows: Sequence[int] | None = None,
        given: dict[int, Any] | None = None,
        timeout: float | None = None,
    ) -> Answer | None:
        """Runs one command on some rows and waits until all of them have answered.

        Args:
            opcode: the command.
            rows: the rows that take part; None for all.
            given: arguments by row; rows without any may be missing.
            timeout: seconds; None for the pool's ``step_timeout``.

        Returns:
            What does not lie in the buffers, or None if everything does.

        Raises:
            WorkerDied: a worker process ended; the pool is closed then.
            WorkerTimeout: an answer was late; the pool is closed then.
            RuntimeError: the pool is closed.
        """
        if self.closed:
            raise RuntimeError("the pool is closed")
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"this environment belongs to process {self._owner}, and this is a fork of it (process {os.getpid()}): "
                "build an environment of its own here"
            )
        if not self._busy.acquire(False):
            raise RuntimeError("the environment is in use by another thread at this moment: use it from one at a time")
        try:
            return self._execute(opcode, rows, given, timeout)
        finally:
            self._busy.release()

    def _execute(
        self, opcode: Opcode, rows: Sequence[int] | None, given: dict[int, Any] | None, timeout: float | None
    ) -> Answer | None:
        if self._pending is not None:
            self._drain()
        self._sequence = sequence = self._sequence + 1
        if rows is None:
            workers, flags = self._all, Flag.NONE
        else:
            workers, flags = self._address(rows), Flag.MASKED
            if not workers:
                return None
        packed: dict[int, bytes] = {}
        if given is not None:
            flags |= Flag.MESSAGE
            packed = self._pack(given, workers, opcode)
        limit = self._options.step_timeout if timeout is None else timeout
        try:
            command, flag_bits = self._control.command, int(flags)
            for worker in workers:
                command(worker, sequence, opcode, flag_bits)
            for _ in range(len(workers) - 1):
                self._signals.countdown.release()
            ring = self._ring
            for worker in workers:
                ring[worker]()
            if packed:
                self._send_given(packed, opcode, limit)
            self._pending = (sequence, workers, opcode)
        except BaseException:
            self.close(_LAST_GRACE)  # half a command: what workers make of it is not worth knowing
            raise
        if not self._waiter.wait(min(limit, _LOOK_SECONDS)):
            self._wait_longer(sequence, workers, opcode, limit)
        return self._collect(sequence, workers, opcode, limit)

    def _address(self, rows: Sequence[int]) -> list[int]:
        """Marks the rows in the mask and gives their workers."""
        mask = self._control.mask
        mask[:] = bytes(len(mask))
        for row in rows:
            mask[row] = 1
        return sorted({self._worker_of[row] for row in rows})

    def _pack(self, given: dict[int, Any], workers: list[int], opcode: Opcode) -> dict[int, bytes]:
        """Pickles the arguments of each worker's rows, before any worker hears of the command.

        Raises:
            TypeError: they cannot be pickled; nothing has happened.
        """
        packed = {}
        for worker in workers:
            part = {row: given[row] for row in self._groups[worker] if row in given}
            try:
                packed[worker] = pickling.dumps(part)
            except Exception as error:
                raise TypeError(
                    f"what {opcode.command!r} was given for {_rows_in_words(list(part))} cannot be sent to a worker "
                    f"process: {error}"
                ) from error
        return packed

    def _send_given(self, packed: dict[int, bytes], opcode: Opcode, limit: float) -> None:
        deadline = time.monotonic() + limit
        for worker, data in packed.items():
            try:
                patience = self._patience(worker, opcode, deadline, limit)
                self._channels[worker].send_packed(data, self._sequence, (), patience)
            except OSError:
                self._check([worker], opcode, deadline, limit, expect_death=True)

    def _wait_longer(self, sequence: int, workers: list[int], opcode: Opcode, limit: float) -> None:
        """Goes on waiting where the first look was not enough: sleeps in bounded pieces, looks after the workers."""
        deadline = time.monotonic() + limit - min(limit, _LOOK_SECONDS)
        while True:
            late = [worker for worker in workers if self._control.read_answer(worker)[0] != sequence]
            self._check(late, opcode, deadline, limit)
            if self._waiter.wait(min(_LOOK_SECONDS, max(deadline - time.monotonic(), 0.0))):
                return

    def _collect(self, sequence: int, workers: list[int], opcode: Opcode, limit: float) -> Answer | None:
        """Reads the answers of workers that have all finished."""
        answer: Answer | None = None
        read_answer = self._control.read_answer
        try:
            for worker in workers:
                answered, flags = read_answer(worker)
                if answered != sequence:
                    raise RuntimeError(f"shoal: worker {worker} answered command {answered} instead of {sequence}")
                if flags:
                    answer = answer or Answer()
                    try:
                        message = self._receive(worker, opcode, time.monotonic() + limit, limit, sequence)
                    except UnreadableMessage as error:
                        for row in self._groups[worker]:
                            unreadable = EnvError(
                                f"what row {row} gave back from {opcode.command!r} does not unpickle in this process: "
                                f"{error}"
                            )
                            answer.faults.append(Fault.capture(row, opcode.command, unreadable, remote=False))
                        continue
                    answer.values.update(message.values)
                    answer.faults.extend(message.faults)
        except BaseException:
            self.close(_LAST_GRACE)  # half an answer: what follows could not be told from the rest of it
            raise
        self._pending = None
        return answer

    def _drain(self) -> None:
        """Waits for the answers of a command whose caller went away (Ctrl-C), and drops them."""
        assert self._pending is not None
        sequence, workers, opcode = self._pending
        limit = self._options.step_timeout
        if not self._waiter.wait(0.0):
            self._wait_longer(sequence, workers, opcode, limit)
        self._collect(sequence, workers, opcode, limit)

    def _receive(self, worker: int, opcode: Opcode, deadline: float, limit: float, sequence: int = 0) -> Answer:
        patience = self._patience(worker, opcode, deadline, limit)
        try:
            while True:
                answered, message = self._channels[worker].receive(patience)
                if answered == sequence:
                    answer: Answer = message
                    return answer
        except (EOFError, OSError):
            self._check([worker], opcode, deadline, limit, expect_death=True)
            raise

    def _patience(self, worker: int, opcode: Opcode, deadline: float, limit: float) -> Any:
        def patience(sock: socket.socket, writing: bool) -> None:
            wait_for(sock, writing, _LOOK_SECONDS)
            self._check([worker], opcode, deadline, limit)

        return patience

    def _check(
        self, workers: list[int], opcode: Opcode, deadline: float, limit: float, *, expect_death: bool = False
    ) -> None:
        """Raises if one of the workers that we wait for has died, or is late.

        Raises:
            WorkerDied: the pool is closed then.
            WorkerTimeout: the pool is closed then.
        """
        launcher = self._launcher
        assert launcher is not None
        if expect_death:
            launcher.wait_ended(workers[:1], 1.0)
        launcher.look()
        for worker in workers:
            if worker in launcher.exitcodes or expect_death:
                self._raise_died(worker, opcode)
        if workers and time.monotonic() >= deadline:
            rows = [row for worker in workers for row in self._groups[worker]]
            pids = [launcher.pids.get(worker) for worker in workers]
            for worker in workers:
                launcher.kill(worker, signal.SIGKILL)
            self.close(_LAST_GRACE)
            error = WorkerTimeout(
                f"{_rows_in_words(rows)} (pid {_listed(pids)}) did not finish {opcode.command!r} within "
                f"{limit:g} s; raise step_timeout, or the environment variable BATCHED_PIPE_TIMEOUT, if they need "
                "longer. The environment is closed; its next reset starts it afresh",
                rows,
                limit,
            )
            error.command = opcode.command
            raise error

    def _raise_died(self, worker: int, opcode: Opcode) -> None:
        launcher = self._launcher
        assert launcher is not None
        pid, code = launcher.pids.get(worker, -1), launcher.exitcodes.get(worker)
        rows = list(self._groups[worker])
        self.close(_LAST_GRACE)
        error = WorkerDied(
            f"the worker process of {_rows_in_words(rows)} (pid {pid}) {_end_in_words(code)} during "
            f"{opcode.command!r}. The environment is closed; its next reset starts it afresh",
            rows,
            pid,
            code,
        )
        error.command = opcode.command
        raise error

    def close(self, timeout: float | None = None) -> None:
        """Ends the workers: asks each to close its environments, then ends, then kills it.

        Args:
            timeout: seconds for them to close on their own; None for the pool's ``shutdown_timeout``.
        """
        if self.closed or os.getpid() != self._owner:
            return
        self.closed = True
        _live_pools.discard(self)
        launcher = self._launcher
        if launcher is not None:
            self._end_workers(launcher, self._options.shutdown_timeout if timeout is None else timeout)
            launcher.close()
        for channel in self._channels:
            channel.close()
        # The memory goes when the last array over it does; ours go first.
        self.arrays, self.row_arrays = {}, []
        self._launcher = None
        del self._control, self._signals, self._ring, self._waiter
        self._block.close()
        if self._data is not None:
            self._data.close()
        del self._block, self._data

    def __del__(self) -> None:
        if not getattr(self, "closed", True):
            self.close(min(self._options.shutdown_timeout, 1.0))

    def _end_workers(self, launcher: Launcher, timeout: float) -> None:
        self._sequence += 1
        started = len(self._channels)
        for worker in range(started):
            if not self._attached:
                # Not attached yet: the worker reads its channel, after it has built its rows.
                try:
                    self._channels[worker].send(None, patience=_give_up)
                except OSError:
                    pass
            else:
                self._control.command(worker, self._sequence, Opcode.CLOSE, Flag.NONE)
                self._ring[worker]()
        workers = list(range(started))
        if timeout <= 0 or not launcher.wait_ended(workers, timeout):
            for number, grace in ((signal.SIGTERM, 0.2), (_KILL, _LAST_GRACE)):
                for worker in workers:
                    launcher.kill(worker, number)
                if launcher.wait_ended(workers, grace):
                    break


_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
_live_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def _close_live_pools() -> None:
    """Leaving the interpreter ends all workers."""
    for pool in list(_live_pools):
        pool.close(min(pool._options.shutdown_timeout, 1.0))


def _portable_signals(n_workers: int) -> Signals:
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    return Signals([context.Semaphore(0) for _ in range(n_workers)], context.Semaphore(0), context.Semaphore(0))


def _readable(sockets: list[socket.socket], seconds: float) -> list[socket.socket]:
    if not hasattr(select, "poll"):
        return select.select(sockets, [], [], seconds)[0]
    poll = select.poll()
    for sock in sockets:
        poll.register(sock, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
    return [sock for sock in sockets if sock.fileno() in ready]


def _give_up(sock: socket.socket, writing: bool) -> None:
    raise BrokenPipeError("the worker does not read")


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def _rows_in_words(rows: Sequence[int]) -> str:
    return f"row {rows[0]}" if len(rows) == 1 else f"rows {_listed(rows)}"


def _end_in_words(code: int | None) -> str:
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
