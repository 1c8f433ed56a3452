"""Gives each row a factory of its own where rows are built in one process.

A factory that travels to another process arrives with copies of what it closes over. Rows that are built side by side
in one process must not see each other's changes either: what a factory closes over as configuration is copied for each.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np

_ATOMS = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype, type)


def isolated(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A factory like this one whose configuration nobody shares.

    Configuration is what a function closes over or has as defaults, and what a partial carries, if it is a dict, a
    dataclass or a namespace of plain data (numbers, text, arrays and containers of such). Anything else, modules and
    tensors above all, stays the very object it is, and so do bare lists, which programs use to collect things.
    """
    if isinstance(factory, functools.partial):
        kwargs = {name: _own(value) for name, value in factory.keywords.items()}
        return functools.partial(isolated(factory.func), *map(_own, factory.args), **kwargs)
    if not isinstance(factory, types.FunctionType):
        return factory
    cells = factory.__closure__ or ()
    defaults, keyword_defaults = factory.__defaults__, factory.__kwdefaults__
    closure = tuple(_own_cell(cell) for cell in cells)
    own = types.FunctionType(
        factory.__code__,
        factory.__globals__,
        factory.__name__,
        None if defaults is None else tuple(map(_own, defaults)),
        closure or None,
    )
    own.__kwdefaults__ = (
        None if keyword_defaults is None else {name: _own(value) for name, value in keyword_defaults.items()}
    )
    own.__dict__.update(factory.__dict__)
    own.__qualname__, own.__module__, own.__doc__ = factory.__qualname__, factory.__module__, factory.__doc__
    return own


def _own_cell(cell: types.CellType) -> types.CellType:
    try:
        value = cell.cell_contents
    except ValueError:  # not filled yet
        return cell
    if isinstance(value, types.FunctionType) and value.__closure__:
        own: Any = value if _closes_over_itself(value, cell) else isolated(value)
    else:
        own = _own(value)
    return cell if own is value else types.CellType(own)


def _closes_over_itself(function: types.FunctionType, cell: types.CellType) -> bool:
    return any(inner is cell for inner in function.__closure__ or ())


def _own(value: Any) -> Any:
    is_config = (
        isinstance(value, (dict, types.SimpleNamespace, argparse.Namespace))
        or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    ) and _is_plain(value)
    return copy.deepcopy(value) if is_config else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, _ATOMS):
        return True
    if isinstance(value, np.ndarray):
        return bool(value.dtype != object)
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, (types.SimpleNamespace, argparse.Namespace)) or dataclasses.is_dataclass(value):
        return all(map(_is_plain, vars(value).values())) if hasattr(value, "__dict__") else False
    return False
