"""How worker processes come to life, and how the parent learns of their end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from shoal.engine.channel import Channel, wait_for
from shoal.engine.memory import Block, NamedBlock
from shoal.engine.protocol import Control
from shoal.engine.rows import Builder
from shoal.engine.signals import Signals, can_share_semaphores
from shoal.engine.template import boot_worker, python_command
from shoal.engine.worker import watch_parent, worker_main

START_METHODS = ("forkserver", "spawn", "fork")


class Launcher(ABC):
    """Starts the workers of one pool and watches over them.

    Attributes:
        pids: process id of each worker that was started, by index.
        exitcodes: exit code (or minus the signal) of each worker known to have ended, by index.
    """

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.exitcodes: dict[int, int] = {}

    @abstractmethod
    def launch(self, particulars: dict[str, Any], builders: Sequence[Builder]) -> Channel:
        """Starts one worker and returns the channel to it; it builds its rows on its own from there."""

    @abstractmethod
    def look(self, seconds: float = 0.0) -> None:
        """Learns who has ended, waiting at most so long for news. Updates `exitcodes`."""

    def kill(self, index: int, number: int) -> None:
        """Sends a signal to a worker that is not known to have ended."""
        pid = self.pids.get(index)
        if pid is not None and index not in self.exitcodes:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def wait_ended(self, indices: Sequence[int], seconds: float) -> bool:
        """Whether all these workers have ended within so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            self.look()
            if all(index in self.exitcodes for index in indices):
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.look(min(left, 0.05))

    @abstractmethod
    def close(self) -> None:
        """Lets go of whatever was needed to start workers; kills those that still live."""


