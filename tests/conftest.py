"""Fixtures for all tests."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from multiprocessing import resource_tracker

import pytest

from shoal.engine import launch
from tests import support


@pytest.fixture(scope="session", autouse=True)
def one_template() -> Iterator[None]:
    """Lets all pools of a test process share one template process, so that torch is imported once."""
    with launch.hold_templates():
        yield


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails if a test leaves a process, a descriptor or a name in shared memory behind."""
    resource_tracker.ensure_running()  # multiprocessing's own, once a process
    _collect()
    processes, names = set(support.children()), support.shared_names()
    open_before = support.descriptors()
    yield
    _collect()
    held = {template._process.pid for template in (launch._held or {}).values()}
    assert support.until(lambda: set(support.children()) <= processes | held), "a worker process is left"
    assert support.shared_names() <= names, "a name is left in shared memory or the temporary folder"
    allowed = len(open_before) + len(held - processes)  # a channel to each template that the test has brought up
    left = Counter(support.descriptors()) - Counter(open_before)
    assert len(support.descriptors()) <= allowed, f"a descriptor is left open: {left}"


_seen = 0


def _collect() -> None:
    """A collection that spends no time on what a test has imported: a tenth of a second each with torch around."""
    global _seen
    gc.collect()
    if len(sys.modules) > _seen:
        _seen = len(sys.modules)
        gc.freeze()
