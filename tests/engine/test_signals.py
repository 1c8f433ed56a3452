"""Semaphores in shared memory, the countdown, and waiting."""

from __future__ import annotations

import mmap
import os
import time

import pytest

from shoal.engine import signals
from shoal.engine.signals import SEMAPHORE_BYTES, Signals, Waiter, _UnnamedSemaphore, empty, shared_semaphores


@pytest.fixture(params=["wrapped", "ctypes"])
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "ctypes":
        monkeypatch.setattr(signals, "_wrap", _UnnamedSemaphore)
    return str(request.param)


def test_a_semaphore_counts(road: str) -> None:
    buffer = mmap.mmap(-1, 4096)
    (semaphore,) = shared_semaphores(buffer, 0, 1, fresh=True)
    assert not semaphore.acquire(False)
    semaphore.release()
    semaphore.release()
    assert semaphore.acquire(False)
    assert semaphore.acquire(True, 1.0)
    start = time.monotonic()
    assert not semaphore.acquire(True, 0.01)
    assert 0.009 <= time.monotonic() - start < 1.0


def test_the_last_of_the_workers_rings_and_no_other(road: str) -> None:
    buffer = mmap.mmap(-1, Signals.bytes_for(3) + SEMAPHORE_BYTES)
    parent = Signals.in_block(buffer, SEMAPHORE_BYTES, 3, fresh=True)
    for completion in parent.completions:
        for _ in range(2):
            completion.countdown.release()
        for last in (False, False, True):
            assert not completion.done.acquire(False)
            completion.finish()
            assert not last or completion.done.acquire(False)


def test_what_others_have_left_in_a_semaphore_is_taken_out(road: str) -> None:
    buffer = mmap.mmap(-1, 4096)
    first, second = shared_semaphores(buffer, 0, 2, fresh=True)
    for _ in range(3):
        first.release()
    empty(first, second)
    assert not first.acquire(False)
    assert not second.acquire(False)


def test_two_processes_alternate_twenty_thousand_times_without_losing_a_ring(road: str) -> None:
    buffer = mmap.mmap(-1, 4096)
    shared_semaphores(buffer, 0, 2, fresh=True)
    pid = os.fork()
    if pid == 0:
        there, back = shared_semaphores(buffer, 0, 2, fresh=False)
        waiter = Waiter(there)
        for _ in range(20_000):
            waiter.wait()
            back.release()
        os._exit(0)
    there, back = shared_semaphores(buffer, 0, 2, fresh=False)
    waiter = Waiter(back)
    for _ in range(20_000):
        there.release()
        assert waiter.wait(10.0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not back.acquire(False)


def test_after_long_waits_a_waiter_sleeps_at_once() -> None:
    buffer = mmap.mmap(-1, 4096)
    (semaphore,) = shared_semaphores(buffer, 0, 1, fresh=True)
    waiter = Waiter(semaphore, poll_seconds=0.001)
    assert not waiter.wait(0.05)
    used = time.process_time()
    assert not waiter.wait(0.3)
    assert time.process_time() - used < 0.03