class TemplateLauncher(Launcher):
    """Starts workers through a template process: the default on Linux, and ``forkserver`` and ``spawn`` there.

    Args:
        control: the pool's control block.
        num_threads: threads of the numeric libraries in a worker.
        warm: pickled factories, for the template to import what they need.
        fork: whether workers are forks of the template (else fresh interpreters).
    """

    def __init__(self, control: Block, num_threads: int, warm: Sequence[bytes], *, fork: bool) -> None:
        super().__init__()
        self._control = control
        ours, theirs = socket.socketpair()
        code = "from shoal.engine.template import template_main; template_main()"
        environment = dict(os.environ)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
            environment[name] = str(num_threads)
        self._process = subprocess.Popen(
            python_command(code, theirs.fileno(), os.getpid()), pass_fds=(theirs.fileno(),), env=environment
        )
        theirs.close()
        self._channel = Channel(ours)
        setup = {"path": sys.path, "argv": sys.argv, "num_threads": num_threads, "warm": list(warm), "fork": fork}
        self._channel.send(setup, patience=self._patience)

    def launch(self, particulars: dict[str, Any], builders: Sequence[Builder]) -> Channel:
        ours, theirs = socket.socketpair()
        try:
            self._channel.send(
                {"index": particulars["index"]}, 0, (theirs.fileno(), self._control.descriptor), self._patience
            )
        finally:
            theirs.close()
        channel = Channel(ours)
        packed = [builder.pack() for builder in builders]
        channel.send({**particulars, "builders": packed, "path": sys.path, "argv": sys.argv}, patience=self._patience)
        return channel

    def look(self, seconds: float = 0.0) -> None:
        wait_for(self._channel.sock, False, seconds)
        while self._process is not None:
            try:
                _, (news, index, value) = self._channel.receive(_no_patience)
            except BlockingIOError:
                return
            except (EOFError, OSError):
                self._lost()
                return
            (self.pids if news == "launched" else self.exitcodes)[index] = value

    def close(self) -> None:
        try:
            self._channel.send(None, patience=self._patience)
        except OSError:
            pass
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._channel.close()

    def _lost(self) -> None:
        """The template is gone, and with it all workers: the kernel saw to that."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        for index in self.pids:
            self.exitcodes.setdefault(index, code)
        if not self.pids:
            raise RuntimeError(
                f"the process that imports what the factories need ended with exit code {code} before any worker "
                "started; see what it wrote to standard error"
            )

    def _patience(self, sock: socket.socket, writing: bool) -> None:
        wait_for(sock, writing, 0.2)
        if self._process.poll() is not None:
            raise BrokenPipeError("the template process is gone")


class ForkLauncher(Launcher):
    """Forks workers from the parent itself: ``mp_start_method="fork"``. Factories need not be picklable."""

    def __init__(self, control: Block) -> None:
        super().__init__()
        self._control = control

    def launch(self, particulars: dict[str, Any], builders: Sequence[Builder]) -> Channel:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ours.close()
                watch_parent(parent)
                # Over the socket like any other worker's, so that there is one way to start; the builders stay here.
                code = _run_fork(theirs, particulars, builders, self._control)
            finally:
                os._exit(code)
        theirs.close()
        self.pids[particulars["index"]] = pid
        return Channel(ours)

    def look(self, seconds: float = 0.0) -> None:
        deadline = time.monotonic() + seconds
        while True:
            for index, pid in self.pids.items():
                if index in self.exitcodes:
                    continue
                try:
                    done, status = os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    done, status = pid, 0
                if done:
                    self.exitcodes[index] = os.waitstatus_to_exitcode(status)
                    return
            if time.monotonic() >= deadline:
                return
            time.sleep(0.002)

    def close(self) -> None:
        for index in self.pids:
            self.kill(index, signal.SIGKILL)
        self.wait_ended(list(self.pids), 1.0)


def _run_fork(sock: socket.socket, particulars: dict[str, Any], builders: Sequence[Builder], block: Block) -> int:
    def make_control() -> Control:
        return Control(block.buffer, particulars["n_workers"], particulars["n_rows"])

    return worker_main(
        particulars["index"],
        particulars["rows"],
        builders,
        sock,
        make_control,
        particulars["num_threads"],
    )


class PortableLauncher(Launcher):
    """Starts workers with multiprocessing's ``spawn``: the road where Linux's own means do not exist."""

    def __init__(self, control: NamedBlock, signals: Signals) -> None:
        import multiprocessing

        super().__init__()
        self._context = multiprocessing.get_context("spawn")
        self._control = control
        self._signals = signals
        self._processes: dict[int, Any] = {}

    def launch(self, particulars: dict[str, Any], builders: Sequence[Builder]) -> Channel:
        ours, theirs = socket.socketpair()
        theirs.set_inheritable(True)
        arguments = (theirs, {**particulars, "path": sys.path}, [builder.pack() for builder in builders])
        process = self._context.Process(
            target=_portable_main, args=(*arguments, self._signals, os.getpid()), name="shoal-worker"
        )
        main = sys.modules["__main__"]
        hidden: Any = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
        main.__spec__ = None
        try:
            process.start()  # with no sign of where __main__ came from, so that the child does not run it again
        finally:
            main.__dict__.update(hidden)
        theirs.close()
        index = particulars["index"]
        self._processes[index] = process
        assert process.pid is not None
        self.pids[index] = process.pid
        return Channel(ours)

    def look(self, seconds: float = 0.0) -> None:
        import multiprocessing.connection

        alive = {p.sentinel: i for i, p in self._processes.items() if i not in self.exitcodes}
        if not alive:
            return
        for sentinel in multiprocessing.connection.wait(list(alive), seconds):
            index = alive[sentinel]
            self._processes[index].join()
            self.exitcodes[index] = self._processes[index].exitcode

    def close(self) -> None:
        for process in self._processes.values():
            if process.is_alive():
                process.kill()
            process.join()


def _portable_main(
    sock: socket.socket, particulars: dict[str, Any], builders: list[bytes], signals: Signals, parent: int
) -> None:
    sys.path[:] = particulars["path"]
    if hasattr(os, "getppid"):
        watch_parent(parent)

    def make_control() -> Control:
        name, size = particulars["control"]
        block = NamedBlock(size, name=name)
        return Control(block.buffer, particulars["n_workers"], particulars["n_rows"], signals=signals)

    code = worker_main(
        particulars["index"], particulars["rows"], builders, sock, make_control, particulars["num_threads"]
    )
    if code:
        sys.exit(code)


def default_start_method() -> str:
    """``forkserver`` (the template process) where it is safe and tested, else ``spawn``."""
    return "forkserver" if can_share_semaphores() else "spawn"


def _no_patience(sock: socket.socket, writing: bool) -> None:
    raise BlockingIOError


__all__ = [
    "START_METHODS",
    "ForkLauncher",
    "Launcher",
    "PortableLauncher",
    "TemplateLauncher",
    "boot_worker",
    "default_start_method",
]
