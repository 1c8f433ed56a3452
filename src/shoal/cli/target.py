"""From the TARGET of a command line to a factory of environments."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from shoal.cli.failures import FAILED, USAGE, CommandError, Failure

WAYS = "MODULE:FACTORY, path/to/file.py:FACTORY or the id of a Gymnasium environment such as CartPole-v1"

_DOTTED_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_REGISTERED_BY = {"ALE": "ale_py"}
"""Packages that register a namespace only once they are imported, and are named otherwise than it."""


@dataclass(frozen=True)
class Target:
    """What to step.

    Attributes:
        text: as the user wrote it.
        factory: builds one environment; a worker can unpickle it.
        imports: the lines of code that a program needs before `expression`.
        expression: the factory as a program would write it.
    """

    text: str
    factory: Callable[[], Any]
    imports: tuple[str, ...]
    expression: str


def resolve(text: str) -> Target:
    """Finds what a TARGET names.

    A ``.py`` file before the colon is loaded, a dotted name after it is looked up in the module before it, and anything
    else is an id of Gymnasium's, with the module that registers it before the colon if there is one.

    Raises:
        CommandError: nothing is found (exit code 2), or a module raises when it is imported (1).
    """
    module_name, colon, name = text.rpartition(":")
    if not colon:
        if text.endswith(".py"):
            raise CommandError(f"{text} names a file and no factory in it: write {text}:FACTORY", USAGE)
        return _gymnasium_id(text, tried=[])
    if not module_name or not name:
        raise CommandError(f"{text} lacks a {'factory' if module_name else 'module'}: write {WAYS}", USAGE)
    if module_name.endswith(".py"):
        return _attribute(text, _load_file(module_name), name)
    if not _DOTTED_NAME.fullmatch(name):
        return _gymnasium_id(text, tried=[])
    module = _import(module_name)
    if not hasattr(module, name.split(".")[0]):
        return _gymnasium_id(text, tried=[f"the attribute {name} of the module {module_name}: there is none"])
    return _attribute(text, module, name)


def _attribute(text: str, module: ModuleType, name: str) -> Target:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise CommandError(f"{text}: {_name_of(found)} has no attribute {part!r}", USAGE)
        found = getattr(found, part)
    if not callable(found):
        raise CommandError(
            f"{text} is no factory but a value of type {type(found).__name__}: name a callable that builds an "
            "environment, such as a class or a function without arguments",
            USAGE,
        )
    return Target(text, found, (f"from {module.__name__} import {name.split('.')[0]}",), name)


def _name_of(found: Any) -> str:
    return f"the module {found.__name__}" if isinstance(found, ModuleType) else repr(found)


def _load_file(path: str) -> ModuleType:
    """Imports a file by its own name, as a script's neighbours are: so workers can import it too."""
    if not os.path.isfile(path):
        raise CommandError(f"there is no file {path}", USAGE)
    folder, file = os.path.split(os.path.abspath(path))
    name = file.removesuffix(".py")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = _import(name)
    if not os.path.samefile(getattr(module, "__file__", None) or os.devnull, path):
        raise CommandError(
            f"{path} cannot be imported: another module is called {name} already. Rename the file, or put it in a "
            f"package and write PACKAGE.{name}:FACTORY",
            USAGE,
        )
    return module


def _import(name: str) -> ModuleType:
    """Imports a module; the current folder counts."""
    _look_in_current_folder()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _broken(name, error)
        raise CommandError(
            f"no module named {error.name}, neither installed nor in the current folder. A target is {WAYS}", USAGE
        )
    except (Exception, SystemExit) as error:
        raise _broken(name, error)


def _look_in_current_folder() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _broken(name: str, error: BaseException) -> CommandError:
    failure = Failure.of(error)
    return CommandError(f"importing {name} raised {failure.text}", FAILED, failure)


def _gymnasium_id(text: str, tried: list[str]) -> Target:
    """The environment that Gymnasium knows by this id, its newest version if the id names none."""
    import gymnasium

    module_name, _, env_id = text.rpartition(":")
    registrar = _REGISTERED_BY.get(env_id.rpartition("/")[0])
    if not module_name and registrar is not None and find_spec(registrar) is not None:
        module_name = registrar
    if module_name:
        _import(module_name)
    if env_id not in gymnasium.registry:
        versions = [spec.version or 0 for spec in gymnasium.registry.values() if spec.id == f"{env_id}-v{spec.version}"]
        env_id = f"{env_id}-v{max(versions)}" if versions else env_id
    try:
        gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        tried = [*tried, f"the Gymnasium id {env_id}: {str(error).strip()}"]
        raise CommandError(_not_found(text, tried), USAGE)
    whole = f"{module_name}:{env_id}" if module_name else env_id
    return Target(text, partial(gymnasium.make, whole), ("import gymnasium as gym",), f'lambda: gym.make("{whole}")')


def _not_found(text: str, tried: list[str]) -> str:
    lines = [f"{text} names no environment. Tried:", *(f"  - {each}" for each in tried)]
    registrar = _REGISTERED_BY.get(text.rpartition("/")[0])
    if registrar is not None:
        lines.append(f"That namespace comes with the module {registrar}, which is not installed.")
    elif ":" not in text and _is_module(text):
        lines.append(f"{text} is a module: name a factory in it, {text}:FACTORY.")
    elif ":" not in text:
        lines.append(f"If a package of its own registers it, name that package, too: PACKAGE:{text}.")
    return "\n".join([*lines, f"A target is {WAYS}."])


def _is_module(name: str) -> bool:
    _look_in_current_folder()
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
