"""The template process: imports what the factories need, once, and forks workers from that on demand.

It is a child of the parent, and the parent of the workers. That makes the end of all of them certain: the template
looks after the parent (its socket, and whose child it is), and the kernel kills the workers when the template ends.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from shoal.engine import pickling
from shoal.engine.channel import Channel
from shoal.engine.memory import open_block
from shoal.engine.needs import import_needs
from shoal.engine.protocol import Control
from shoal.engine.rows import PackedBuilder
from shoal.engine.worker import ignore_interrupts, limit_threads, worker_main

_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.5
_GARBAGE_AFTER = 5_000


def python_command(code: str, *arguments: object) -> list[str]:
    """The command line of a fresh interpreter like this one that runs ``code`` with this shoal."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    start = f"import sys; sys.path.insert(0, {root!r}); {code}"
    return [sys.executable, *flags, "-c", start, *map(str, arguments)]


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process as soon as its parent ends; at once if that has happened already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def boot_worker(sock: socket.socket, control_descriptor: int) -> int:
    """Runs a worker whose particulars come over its own channel."""
    channel = Channel(sock)
    _, particulars = channel.receive()
    builders = [
        PackedBuilder(data, [channel.take_descriptor() or 0 for _ in range(count)])
        for data, count in particulars["builders"]
    ]
    sys.path[:] = particulars["path"]
    sys.argv[:] = particulars["argv"]
    _fresh_random_state()

    def make_control() -> Control:
        block = open_block(particulars["control"], control_descriptor)
        return Control(block.buffer, particulars["n_workers"], particulars["n_rows"])

    return worker_main(particulars, builders, channel.sock, make_control)


def exec_main() -> None:
    """Entry of a worker in an interpreter of its own: descriptors and parent come on the command line."""
    descriptor, control_descriptor, parent = map(int, sys.argv[1:4])
    die_with_parent(parent)
    os._exit(boot_worker(socket.socket(fileno=descriptor), control_descriptor))


def template_main() -> None:
    """Entry of the template process: socket and parent come on the command line."""
    descriptor, parent = map(int, sys.argv[1:3])
    ignore_interrupts()
    os._exit(Template(Channel(socket.socket(fileno=descriptor)), parent).run())


class Template:
    """The template's loop.

    Args:
        channel: to the parent.
        parent: its process id.
    """

    def __init__(self, channel: Channel, parent: int) -> None:
        self._channel = channel
        self._parent = parent
        self._children: dict[int, tuple[int, int]] = {}
        self._fork = True
        self._num_threads = 1

    def run(self) -> int:
        """Serves until the parent says so, or is gone; ends the workers that are left.

        The first request is the setup. Then come ``{"warm": factories}``, to import what they need, and
        ``{"launch": key}`` with the descriptors of a worker's channel and control block; the answers are
        ``("launched", key, pid)`` and, at its end, ``("exited", key, code)``. None ends the template.
        """
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            _, setup = self._channel.receive()
            sys.argv[:] = setup["argv"]
            self._num_threads, self._fork = setup["num_threads"], setup["fork"]
            limit_threads(self._num_threads)
            while os.getppid() == self._parent:
                watched: list[Any] = [self._channel.sock, wake_read]
                ready, _, _ = select.select(watched, [], [], _LOOK_SECONDS)
                if wake_read in ready:
                    os.read(wake_read, 4096)
                self._reap()
                if self._channel.sock in ready:
                    _, request = self._channel.receive()
                    if request is None:
                        break
                    if "warm" in request:
                        self._warm(request)
                    else:
                        self._launch(request["launch"], (wake_read, wake_write))
        except (EOFError, OSError):
            pass
        finally:
            self._end_children()
        return 0

    def _warm(self, request: dict[str, Any]) -> None:
        sys.path[:] = request["path"]
        if not self._fork:
            return
        # What is imported stays: looking through it for garbage, again and again, takes an eighth of torchrl's import.
        usual = gc.get_threshold()
        gc.set_threshold(_GARBAGE_AFTER, *usual[1:])
        try:
            for blob in request["warm"]:
                try:
                    factory, _ = pickling.loads(blob)
                except BaseException:
                    # The worker meets the same error when it builds the row, and reports it with the row's number.
                    continue
                import_needs(factory)
            _import_what_follows()
            gc.collect()
            gc.freeze()
        finally:
            gc.set_threshold(*usual)

    def _may_fork(self) -> bool:
        """A fork copies no thread, but the locks that they hold: with threads around, take fresh interpreters."""
        if not self._fork or threading.active_count() > 1:
            return False
        # A numeric library told to use several threads has a pool of them, and knows what to do at a fork.
        return self._num_threads > 1 or len(os.listdir("/proc/self/task")) == 1

    def _launch(self, key: tuple[int, int], wake: tuple[int, int]) -> None:
        descriptor = self._channel.take_descriptor()
        control_descriptor = self._channel.take_descriptor()
        assert descriptor is not None and control_descriptor is not None
        if self._may_fork():
            pid = self._fork_worker(descriptor, control_descriptor, wake)
        else:
            code = "from shoal.engine.template import exec_main; exec_main()"
            process = subprocess.Popen(
                python_command(code, descriptor, control_descriptor, os.getpid()),
                pass_fds=(descriptor, control_descriptor),
            )
            process.returncode = 0  # it is this loop that reaps it
            pid = process.pid
        os.close(descriptor)
        os.close(control_descriptor)
        self._children[pid] = key
        self._channel.send(("launched", key, pid))

    def _fork_worker(self, descriptor: int, control_descriptor: int, wake: tuple[int, int]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            die_with_parent(parent)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._channel.close()
            for end in wake:
                os.close(end)
            code = boot_worker(socket.socket(fileno=descriptor), control_descriptor)
        finally:
            _end_own_children()
            os._exit(code)

    def _reap(self) -> None:
        for pid in list(self._children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._channel.send(("exited", self._children.pop(pid), os.waitstatus_to_exitcode(status)))

    def _end_children(self) -> None:
        for pid in self._children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def _import_what_follows() -> None:
    """Imports what building an environment of a family seen so far will import anyway."""
    modules = []
    if "torchrl" in sys.modules:
        modules += ["shoal.drivers.torchrl", "shoal.drivers.gym_wrapper", "gymnasium"]
    if "gymnasium" in sys.modules:
        modules.append("shoal.drivers.gymnasium")
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            continue


def _fresh_random_state() -> None:
    """Unseeded workers must differ, as fresh interpreters do: a fork has copied the template's random state."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(int.from_bytes(os.urandom(7), "little"))


def _end_own_children() -> None:
    """Lets multiprocessing end the processes that an environment has started, as it does at a normal exit."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        try:
            util._exit_function()
        except Exception:
            pass
