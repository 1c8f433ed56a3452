"""What is known of the faults of a batch: the record of them, the log, and what is to be done about them.

Everything is logged to the standard logger ``"shoal"``, which is quiet unless the program sets logging up: INFO when
workers start, and when a question of the caller's (an attribute, a method, a state) raises; WARNING when a fault was
mended, or a worker had to be killed; ERROR when a fault is raised.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.engine.errors import Fault

log = logging.getLogger("shoal")
log.addHandler(logging.NullHandler())

RAISED = "raised"
RESTARTED = "restarted"
_KEPT = 1000
_LONGEST = 2000
_QUESTIONS = frozenset({"get_attr", "set_attr", "call", "state_dict", "load_state_dict"})
"""Commands whose exceptions are answers to the caller, and harm nothing."""


@dataclass(frozen=True)
class RestartPolicy:
    """How often to start a row again after a fault, for ``on_failure=``.

    Attributes:
        tries: how many faults of one row within ``span`` are mended; the next one is raised.
        span: seconds that a fault counts.
        delay: seconds before a row is started again for the first time within ``span``; each further time takes twice
            as long.
        longest_delay: seconds that the delay does not grow beyond.
    """

    tries: int = 5
    span: float = 60.0
    delay: float = 0.05
    longest_delay: float = 10.0

    def __post_init__(self) -> None:
        if self.tries < 1 or min(self.span, self.delay, self.longest_delay) < 0:
            raise ValueError(f"a restart policy needs tries of at least 1 and no negative seconds, found {self}")


@dataclass(frozen=True)
class FaultRecord:
    """One fault of one row.

    Attributes:
        number: running number of the fault, from 1 on.
        time: when it was noticed, in seconds since the epoch.
        row: index of the sub-environment.
        command: what it was doing (``"step"``, ``"reset"``, ...).
        pid: the process it lived in.
        error: type of the exception, by name; ``WorkerDied`` or ``WorkerTimeout`` if its process is gone.
        message: text of the exception, its first 2,000 characters.
        action: ``"restarted"`` or ``"raised"``.
    """

    number: int
    time: float
    row: int
    command: str
    pid: int
    error: str
    message: str
    action: str


class FaultLog:
    """The faults of an environment, kept through its restarts: the last 1,000 of them, and their number.

    Attributes:
        count: how many there have been in all.
    """

    def __init__(self) -> None:
        self.count = 0
        self._records: deque[FaultRecord] = deque(maxlen=_KEPT)

    @property
    def records(self) -> list[FaultRecord]:
        """The last faults, the oldest first."""
        return list(self._records)

    def add(self, faults: Sequence[Fault], action: str, remark: str = "") -> None:
        """Notes faults, and writes them to the log."""
        together: dict[int, list[Fault]] = {}
        for fault in faults:
            self.count += 1
            self._records.append(
                FaultRecord(
                    self.count,
                    time.time(),
                    fault.row,
                    fault.command,
                    fault.pid,
                    fault.name,
                    _short(fault.message),
                    action,
                )
            )
            # The rows of one process are lost in one event.
            together.setdefault(id(fault.exception) if fault.lost else id(fault), []).append(fault)
        for first, *_ in together.values():
            where = (
                f"{first.name}: {first.message}" if first.lost else f"{first.where()}: {first.name}: {first.message}"
            )
            where, trace = _short(where), f"\n{_short(first.trace.rstrip())}" if first.trace else ""
            log.log(_level(first, action), "%s; %s%s%s", where, action, remark, trace)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def _level(fault: Fault, action: str) -> int:
    if action == RESTARTED:
        return logging.WARNING
    return logging.INFO if fault.command in _QUESTIONS and not fault.lost else logging.ERROR
