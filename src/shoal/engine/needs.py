"""What a factory will import once it runs, read from its code without running it.

A factory often imports inside its body, or through an environment's id (``lambda: gym.make("HalfCheetah-v5")``).
Imported in the template, such modules are loaded once for all workers; each worker that meets them unprepared loads
them by itself. A wrong guess costs an import that nobody uses, and changes nothing else.
"""

from __future__ import annotations

import dis
import functools
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

_MOST = 200
"""Objects to look at: enough for any factory, and an end for one that refers to half a program."""


def import_needs(factory: Any) -> None:
    """Imports what the factory's code names; what cannot be imported is the factory's own affair."""
    strings: list[str] = []
    for kind, name in _names(factory):
        if kind == "module":
            _import(name)
        else:
            strings.append(name)
    for text in strings:
        for module in _modules_of_id(text):
            _import(module)


def _import(name: str) -> None:
    if name in sys.modules:
        return
    try:
        importlib.import_module(name)
    except BaseException:  # SystemExit too: the worker that runs the factory is where that belongs
        pass


def _names(factory: Any) -> Iterator[tuple[str, str]]:
    """The modules that the code of a factory imports, and the texts that it uses."""
    waiting: list[Any] = [factory]
    seen: set[int] = set()
    homes: set[str] = set()
    while waiting and len(seen) < _MOST:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, str):
            yield "text", value
        elif isinstance(value, types.CodeType):
            waiting.extend(value.co_consts)
            yield from (("module", name) for name in _imports(value))
        elif isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.MethodType):
            waiting += [value.__func__, value.__self__]
        elif isinstance(value, types.FunctionType):
            waiting += [value.__code__, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            waiting += [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
            homes = homes or {_package(value)}
            named = [value.__globals__.get(name) for name in value.__code__.co_names]
            waiting += [each for each in named if isinstance(each, (functools.partial, str))]
            # Into the factory's own package, not into the libraries that it calls.
            waiting += [each for each in named if isinstance(each, types.FunctionType) and _package(each) in homes]
        elif not isinstance(value, (type, types.ModuleType)) and callable(value):
            waiting += [type(value).__call__, *getattr(value, "__dict__", {}).values()]


def _package(function: types.FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that the enclosing function has not bound yet
        return False


def _imports(code: types.CodeType) -> Iterator[str]:
    level: Any = 0
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_CONST" and isinstance(instruction.argval, int):
            level = instruction.argval  # of the import that follows, if one does: 0 for an absolute one
        elif instruction.opname == "IMPORT_NAME" and level == 0:
            yield instruction.argval


def _modules_of_id(text: str) -> Iterator[str]:
    """The modules behind an environment's id, if the text is one that Gymnasium knows."""
    registration = sys.modules.get("gymnasium.envs.registration")
    if registration is None or len(text) > 200 or " " in text:
        return
    module, colon, name = text.rpartition(":")
    if colon and module.replace(".", "").isidentifier():
        yield module  # "module:Id": importing it registers the id
    spec = registration.registry.get(name) or _latest(registration, name)
    if spec is not None and isinstance(spec.entry_point, str):
        yield spec.entry_point.partition(":")[0]


def _latest(registration: Any, name: str) -> Any:
    """The newest version of an id that was given without one."""
    try:
        namespace, base, version = registration.parse_env_id(name)
        newest = registration.find_highest_version(namespace, base) if version is None else None
        return registration.registry.get(registration.get_env_id(namespace, base, newest))
    except Exception:
        return None
