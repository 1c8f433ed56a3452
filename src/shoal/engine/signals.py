"""Doorbells and completions: how a worker is woken, and the parent once per command.

Every signal is a counting semaphore. On Linux they are unnamed POSIX semaphores inside the shared control block: no
name that could leak, no descriptor, a few tens of nanoseconds to poll, and acquire/release ordering for the memory
written before them on every processor. Elsewhere they are multiprocessing's own.

Thread rules: one worker waits on its doorbell, one thread of the parent waits on ``done``; anybody may ring.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

SEMAPHORE_BYTES = 64
"""Room for one semaphore: more than any platform's ``sem_t``, and a cache line of its own."""

POLL_SECONDS = 1e-3
"""Waits that have lately been shorter than this are polled, longer ones slept through."""

POLL_SECONDS_ON_FULL_CPUS = 3e-4
"""The same for a parent with a worker to each processor: its polling takes one of them from a worker, and moves them
about. Where workers are more, or fewer, it is in nobody's way."""

_COUNTING = 1
_MAX_COUNT = 2**31 - 1

_yield: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


def usable_cpus() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Semaphore(Protocol):
    """A counting semaphore; the two methods that the engine needs."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Takes one, waiting for it if ``block``; False if there was none in time."""

    def release(self) -> None:
        """Gives one."""


def can_share_semaphores() -> bool:
    """Whether semaphores can live inside a shared block on this system."""
    return sys.platform == "linux"


class _UnnamedSemaphore:
    """A semaphore at an address of shared memory, through the C library; the road without CPython's own wrapper."""

    def __init__(self, address: int) -> None:
        self._address = ctypes.c_void_p(address)
        self._poll = ctypes.PyDLL(None).sem_trywait
        self._post = ctypes.PyDLL(None).sem_post
        library = ctypes.CDLL(None, use_errno=True)
        self._wait = library.sem_wait
        self._timed_wait = library.sem_timedwait

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        if self._poll(self._address) == 0:
            return True
        if not block:
            return False
        if timeout is None:
            while self._wait(self._address) != 0:
                pass
            return True
        deadline = time.time() + timeout
        limit = _TimeSpec(int(deadline), int(deadline % 1 * 1e9))
        while self._timed_wait(self._address, ctypes.byref(limit)) != 0:
            if time.time() >= deadline:
                return False
        return True

    def release(self) -> None:
        self._post(self._address)


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _wrap(address: int) -> Semaphore:
    """CPython's semaphore type over an address: polls in 40 ns where ctypes takes 160.

    Its destructor calls ``sem_close``, which glibc refuses harmlessly for a semaphore it did not open; other C
    libraries are not trusted with that.
    """
    try:
        if "glibc" not in os.confstr("CS_GNU_LIBC_VERSION"):  # type: ignore[operator]
            return _UnnamedSemaphore(address)
        import _multiprocessing  # type: ignore[import-not-found]

        semaphore: Any = _multiprocessing.SemLock._rebuild(address, _COUNTING, _MAX_COUNT, None)
        return semaphore  # type: ignore[no-any-return]
    except (ImportError, AttributeError, TypeError, ValueError, OSError):
        return _UnnamedSemaphore(address)


def shared_semaphores(buffer: Any, offset: int, count: int, *, fresh: bool) -> list[Semaphore]:
    """``count`` semaphores from ``offset`` on in a shared block.

    Args:
        buffer: the block's memory; it must outlive the semaphores.
        offset: where the first one lies.
        count: how many.
        fresh: whether to set them up (the process that created the block does, before anybody else looks).
    """
    base = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) + offset
    addresses = [base + i * SEMAPHORE_BYTES for i in range(count)]
    if fresh:
        set_up = ctypes.CDLL(None, use_errno=True).sem_init
        for address in addresses:
            if set_up(ctypes.c_void_p(address), 1, 0) != 0:
                raise OSError(ctypes.get_errno(), "sem_init failed")
    return [_wrap(address) for address in addresses]


@dataclass
class Completion:
    """How the workers of one command tell the parent, once, that all of them have finished.

    A command to W workers counts down without a lock: ``countdown`` is primed with W - 1, each finishing worker tries
    to take one, and the one that finds none left is the last and rings ``done``.
    """

    countdown: Semaphore
    done: Semaphore

    def finish(self) -> None:
        """Called by a worker whose answer is written: rings the parent if no other worker is still at it."""
        if not self.countdown.acquire(False):
            self.done.release()


@dataclass
class Signals:
    """All semaphores of one pool.

    There are two completions, of which one is in use. A worker that died or was killed may have left the one in use
    with any count; the parent goes over to the other then, which nobody alive touches any more (see
    `shoal.engine.pool.Pool`).
    """

    doorbells: list[Semaphore]
    completions: tuple[Completion, Completion]
    memory: Any = None
    """What the semaphores lie in: it lives as long as they do."""

    @classmethod
    def in_block(cls, buffer: Any, offset: int, n_workers: int, *, fresh: bool) -> Signals:
        """The signals inside a shared control block."""
        first, *rest = shared_semaphores(buffer, offset, n_workers + 4, fresh=fresh)
        return cls(rest[3:], (Completion(first, rest[0]), Completion(rest[1], rest[2])), buffer)

    @staticmethod
    def bytes_for(n_workers: int) -> int:
        """Bytes that the signals of so many workers take in the control block."""
        return (n_workers + 4) * SEMAPHORE_BYTES


def empty(*semaphores: Semaphore) -> None:
    """Takes all that is in these semaphores; nobody else may use them at that time."""
    for semaphore in semaphores:
        while semaphore.acquire(False):
            pass


class Waiter:
    """Waits on one semaphore in three phases: try it, try it while yielding the processor, sleep.

    Sleeping costs some 35 us to wake from; yielding between tries costs nothing as long as somebody else has work to
    do. How long to yield follows what waits have lately taken: where they are long, the waiter sleeps at once, so that
    a parent that waits for slow environments, or a worker whose parent learns, uses no processor.
    """

    def __init__(self, semaphore: Semaphore, poll_seconds: float = POLL_SECONDS) -> None:
        self._acquire = semaphore.acquire
        self._poll_seconds = poll_seconds
        self._recent = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the semaphore was taken within ``timeout`` seconds (None: however long it takes)."""
        acquire = self._acquire
        if acquire(False):
            self._recent *= 0.75
            return True
        clock = time.perf_counter
        start = clock()
        if self._recent < self._poll_seconds:
            limit = start + self._poll_seconds
            if timeout is not None and timeout < self._poll_seconds:
                limit = start + timeout
            while True:
                for _ in range(4):
                    _yield()
                    if acquire(False):
                        self._recent += 0.25 * (clock() - start - self._recent)
                        return True
                if clock() >= limit:
                    break
        taken = acquire(True, timeout)
        self._recent += 0.25 * (clock() - start - self._recent)
        return taken
