"""How worker processes come to life, and how the parent learns of their end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shoal.engine import pickling
from shoal.engine.channel import MOST_DESCRIPTORS, Channel, wait_for
from shoal.engine.memory import Block, NamedBlock
from shoal.engine.protocol import Control
from shoal.engine.rows import Builder
from shoal.engine.signals import Signals, can_share_semaphores
from shoal.engine.template import python_command
from shoal.engine.worker import THREAD_VARIABLES, watch_parent, worker_main

START_METHODS = ("forkserver", "spawn", "fork")


class Launcher(ABC):
    """Starts the workers of one pool and watches over them.

    Attributes:
        pids: process id of each worker that was started, by index.
        exitcodes: exit code (or minus the signal) of each worker known to have ended, by index.
        closing: whether the pool is at its end, so that nothing that is missing is worth an exception.
    """

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.exitcodes: dict[int, int] = {}
        self.closing = False

    @abstractmethod
    def launch(self, particulars: dict[str, Any], builders: Sequence[Builder]) -> Channel:
        """Starts one worker and returns the channel to it; it builds its rows on its own from there."""

    @abstractmethod
    def look(self, seconds: float = 0.0) -> None:
        """Learns who has ended, waiting at most so long for news. Updates `exitcodes`."""

    def forget(self, index: int) -> None:
        """Forgets a worker that has ended: another process is about to stand in its place."""
        self.pids.pop(index, None)
        self.exitcodes.pop(index, None)

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


class TemplateProcess:
    """The parent's handle on a template process, see `shoal.engine.template`.

    Args:
        num_threads: threads of the numeric libraries in it and its workers.
        fork: whether workers are forks of it (else fresh interpreters).
    """

    def __init__(self, num_threads: int, *, fork: bool) -> None:
        self._launchers: dict[int, TemplateLauncher] = {}
        ours, theirs = socket.socketpair()
        code = "from shoal.engine.template import template_main; template_main()"
        environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(num_threads))}
        with interrupts_held_back():
            self._process = subprocess.Popen(
                python_command(code, theirs.fileno(), os.getpid()), pass_fds=(theirs.fileno(),), env=environment
            )
        theirs.close()
        self._channel = Channel(ours)
        self.send({"path": sys.path, "argv": sys.argv, "num_threads": num_threads, "fork": fork})

    def attach(self, launcher: TemplateLauncher, warm: Sequence[bytes]) -> None:
        """Serves a launcher from now on, and imports what its factories need."""
        self._launchers[id(launcher)] = launcher
        self.send({"warm": list(warm), "path": sys.path})

    def detach(self, launcher: TemplateLauncher) -> None:
        """Serves a launcher no more."""
        self._launchers.pop(id(launcher), None)

    def send(self, request: Any, descriptors: Sequence[int] = ()) -> None:
        """Sends a request; see `Template.run` for what it understands.

        Raises:
            OSError: the process is gone.
        """
        self._channel.send(request, 0, descriptors, self.patience)

    def look(self, seconds: float) -> None:
        """Takes in the news of all workers, waiting at most so long for any."""
        if self._channel.closed:  # its workers ended with it
            for launcher in self._launchers.values():
                launcher.lost(-signal.SIGKILL)
            return
        wait_for(self._channel.sock, False, seconds)
        while True:
            try:
                _, (news, (launcher, index), value) = self._channel.receive(_no_patience)
            except BlockingIOError:
                return
            except (EOFError, OSError):
                code = self.end(1.0)
                for each in self._launchers.values():
                    each.lost(code)
                return
            if launcher in self._launchers:
                self._launchers[launcher].take(news, index, value)

    def patience(self, sock: socket.socket, writing: bool) -> None:
        """Waits for the process to read; gives up when it is gone."""
        wait_for(sock, writing, 0.2)
        if self._process.poll() is not None:
            raise BrokenPipeError("the template process is gone")

    def end(self, seconds: float) -> int:
        """Waits for its end, and kills it if that takes longer; returns its exit code."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the process, and with it all of its workers."""
        try:
            self.send(None)
        except OSError:
            pass
        self.end(0.2)
        self._channel.close()


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """A process that is started in this context gets no Ctrl-C until it says that it ignores them; this one gets those
    of the meantime afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_held: dict[tuple[int, bool], TemplateProcess] | None = None


@contextmanager
def hold_templates() -> Iterator[None]:
    """Within this context all pools share their template processes, which live until it ends.

    For programs that start many pools one after the other, such as tests: imports are done once. Modules are not
    imported anew then, so changes to their source are not seen.
    """
    global _held
    if _held is not None:  # within another one, which goes on holding them
        yield
        return
    _held = {}
    try:
        yield
    finally:
        held, _held = _held, None
        for template in held.values():
            template.close()


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
        self._kind = (num_threads, fork)
        self._warm = warm
        self._template = self._a_template()

    def _a_template(self) -> TemplateProcess:
        num_threads, fork = self._kind
        template = None if _held is None else _held.get(self._kind)
        if template is None or not template.alive():
            template = TemplateProcess(num_threads, fork=fork)
        if _held is not None:
            _held[self._kind] = template
        template.attach(self, self._warm)
        return template

    def launch(self, particulars: dict[str, Any], builders: Sequence[Builder]) -> Channel:
        if not self._template.alive():  # it died, and its workers with it: those that follow need another
            self._template.close()
            self._template = self._a_template()
        ours, theirs = socket.socketpair()
        try:
            request = {"launch": (id(self), particulars["index"])}
            self._template.send(request, (theirs.fileno(), self._control.descriptor))
        finally:
            theirs.close()
        channel = Channel(ours)
        packed = [builder.pack() for builder in builders]
        descriptors = [descriptor for each in packed for descriptor in each.descriptors]
        if len(descriptors) > MOST_DESCRIPTORS:
            raise RuntimeError(
                f"the factories share {len(descriptors)} pieces of memory with a worker, more than {MOST_DESCRIPTORS}"
            )
        counted = [(each.data, len(each.descriptors)) for each in packed]
        boot = {**particulars, "builders": counted, "path": sys.path, "argv": sys.argv}
        channel.send(boot, 0, descriptors, self._template.patience)
        return channel

    def look(self, seconds: float = 0.0) -> None:
        self._template.look(seconds)

    def take(self, news: str, index: int, value: int) -> None:
        """Takes one piece of news from the template: a worker's process id, or its exit code."""
        (self.pids if news == "launched" else self.exitcodes)[index] = value

    def lost(self, code: int) -> None:
        """The template is gone, and with it all workers: the kernel saw to that."""
        for index in self.pids:
            self.exitcodes.setdefault(index, code)
        if not self.pids and not self.closing:
            raise RuntimeError(
                f"the process that imports what the factories need ended with exit code {code} before any worker "
                "started; see what it wrote to standard error"
            )

    def close(self) -> None:
        self._template.detach(self)
        if _held is None or self._template not in _held.values():
            self._template.close()


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

    return worker_main(particulars, builders, sock, make_control)


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
        packed = [pickling.Cloudpickled(builder) for builder in builders]
        arguments = (theirs, {**particulars, "path": sys.path}, packed)
        process = self._context.Process(
            target=_portable_main, args=(*arguments, self._signals, os.getpid()), name="shoal-worker"
        )
        main = sys.modules["__main__"]
        hidden: Any = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
        main.__spec__ = None
        try:
            with interrupts_held_back():
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
    sock: socket.socket, particulars: dict[str, Any], builders: list[Builder], signals: Signals, parent: int
) -> None:
    sys.path[:] = particulars["path"]
    if hasattr(os, "getppid"):
        watch_parent(parent)

    def make_control() -> Control:
        name, size = particulars["control"]
        block = NamedBlock(size, name=name)
        return Control(block.buffer, particulars["n_workers"], particulars["n_rows"], signals=signals)

    code = worker_main(particulars, builders, sock, make_control)
    if code:
        sys.exit(code)


def default_start_method() -> str:
    """``forkserver`` (the template process) where it is safe and tested, else ``spawn``."""
    return "forkserver" if can_share_semaphores() else "spawn"


def _no_patience(sock: socket.socket, writing: bool) -> None:
    raise BlockingIOError
