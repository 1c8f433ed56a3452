"""Ctrl-C, also where a library swallows it."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """Within this context, remembers that Ctrl-C was pressed.

    A ``KeyboardInterrupt`` that reaches Python inside an extension module, or a callback, can turn into another
    exception or be lost; the imports of large libraries do both.
    """

    def __init__(self) -> None:
        self._seen = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # a background job of a script: it stays so
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._before = signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._seen = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """To be called now and then.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        if self._seen:
            raise KeyboardInterrupt
