"""What a factory will import is read from its code, so that the template imports it once for all workers."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from shoal import ParallelEnv
from shoal.engine import needs
from tests.support import Counter


def helper() -> Any:
    import colorsys

    return colorsys


def inside() -> Any:
    import wave as sound
    from html.parser import HTMLParser

    return sound, HTMLParser


def by_helper() -> Any:
    return helper()


def relative() -> Any:
    from . import support  # type: ignore[attr-defined]

    return support


class Callables:
    def __init__(self) -> None:
        self.id = "MountainCar-v0"

    def __call__(self) -> Any:
        import sndhdr_of_nobody

        return sndhdr_of_nobody

    def method(self) -> Any:
        return gym.make("Acrobot-v1")


def closure() -> Callable[[], Any]:
    name = "Pendulum-v1"
    inner = inside

    def factory() -> Any:
        return inner(), gym.make(name)

    return factory


CLASSIC = "gymnasium.envs.classic_control."
CASES: dict[str, tuple[Any, set[str]]] = {
    "in its body": (inside, {"wave", "html.parser"}),
    "in a function that it calls": (by_helper, {"colorsys"}),
    "relative to a package": (relative, set()),
    "by a lambda's id": (lambda: gym.make("CartPole-v1"), {CLASSIC + "cartpole"}),
    "by a partial's id": (functools.partial(gym.make, id="CartPole-v1"), {CLASSIC + "cartpole"}),
    "by an id without its version": (functools.partial(gym.make, "CartPole"), {CLASSIC + "cartpole"}),
    "by an id with a module": (functools.partial(gym.make, "colorsys:CartPole-v1"), {"colorsys", CLASSIC + "cartpole"}),
    "in a closure": (closure(), {"wave", "html.parser", CLASSIC + "pendulum"}),
    "in a callable object": (Callables(), {"sndhdr_of_nobody", CLASSIC + "mountain_car"}),
    "in a bound method": (Callables().method, {CLASSIC + "acrobot", "sndhdr_of_nobody", CLASSIC + "mountain_car"}),
    "in a lambda in a lambda": (lambda: (lambda: __import__("os"), inside)[1](), {"wave", "html.parser"}),
}


@pytest.mark.parametrize("case", CASES)
def test_modules_that_a_factory_names_are_found(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[str] = set()
    monkeypatch.setattr(needs, "_import", found.add)
    factory, expected = CASES[case]
    needs.import_needs(factory)
    assert found >= expected
    assert not {name for name in found - expected if not name.startswith("gymnasium")}, found


def test_what_does_not_import_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_at_import.py").write_text("raise OSError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)

    def factory() -> None:
        import fails_at_import  # type: ignore[import-not-found]  # noqa: F401
        import there_is_no_such_module  # type: ignore[import-not-found]  # noqa: F401

    needs.import_needs(factory)
    assert "fails_at_import" not in sys.modules


@pytest.mark.parametrize("odd", [None, 3, int, gym, {"a": 1}, Counter, len])
def test_what_has_no_code_needs_nothing(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(needs, "_import", found.append)
    needs.import_needs(odd)
    assert found == []


def test_workers_find_it_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    (tmp_path / "imported_within.py").write_text(f"import os\nopen({str(log)!r}, 'a').write(f'{{os.getpid()}} ')\n")
    monkeypatch.syspath_prepend(tmp_path)

    def factory() -> gym.Env:
        import imported_within  # type: ignore[import-not-found]  # noqa: F401

        return Counter()

    env = ParallelEnv(3, factory)
    assert len(log.read_text().split()) == 1
    env.close()


class Tidy(Counter):
    def collects_garbage_after(self) -> int:
        return gc.get_threshold()[0] if gc.isenabled() else 0


def test_workers_collect_garbage_as_usual_though_their_template_does_so_seldom_while_it_imports() -> None:
    env = ParallelEnv(2, Tidy)
    assert env.call("collects_garbage_after") == [gc.get_threshold()[0]] * 2
    env.close()
