"""The exceptions that a user may catch, and how an exception crosses from a worker to its parent."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.engine import pickling


class EnvError(RuntimeError):
    """A sub-environment raised an exception that cannot be rebuilt in this process, or wrote a wrong value.

    Attributes:
        row: the sub-environment's index in the batch.
        command: what it was doing (``"build"``, ``"reset"``, ``"step"``, ...).
        pid: the process it lives in.
    """

    row: int = -1
    command: str = ""
    pid: int = -1


class WorkerDied(RuntimeError):
    """A worker process ended while it was needed.

    Attributes:
        rows: the rows that lived in it.
        pid: its process id.
        exitcode: what it left: an exit code, or minus the number of the signal that killed it; None if unknown.
        command: what it was doing.
    """

    def __init__(self, message: str, rows: Sequence[int] = (), pid: int = -1, exitcode: int | None = None) -> None:
        super().__init__(message)
        self.rows = tuple(rows)
        self.pid = pid
        self.exitcode = exitcode
        self.command = ""


class WorkerTimeout(RuntimeError):
    """A command took longer than ``step_timeout``.

    Attributes:
        rows: the rows whose answer was missing.
        pids: the processes that they lived in, one for each of the rows.
        limit: the limit, in seconds.
        command: what they were doing.
    """

    def __init__(self, message: str, rows: Sequence[int] = (), limit: float = 0.0, pids: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)
        self.pids = tuple(pids)
        self.limit = limit
        self.command = ""


class WorkerTraceback(Exception):
    """Shown as the cause of an exception that comes from a worker: the traceback as it was there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text


@dataclass
class Fault:
    """One exception of one row, in a form that crosses a process.

    Attributes:
        row: index of the sub-environment.
        command: what it was doing.
        pid: process it lives in.
        name: the exception's type, by name.
        message: its text.
        trace: its traceback, as text.
        packed: the exception pickled, or None where it cannot be rebuilt.
        exception: the exception itself, where it never left this process.
        lost: whether the row's process is gone, or was ended.
    """

    row: int
    command: str
    pid: int
    name: str
    message: str
    trace: str
    packed: bytes | None = None
    exception: BaseException | None = None
    lost: bool = False

    @classmethod
    def of_loss(cls, row: int, command: str, error: WorkerDied | WorkerTimeout, pid: int) -> Fault:
        """What the loss of its worker is to one of its rows."""
        return cls(row, command, pid, type(error).__name__, str(error), "", exception=error, lost=True)

    @classmethod
    def capture(cls, row: int, command: str, exception: BaseException, *, remote: bool) -> Fault:
        """Describes an exception that was just caught; with ``remote``, so that it can be sent."""
        fault = cls(row, command, os.getpid(), type(exception).__name__, _text(exception), _trace(exception))
        if remote:
            fault.packed = _pack(exception)
        else:
            fault.exception = exception
        return fault

    def where(self) -> str:
        """Row, command and process in words."""
        return f"row {self.row}, command {self.command!r}, process {self.pid}"

    def rebuild(self) -> BaseException:
        """The exception, of its own type where that can be rebuilt, else an `EnvError`, with row and command in it."""
        exception = self.exception
        if exception is not None and self.lost:
            return exception
        if exception is None and self.packed is not None:
            try:
                exception = _unpack(self.packed)
            except (Exception, SystemExit):
                exception = None
        if exception is None:
            exception = EnvError(f"{self.name} in {self.where()}: {self.message}")
        for name, value in (("row", self.row), ("command", self.command), ("pid", self.pid)):
            try:
                setattr(exception, name, value)
            except (AttributeError, TypeError):
                pass
        note = getattr(exception, "add_note", None)  # from Python 3.11 on
        if note is not None:
            try:
                note(f"shoal: raised by a sub-environment: {self.where()}")
            except (AttributeError, TypeError):  # an exception that is frozen
                pass
        return exception


def raise_faults(faults: Sequence[Fault]) -> None:
    """Raises the first of the faults, with the traceback of each as its cause, but for those that the exception itself
    shows. Does nothing without faults."""
    if not faults:
        return
    exception = faults[0].rebuild()
    parts = [
        f"in {fault.where()}:\n{fault.trace or fault.message}" for fault in faults if fault.exception is not exception
    ]
    if not parts:
        raise exception
    raise exception from WorkerTraceback("\n" + "\n".join(parts))


def _text(exception: BaseException) -> str:
    try:
        return str(exception)
    except BaseException:  # whatever it is, it must not take the worker down
        return f"<the text of {type(exception).__name__} could not be made>"


def _trace(exception: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(exception), exception, exception.__traceback__))
    except BaseException:
        return f"{type(exception).__name__}: {_text(exception)}\n"


def _pack(exception: BaseException) -> bytes | None:
    """Pickles an exception in the first way that is seen to come back: as it is, or from its class, args and dict."""
    try:
        packed = pickling.dumps(("whole", exception))
        if type(_unpack(packed)) is type(exception):
            return packed
    except BaseException:
        pass
    try:
        parts = (type(exception), _picklable(exception.args) or (_text(exception),), _plain_dict(exception))
        packed = pickling.dumps(("parts", parts))
        if _text(_unpack(packed)) == _text(exception):
            return packed
    except BaseException:
        pass
    return None


def _unpack(packed: bytes) -> BaseException:
    kind, value = pickling.loads(packed)
    if kind == "whole":
        exception: BaseException = value
        return exception
    exception_type, args, attributes = value
    exception = exception_type.__new__(exception_type, *args)
    object.__setattr__(exception, "args", args)  # past a class that is frozen
    exception.__dict__.update(attributes)
    return exception


def _picklable(value: Any) -> Any:
    try:
        pickling.loads(pickling.dumps(value))
    except BaseException:
        return None
    return value


def _plain_dict(exception: BaseException) -> dict[str, Any]:
    return {name: value for name, value in vars(exception).items() if _picklable(value) is not None}
