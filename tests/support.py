"""What several test modules need: small environments, and a look at what is left behind."""

from __future__ import annotations

import functools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil

WORKER_MARKS = ("shoal.engine.template", "shoal-worker")


def children() -> list[int]:
    """The processes below this one, zombies left out."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in command:
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def descriptors() -> list[str]:
    """What the descriptors that this process has open lead to."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return sorted(found)


def shared_names() -> set[str]:
    """The names that this process has made in shared memory and in the temporary folder."""
    mine = f"shoal-{os.getpid()}-*"
    return {str(path) for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).glob(mine)}


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether the condition comes true within so many seconds. For the end of other processes, which nobody signals."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def script(code: str) -> subprocess.Popen[str]:
    """Starts a fresh interpreter that runs some code, in a process group of its own."""
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def ended(pids: list[int]) -> bool:
    """Whether all these processes end within two seconds."""

    def gone(pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rsplit(")", 1)[1].split()[0] == "Z"
        except OSError:
            return True

    return until(lambda: all(gone(pid) for pid in pids), 2.0)


class Counter(gym.Env):
    """Observes (steps since the reset, resets, steps in all); ends after ``length`` steps."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, length: int = 5, log: str | None = None) -> None:
        self.length = length
        self.steps = self.resets = self.total = 0
        self.log = log
        self.note("build")

    def note(self, what: str) -> None:
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{what} {os.getpid()}\n")

    def observe(self) -> np.ndarray:
        return np.array([self.steps, self.resets, self.total], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.note("reset")
        super().reset(seed=seed)
        self.steps = (options or {}).get("start", 0)
        self.resets += 1
        return self.observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.total += 1
        return self.observe(), float(action), self.steps >= self.length, False, {}

    def double(self, value: int) -> int:
        return 2 * value

    def close(self) -> None:
        self.note("close")


class Trouble(Counter):
    """Does ``what`` when it does ``when``: in its ``at``-th step (or reset, ...)."""

    def __init__(self, what: str = "", when: str = "step", at: int = 2, length: int = 100) -> None:
        self.what, self.when, self.at = what, when, at
        self.seen = 0
        super().__init__(length)
        self.trouble("build")

    def trouble(self, when: str) -> None:
        if when != self.when or not self.what:
            return
        self.seen += 1
        if self.seen != self.at and when != "build":
            return
        ACTS[self.what]()

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.trouble("seed" if kwargs.get("seed") is not None else "reset")
        return super().reset(**kwargs)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.trouble("step")
        return super().step(action)

    def method(self) -> None:
        self.trouble("method")

    def close(self) -> None:
        self.trouble("close")


class Named(Counter):
    """Has attributes and methods to look at."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.inner = Inner(index)

    def add(self, value: int, *, times: int = 1) -> int:
        return self.index + times * value

    def fail(self) -> None:
        raise KeyError("inside")

    def lock(self) -> Any:
        return threading.Lock()

    def poison(self) -> Any:
        return Poison()


class Poison:
    """Pickles, and does not unpickle."""

    def __reduce__(self) -> Any:
        return int, ("poison",)


class Inner:
    """What an attribute may lead to."""

    def __init__(self, index: int) -> None:
        self.value = 10 * index

    def square(self) -> int:
        return self.value**2


class ThreadsEnv(Counter):
    """Knows how many threads the numeric libraries were told to use before it was built."""

    def __init__(self) -> None:
        super().__init__()
        self.variable = os.environ["OMP_NUM_THREADS"]


class WithChild(Counter):
    """Starts a child process when it is built, and ends it when it is closed."""

    def __init__(self) -> None:
        super().__init__()
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        self.child = context.Process(target=_answer, args=(theirs,), daemon=True)
        self.child.start()
        self.answer = ours.recv()

    def close(self) -> None:
        self.child.terminate()
        self.child.join()


def _answer(pipe: Any) -> None:
    pipe.send(42)
    pipe.recv()


class SlowMethod(Counter):
    """Has a method that takes its time."""

    def slow(self, seconds: float) -> str:
        time.sleep(seconds)
        return "late"


class TwoArguments(Exception):
    """An exception that pickle cannot rebuild: its constructor takes other arguments than it passes on."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.first, self.second = first, second


class Unpicklable(Exception):
    """An exception that can neither be pickled nor rebuilt from its parts."""

    def __new__(cls, *, key: object) -> Unpicklable:
        return super().__new__(cls)

    def __init__(self, *, key: object) -> None:
        super().__init__("cannot be pickled")

    def __reduce__(self) -> Any:
        raise TypeError("no")


def _raise(make: Callable[[], BaseException]) -> None:
    raise make()


def _hang() -> None:
    while True:
        time.sleep(0.05)


def _spin() -> None:
    while True:
        pass


def _exhaust_memory() -> None:
    """Asks for more memory than this process may have."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**26, hard))
    try:
        bytearray(2**34)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


ACTS: dict[str, Callable[[], None]] = {
    "raise": lambda: _raise(lambda: ValueError("boom")),
    "two": lambda: _raise(lambda: TwoArguments(1, 2)),
    "unpicklable": lambda: _raise(lambda: Unpicklable(key=0)),
    "system-exit": lambda: _raise(lambda: SystemExit(4)),
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), 9),
    "stop": lambda: os.kill(os.getpid(), 19),
    "hang": _hang,
    "spin": _spin,
    "memory": _exhaust_memory,
}


def rows_with(row: int, n_rows: int = 3, **kwargs: Any) -> list[Callable[[], gym.Env]]:
    """Factories of which only one row's makes trouble."""
    return [functools.partial(Trouble, **kwargs) if i == row else Trouble for i in range(n_rows)]
