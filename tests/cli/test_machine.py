"""What the numbers are measured on."""

from __future__ import annotations

import os
import platform

import pytest

from shoal import __version__
from shoal.cli.machine import facts, is_busy, load_average, usable_cpus, versions


def test_usable_cpus_are_those_this_process_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7}, raising=False)
    assert usable_cpus() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert usable_cpus() == 5


def test_the_load_is_none_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.234, 0.0, 0.0), raising=False)
    assert load_average() == 1.23
    monkeypatch.delattr(os, "getloadavg")
    assert load_average() is None


def test_a_machine_is_busy_from_a_quarter_of_its_cpus_on() -> None:
    assert is_busy(0.6, 2)
    assert not is_busy(0.5, 2)
    assert not is_busy(None, 2)


def test_facts_name_no_host_and_versions_name_all_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    known = facts(0.5)
    assert set(known) == {"cpus", "usable_cpus", "load_average", "system", "architecture"}
    assert platform.node() not in map(str, known.values())
    assert versions()["shoal"] == __version__
