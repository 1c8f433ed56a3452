"""How values are pickled on their way to another process."""

from __future__ import annotations

import io
import os
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import context, reduction
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


class _SharingPickler(_Pickler):
    """Pickles what processes share (shared tensors, locks and values of multiprocessing) so that it stays shared."""

    def reducer_override(self, value: Any) -> Any:
        reduce = reduction.ForkingPickler._extra_reducers.get(type(value))  # type: ignore[attr-defined]
        if reduce is not None and _is_shared(value):
            return reduce(value)
        return super().reducer_override(value)


def _is_shared(value: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)):
        return True
    return bool(value.device.type == "cpu" and value.is_shared())


def dumps(value: Any) -> bytes:
    """Pickles a value: also functions and classes of ``__main__`` or a notebook, lambdas and closures."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def loads(data: Any) -> Any:
    """The value that `dumps` pickled."""
    return pickle.loads(data)


class Cloudpickled:
    """Carries a value through multiprocessing's own pickling, which knows no lambdas; it arrives as itself."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> Any:
        buffer = io.BytesIO()
        _SharingPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(self._value)
        return loads, (buffer.getvalue(),)


class _Collector:
    """Stands in for the process that multiprocessing thinks it is starting: collects what it would inherit."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        self.descriptors.append(descriptor)
        return len(self.descriptors) - 1

    def DupFd(self, index: int) -> PassedDescriptor:
        return PassedDescriptor(index)


class PassedDescriptor:
    """A descriptor that comes beside the pickled value, by its place among those."""

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        """The descriptor, in the process that has received it."""
        return os.dup(_received[self._index])


_received: Sequence[int] = ()


def dumps_shared(value: Any) -> tuple[bytes, list[int]]:
    """Pickles a value for a worker that is being started, together with what this process shares with it.

    Returns:
        The bytes, and the descriptors that must be sent beside them, soon.
    """
    collector, buffer = _Collector(), io.BytesIO()
    before = context.get_spawning_popen()
    context.set_spawning_popen(collector)  # type: ignore[arg-type]
    try:
        _SharingPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    finally:
        context.set_spawning_popen(before)
    return buffer.getvalue(), collector.descriptors


def loads_shared(data: bytes, descriptors: Sequence[int]) -> Any:
    """The value that `dumps_shared` pickled."""
    with _receiving(descriptors):
        return pickle.loads(data)


@contextmanager
def _receiving(descriptors: Sequence[int]) -> Iterator[None]:
    global _received
    _received = descriptors
    try:
        yield
    finally:
        _received = ()
