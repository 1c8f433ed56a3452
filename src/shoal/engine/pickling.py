"""How values are pickled on their way to another process."""

from __future__ import annotations

import io
import pickle
import types
from collections import ChainMap
from typing import Any

import cloudpickle

_NO_FILE = "<dynamic-code>"


def _reduce_code(code: types.CodeType) -> Any:
    """Pickles code with the name of its file, so that a traceback in a worker shows where a line stands.

    cloudpickle leaves the name out, to make the same code give the same bytes everywhere.
    """
    build, arguments, *rest = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    named = tuple(code.co_filename if isinstance(value, str) and value == _NO_FILE else value for value in arguments)
    return (build, named, *rest)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table = ChainMap({types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


def dumps(value: Any) -> bytes:
    """Pickles a value: also functions and classes of ``__main__`` or a notebook, lambdas and closures."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def loads(data: Any) -> Any:
    """The value that `dumps` pickled."""
    return pickle.loads(data)
