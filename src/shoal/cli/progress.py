"""What a benchmark tells while it runs, on the error stream, so that its output can be piped."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

_START_OF_LINE, _CLEAR_LINE = "\r", "\x1b[2K"


class Progress:
    """Counts the measurements: one line that changes in a terminal, one line for each elsewhere.

    Args:
        stream: where to; None for nowhere.
        total: how many measurements there are.
    """

    def __init__(self, stream: TextIO | None, total: int) -> None:
        self._stream = stream
        self._in_place = stream is not None and stream.isatty()
        self._total = total
        self._done = 0
        self._start = time.monotonic()

    def begin(self, label: str) -> None:
        """Says what is being measured."""
        if self._in_place:
            self._show(f"[{self._done + 1}/{self._total}] {label}{self._left()}", end="")

    def end(self, label: str, outcome: str) -> None:
        """Says what came of it."""
        self._done += 1
        if not self._in_place:
            self._show(f"[{self._done}/{self._total}] {label}: {outcome}", end="\n")

    def note(self, text: str) -> None:
        """Says something that stays."""
        self._show(text, end="\n")

    def clear(self) -> None:
        """Takes the changing line away."""
        if self._in_place:
            self._show("", end="")

    def _left(self) -> str:
        if not self._done:
            return ""
        seconds = (time.monotonic() - self._start) / self._done * (self._total - self._done)
        return f", about {seconds:.0f} s left" if seconds < 100 else f", about {seconds / 60:.0f} min left"

    def _show(self, text: str, end: str) -> None:
        if self._stream is None:
            return
        if self._in_place:
            width = shutil.get_terminal_size().columns - 1
            text = _START_OF_LINE + _CLEAR_LINE + (text if end else text[:width])
        self._stream.write(text + end)
        self._stream.flush()
