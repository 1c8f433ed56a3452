"""Each row has a factory of its own."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from shoal.engine.isolation import isolated


@dataclass
class Config:
    values: list[int] = field(default_factory=lambda: [1])


def test_configuration_is_copied_however_a_factory_carries_it() -> None:
    configs: list[Any] = [{"a": [1]}, Config(), SimpleNamespace(a={"b": np.zeros(2)})]
    for config in configs:

        def closure(config: Any = None, captured: Any = config) -> Any:
            return captured

        def outer(config: Any = config) -> Any:
            return lambda: config

        for factory in (
            closure,
            outer(),
            functools.partial(lambda c: c, config),
            functools.partial(lambda *, c: c, c=config),
        ):
            one, two = isolated(factory)(), isolated(factory)()
            assert one is not config
            assert one is not two
            assert factory() is config


def test_what_two_configurations_share_their_copies_share() -> None:
    config = {"sub": {"count": 0}}
    sub = config["sub"]

    def factory() -> int:
        config["sub"]["count"] += 1
        return sub["count"]

    assert [isolated(factory)() for _ in range(2)] == [1, 1]
    assert sub["count"] == 0


class Settings:
    """A configuration as an object of its own."""

    def __init__(self) -> None:
        self.values, self.name = np.zeros(2), "settings"


def test_arrays_and_plain_objects_are_configuration() -> None:
    array, settings = np.zeros(2), Settings()

    def factory() -> tuple[Any, Any]:
        array[0] += 1
        settings.values[0] += 1
        return array, settings

    own = isolated(factory)()
    assert own[0] is not array
    assert own[1] is not settings
    assert array.tolist() == settings.values.tolist() == [0, 0]


def test_everything_else_stays_the_object_it_is() -> None:
    built: list[int] = []
    module = object()
    mixed = {"module": module}

    def factory() -> Any:
        built.append(1)
        return module, mixed

    assert isolated(factory)() == (module, mixed)
    assert isolated(factory)()[1] is mixed
    assert built == [1, 1]
    assert isolated(Config) is Config


def test_a_function_that_calls_itself_and_one_that_calls_another() -> None:
    config = {"n": 2}

    def recursive(n: int = 3) -> int:
        return 0 if n == 0 else 1 + recursive(n - 1)

    def inner() -> dict[str, int]:
        config["n"] += 1
        return config

    def outer() -> dict[str, int]:
        return inner()

    assert isolated(recursive)() == 3
    assert isolated(outer)() == {"n": 3}
    assert isolated(outer)() == {"n": 3}
    assert config == {"n": 2}
    assert isolated(outer).__qualname__ == outer.__qualname__
