"""The loop inside a worker process."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal.engine import pickling
from shoal.engine.channel import Channel, UnreadableMessage
from shoal.engine.errors import Fault
from shoal.engine.memory import open_block
from shoal.engine.protocol import Answer, Control, Flag, Opcode
from shoal.engine.rows import Builder, PackedBuilder, RowGroup
from shoal.engine.signals import Waiter

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def limit_threads(count: int) -> None:
    """Tells every numeric library how many threads to use: those still to be imported, and torch if it already is."""
    for name in THREAD_VARIABLES:
        os.environ[name] = str(count)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)


def default_dtype() -> str | None:
    """The name of torch's default dtype in this process; None if torch is not loaded, or has its usual one."""
    torch = sys.modules.get("torch")
    name = None if torch is None else str(torch.get_default_dtype()).removeprefix("torch.")
    return None if name == "float32" else name


def set_default_dtype(name: str) -> None:
    """Gives torch that default dtype, if it is loaded."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_default_dtype(getattr(torch, name))


class Worker:
    """One worker: its rows, and the words it exchanges with its parent.

    Args:
        index: which worker of the pool.
        rows: its rows.
        channel: to the parent.
        control: the pool's control words; worker side.
        rebuilds: whether rows may be built anew.
        prepare: called before each environment is built.
    """

    def __init__(
        self,
        index: int,
        rows: Sequence[int],
        channel: Channel,
        control: Control,
        *,
        rebuilds: bool = False,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._index = index
        self._channel = channel
        self._control = control
        self._group = RowGroup(rows, remote=True, rebuilds=rebuilds, prepare=prepare)
        self._data: Any = None

    def run(self, builders: Sequence[Builder | PackedBuilder]) -> None:
        """Builds the environments, then serves commands until told to close or the parent is gone."""
        try:
            self._send(self._group.build(builders), 0, Opcode.BUILD)
            _, attachment = self._channel.receive()
            if attachment is None:
                self._group.close()
                return
            schemas, layout, handle = attachment
            self._data = open_block(handle, self._channel.take_descriptor())
            self._group.attach(schemas, layout, self._data.buffer, self._control.fresh, self._control.row_times)
            self._channel.send(Answer())
            self._serve()
        except (EOFError, BrokenPipeError, ConnectionError):
            # The parent is gone: there is nobody to tell. Environments get their chance to let go of what they hold.
            self._group.close()

    def _serve(self) -> None:
        control, index, group = self._control, self._index, self._group
        command, reply = control.cells(index)
        wait = Waiter(control.signals.doorbells[index]).wait
        times, clock = control.worker_times, time.perf_counter
        busy, count = 2 * index, 2 * index + 1
        first, second = control.signals.completions
        message, second_too, special = Flag.MESSAGE, Flag.SECOND, Flag.MASKED | Flag.MESSAGE
        loops, close = group.loops, int(Opcode.CLOSE)
        # The common command first, and with the fewest calls: what a worker runs here, it runs from cold caches.
        while True:
            wait()
            start = clock()
            word = command[0]
            sequence, opcode = word >> 16, word >> 8 & 0xFF
            loop = None if word & special else loops.get(opcode)
            answer: Answer | None = None
            if loop is not None:
                failed = loop()
                if failed:
                    answer = group.failures(opcode, failed)
            elif opcode == close:
                closed = group.close()
                if closed.faults:
                    self._send(closed, sequence, Opcode.CLOSE)
                return
            else:
                answer = self._execute(opcode, word & 0xFF)
            times[busy] += clock() - start
            times[count] += 1.0
            reply[0] = sequence << 8 | (0 if answer is None else message)
            second.finish() if word & second_too else first.finish()
            if answer is not None:
                # After the completion: the parent reads while we write, so no size of a message can block us both.
                self._send(answer, sequence, Opcode(opcode))

    def _execute(self, opcode: int, flags: int) -> Answer | None:
        """Runs a command on each row by itself."""
        given = None
        mask = self._control.mask if flags & Flag.MASKED else None
        if flags & Flag.MESSAGE:
            try:
                _, given = self._channel.receive()
            except UnreadableMessage as error:
                return self._group.refuse(Opcode(opcode), mask, f"what it was given does not unpickle there: {error}")
        if opcode == Opcode.SYNC:
            return None
        return self._group.execute(opcode, mask, given)

    def _send(self, answer: Answer, sequence: int, opcode: Opcode) -> None:
        try:
            data = pickling.dumps(answer)
        except BaseException:  # some row's value cannot be pickled: the others' can
            faults, values = list(answer.faults), {}
            for row, value in answer.values.items():
                try:
                    pickling.dumps(value)
                    values[row] = value
                except BaseException as error:
                    faults.append(Fault.capture(row, opcode.command, error, remote=True))
            data = pickling.dumps(Answer(values, faults))
        self._channel.send_packed(data, sequence)


def ignore_interrupts() -> None:
    """Leaves Ctrl-C, which a terminal sends to every process, to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see `launch.interrupts_held_back`


def worker_main(
    particulars: dict[str, Any],
    builders: Sequence[Builder | PackedBuilder],
    sock: socket.socket,
    make_control: Callable[[], Control],
) -> int:
    """Runs a worker in this process from its first line to its last.

    Args:
        particulars: what `shoal.engine.pool.Pool` tells each worker of itself.
        builders: of its rows.
        sock: to the parent.
        make_control: opens the pool's control words.

    Returns:
        The exit code.
    """
    ignore_interrupts()
    limit_threads(particulars["num_threads"])
    dtype: str | None = particulars["default_dtype"]
    prepare = None if dtype is None else lambda: set_default_dtype(dtype)
    channel = Channel(sock)
    try:
        worker = Worker(
            particulars["index"],
            particulars["rows"],
            channel,
            make_control(),
            rebuilds=particulars["rebuilds"],
            prepare=prepare,
        )
        worker.run(builders)
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                pass
    return 0


def watch_parent(parent: int, interval: float = 0.5) -> None:
    """Ends this process when its parent is no longer ``parent``; for start methods where the kernel does not."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(interval)
        os._exit(1)

    threading.Thread(target=watch, name="shoal-watch-parent", daemon=True).start()
