"""Fixtures for all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from multiprocessing import resource_tracker

import pytest

from tests import support


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails if a test leaves a process, a descriptor or a name in shared memory behind."""
    resource_tracker.ensure_running()  # multiprocessing's own, once a process
    gc.collect()
    processes, names = set(support.children()), support.shared_names()
    open_before = support.descriptors()
    yield
    gc.collect()
    assert support.until(lambda: set(support.children()) <= processes), "a worker process is left"
    assert support.shared_names() <= names, "a name is left in shared memory or the temporary folder"
    assert len(support.descriptors()) <= len(open_before), "a descriptor is left open"
