"""The controller's side of a host process: start it, command it, look at its processes, end all of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from contenders import Task

HOST_SCRIPT = Path(__file__).with_name("host.py")
COMMAND_TIMEOUT_SECONDS = 300.0
CLOSE_TIMEOUT_SECONDS = 30.0


class ContenderFailed(Exception):
    """A contender could not be built, run or closed; the text says why."""


@dataclass(frozen=True)
class Memory:
    """Unshared memory in bytes (what would be freed if the process ended) of each worker, and of their templates."""

    workers: list[int]
    templates: list[int]


class HostProcess:
    """A fresh interpreter that holds one contender.

    It leads a session of its own, so Ctrl-C reaches the controller alone, and `shut` can end whatever it left behind.

    Args:
        key: The contender's key in `contenders.CONTENDERS`.
        task: What it has to step.
        verbose: Let the host and its workers write to the terminal.
    """

    def __init__(self, key: str, task: Task, *, verbose: bool = False) -> None:
        self.key = key
        self.task = task
        self._connection, theirs = multiprocessing.Pipe()
        output = None if verbose else subprocess.DEVNULL
        self._process = subprocess.Popen(
            [sys.executable, str(HOST_SCRIPT), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        theirs.close()
        self._closing: list[psutil.Process] | None = None  # the processes that closing has to end
        self.send("load", key, task)

    def send(self, *command: Any) -> None:
        """Give a command without waiting for it, so that several hosts can work at once."""
        with contextlib.suppress(BrokenPipeError):  # a host that is gone is reported by receive()
            self._connection.send(command)

    def receive(self, timeout: float = COMMAND_TIMEOUT_SECONDS) -> Any:
        """Return the answer to the oldest command without one.

        Raises:
            ContenderFailed: The command raised, outlasted `timeout`, or the host died.
        """
        deadline = time.monotonic() + timeout
        # A worker may have inherited the other end, so an end of file cannot be waited for: look at the process too.
        while not self._connection.poll(0.2):
            if self._process.poll() is not None:
                raise ContenderFailed(f"its process ended with exit code {self._process.returncode}")
            if time.monotonic() > deadline:
                raise ContenderFailed(f"no answer within {timeout:.0f} s")
        try:
            state, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise ContenderFailed(f"its process ended with exit code {self._process.wait()}") from None
        if state == "failed":
            raise ContenderFailed(value)
        return value

    def ask(self, *command: Any) -> Any:
        """Give a command and wait for its answer. Raises as `receive` does."""
        self.send(*command)
        return self.receive()

    def descendants(self) -> list[psutil.Process]:
        """All processes below the host, but for Python's own resource trackers."""
        found = []
        try:
            processes = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if not any("resource_tracker" in word for word in process.cmdline()):
                    found.append(process)
        return found

    def memory(self) -> Memory:
        """Measure the workers. A process that has workers below it is a template, the others are workers."""
        processes = self.descendants()
        parents = {process.ppid() for process in processes}
        unshared = {process.pid: process.memory_full_info().uss for process in processes}
        return Memory(
            workers=[size for pid, size in unshared.items() if pid not in parents],
            templates=[size for pid, size in unshared.items() if pid in parents],
        )

    def worker_cpu_seconds(self) -> float:
        """Processor time that all processes below the host have used so far."""
        return sum(_cpu_seconds(process) for process in self.descendants())

    def cpu_seconds(self) -> float:
        """Processor time that the host and all processes below it have used so far."""
        own = _cpu_seconds(psutil.Process(self._process.pid)) if self._process.poll() is None else 0.0
        return own + self.worker_cpu_seconds()

    def begin_close(self) -> None:
        """Tell the contender to close, without waiting for it."""
        if self._closing is None:
            self._closing = self.descendants()
            self.send("close")

    def shut(self) -> list[str]:
        """Close the contender, then end every process of this session.

        Returns:
            What went wrong, in words: a failing close, processes that outlived it. Empty when all went well.
        """
        complaints = []
        self.begin_close()
        processes = self._closing or []
        try:
            self.receive(CLOSE_TIMEOUT_SECONDS)
        except ContenderFailed as error:
            complaints.append(f"close failed: {error}")
        self._connection.close()
        _, alive = psutil.wait_procs(processes, timeout=2.0)
        if alive := [process for process in alive if _is_running(process)]:
            complaints.append(f"{len(alive)} of its {len(processes)} processes outlived close()")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        return complaints


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)  # a dead child that a slow init has not collected yet
    except psutil.NoSuchProcess:
        return False


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
