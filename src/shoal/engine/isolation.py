"""Gives each row a factory of its own where rows are built in one process.

A factory that travels to another process arrives with copies of what it closes over. Rows that are built side by side
in one process must not see each other's changes either: what a factory closes over as configuration is copied for each.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np

_ATOMS = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype, type)


def isolated(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A factory like this one whose configuration nobody shares.

    Configuration is what a function closes over or has as defaults, and what a partial carries, if it is a dict, an
    array, a dataclass, a namespace or a plain object of plain data (numbers, text, arrays and containers of such).
    Anything else, modules and tensors above all, stays the very object it is, and so do bare lists, which programs use
    to collect things.
    """
    return _isolated(factory, {})


def _isolated(factory: Callable[..., Any], memo: dict[int, Any]) -> Callable[..., Any]:
    if isinstance(factory, functools.partial):
        kwargs = {name: _own(value, memo) for name, value in factory.keywords.items()}
        args = [_own(value, memo) for value in factory.args]
        return functools.partial(_isolated(factory.func, memo), *args, **kwargs)
    if not isinstance(factory, types.FunctionType):
        return factory
    closure = tuple(_own_cell(cell, memo) for cell in factory.__closure__ or ())
    defaults, keyword_defaults = factory.__defaults__, factory.__kwdefaults__
    own = types.FunctionType(
        factory.__code__,
        factory.__globals__,
        factory.__name__,
        None if defaults is None else tuple(_own(value, memo) for value in defaults),
        closure or None,
    )
    if keyword_defaults is not None:
        own.__kwdefaults__ = {name: _own(value, memo) for name, value in keyword_defaults.items()}
    own.__dict__.update(factory.__dict__)
    own.__qualname__, own.__module__, own.__doc__ = factory.__qualname__, factory.__module__, factory.__doc__
    return own


def _own_cell(cell: types.CellType, memo: dict[int, Any]) -> types.CellType:
    try:
        value = cell.cell_contents
    except ValueError:  # not filled yet
        return cell
    if isinstance(value, types.FunctionType) and value.__closure__:
        own: Any = value if _closes_over_itself(value, cell) else _isolated(value, memo)
    else:
        own = _own(value, memo)
    return cell if own is value else types.CellType(own)


def _closes_over_itself(function: types.FunctionType, cell: types.CellType) -> bool:
    return any(inner is cell for inner in function.__closure__ or ())


def _own(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of a configuration, anything else itself. What two of them share, their copies share too (``memo``)."""
    if isinstance(value, (dict, np.ndarray)) or _is_plain_object(value):
        return copy.deepcopy(value, memo) if _is_plain(value) else value
    return value


def _is_plain_object(value: Any) -> bool:
    """Whether a value is an object of a class written in Python that is nothing but its attributes."""
    kind: Any = type(value)
    plain: Any = object
    return isinstance(value, types.SimpleNamespace) or (
        hasattr(value, "__dict__")
        and not isinstance(value, (type, types.ModuleType, types.FunctionType, types.MethodType))
        and not callable(value)
        and kind.__reduce__ is plain.__reduce__
        and kind.__reduce_ex__ is plain.__reduce_ex__
        and "__deepcopy__" not in dir(kind)
        and kind.__module__ != "builtins"
    )


def _is_plain(value: Any, depth: int = 8) -> bool:
    if isinstance(value, _ATOMS):
        return True
    if depth == 0:
        return False
    if isinstance(value, np.ndarray):
        return bool(value.dtype != object)
    if isinstance(value, dict):
        return all(_is_plain(key, depth - 1) and _is_plain(item, depth - 1) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(item, depth - 1) for item in value)
    return _is_plain_object(value) and all(_is_plain(item, depth - 1) for item in vars(value).values())
