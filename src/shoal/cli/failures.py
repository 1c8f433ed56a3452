"""What goes wrong, in one line: for the terminal, for a table and for an exit code."""

from __future__ import annotations

import os
import re
import traceback
from dataclasses import dataclass

USAGE, FAILED, INTERRUPTED = 2, 1, 130

_SHOAL = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FILE_LINE = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)


@dataclass(frozen=True)
class Failure:
    """An exception, kept as text: the exception itself would keep environments alive through its frames.

    Attributes:
        text: type, first line of the message, and where: the row if there is one, and the innermost file and line.
        trace: the whole traceback, with that of the worker it came from.
    """

    text: str
    trace: str

    @classmethod
    def of(cls, exception: BaseException) -> Failure:
        """Describes an exception that was just caught."""
        message = next(iter(str(exception).strip().splitlines()), "")
        name = type(exception).__name__
        where = ", ".join(part for part in (_row(exception), _place(exception)) if part)
        text = f"{name}: {message}" if message else name
        return cls(f"{text} ({where})" if where else text, "".join(traceback.format_exception(exception)))


class CommandError(Exception):
    """Ends the command with one message.

    Args:
        message: what is wrong and, where there is one, the way out.
        code: the exit code: 2 for wrong usage, 1 for what failed.
        failure: the exception behind it, if any.
    """

    def __init__(self, message: str, code: int = FAILED, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.failure = failure


def _row(exception: BaseException) -> str:
    """The sub-environment that raised it, which shoal's engine writes on an exception."""
    row, command = getattr(exception, "row", None), getattr(exception, "command", "")
    if not isinstance(row, int) or row < 0:
        return ""
    return f"row {row}, {command}" if isinstance(command, str) and command else f"row {row}"


def _place(exception: BaseException) -> str:
    """Innermost file and line, in the worker where the exception comes from one; none where that is shoal's own."""
    if isinstance(exception, SyntaxError):
        return ""  # its message says it
    cause = exception.__cause__
    if cause is not None and type(cause).__name__ == "WorkerTraceback":
        first = str(cause).partition("\nin row")[2].partition("\nin row")[0]  # of as many as rows have failed
        places = _FILE_LINE.findall(first)
    else:
        places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(exception.__traceback__)]
    if not places or places[-1][0].startswith(_SHOAL):
        return ""
    file, line = places[-1]
    return f"{_short(file)}:{line}"


def _short(file: str) -> str:
    """A path as a reader here would write it."""
    inside = os.path.relpath(file)
    return file if inside.startswith(os.pardir) else inside
