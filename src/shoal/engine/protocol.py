"""The only words that the parent and its workers exchange.

A command is one 64-bit word in the worker's command line: a sequence number, an opcode and flags. An answer is one word
in the worker's answer line: the sequence number that it answers, and flags. What does not fit in a word (arguments,
leaves of no fixed shape, exceptions) follows over the worker's channel, and the flags say that it does.

A new command is one opcode here and one branch in `shoal.engine.rows.RowGroup`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from shoal.engine.errors import Fault
from shoal.engine.schema import Key
from shoal.engine.signals import Signals


class Opcode(enum.IntEnum):
    """What a worker is to do with its rows."""

    BUILD = 0
    ATTACH = 1
    RESET = 2
    STEP = 3
    STEP_AND_MAYBE_RESET = 4
    SEED = 5
    STATE_DICT = 6
    LOAD_STATE_DICT = 7
    GET_ATTR = 8
    SET_ATTR = 9
    CALL = 10
    CLOSE = 11
    HAS_ATTR = 12
    REBUILD = 13
    SYNC = 14

    @property
    def command(self) -> str:
        """The command as users know it."""
        return self.name.lower()


class Flag:
    """What goes with a command or an answer: bits. (Plain integers: the operators of ``enum.IntFlag`` are Python code,
    and those that a worker needs for one command cost more than an environment's step.)"""

    NONE = 0
    MASKED = 1
    """Command: only the rows whose byte in the mask is set; else all rows of the worker."""
    MESSAGE = 2
    """A value follows over the channel."""
    SECOND = 4
    """Command: completion is signalled through the second of the two completions."""


@dataclass
class StepInput:
    """What one row's step reads besides its buffers.

    Attributes:
        leaves: values of the input leaves that travel by message.
        carried: values for leaves of the result that the caller has set already (a policy's recurrent state, say).
    """

    leaves: dict[Key, Any] = field(default_factory=dict)
    carried: dict[Key, Any] = field(default_factory=dict)


@dataclass
class ResetInput:
    """What one row's reset reads.

    Attributes:
        leaves: values of the caller's leaves for that row, its reset masks among them; None if the caller gave none.
        kwargs: keyword arguments of the reset.
    """

    leaves: dict[Key, Any] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    """What a command gave besides what lies in the buffers.

    Attributes:
        values: one value a row: message leaves by area and key, a seed, a state, a method's result.
        faults: what went wrong, by row.
    """

    values: dict[int, Any] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


_LINE_BYTES = 64
_WORD_BYTES = 8
_LINE_WORDS = _LINE_BYTES // _WORD_BYTES


class Control:
    """The block of command and answer words, row masks and semaphores of one pool.

    Attributes:
        mask: one byte a row: whether it takes part in a masked command.
        fresh: one byte a row: whether the last ``STEP_AND_MAYBE_RESET`` has written its ``ROOT`` area, since the row
            was reset; where not, its root values are those in ``NEXT``, and nobody has copied them.
        worker_times: for each worker, seconds in commands and number of commands.
        row_times: for each row, seconds in its environment and number of its resets and steps.

    Args:
        buffer: the block's memory.
        n_workers: how many workers.
        n_rows: how many rows.
        signals: the semaphores; None if they lie in the block.
        fresh: whether the caller created the block.
    """

    def __init__(
        self, buffer: Any, n_workers: int, n_rows: int, *, signals: Signals | None = None, fresh: bool = False
    ) -> None:
        view = memoryview(buffer)
        lines = 2 * n_workers * _LINE_BYTES
        self._words = view[:lines].cast("q")
        self.mask = view[lines : lines + n_rows]
        self.fresh = view[lines + n_rows : lines + 2 * n_rows]
        self._commands = range(0, n_workers * _LINE_WORDS, _LINE_WORDS)
        self._answers = range(n_workers * _LINE_WORDS, 2 * n_workers * _LINE_WORDS, _LINE_WORDS)
        offset = -(-(lines + 2 * n_rows) // _LINE_BYTES) * _LINE_BYTES
        times = offset + 2 * _WORD_BYTES * n_workers
        self.worker_times = view[offset:times].cast("d")
        self.row_times = view[times : times + 2 * _WORD_BYTES * n_rows].cast("d")
        offset = -(-(times + 2 * _WORD_BYTES * n_rows) // _LINE_BYTES) * _LINE_BYTES
        self.signals = signals or Signals.in_block(buffer, offset, n_workers, fresh=fresh)

    @staticmethod
    def bytes_for(n_workers: int, n_rows: int) -> int:
        """Bytes of a control block."""
        times = 2 * _WORD_BYTES * (n_workers + n_rows)
        return 2 * n_workers * _LINE_BYTES + 2 * n_rows + times + 2 * _LINE_BYTES + Signals.bytes_for(n_workers)

    def command(self, worker: int, sequence: int, opcode: int, flags: int) -> None:
        """Writes a worker's command; ring its doorbell after."""
        self._words[self._commands[worker]] = sequence << 16 | opcode << 8 | flags

    def command_all(self, sequence: int, opcode: int, flags: int) -> None:
        """Writes the same command for all workers."""
        words, word = self._words, sequence << 16 | opcode << 8 | flags
        for place in self._commands:
            words[place] = word

    def cells(self, worker: int) -> tuple[Any, Any]:
        """A worker's command and its answer, a view of one word each: ``sequence << 16 | opcode << 8 | flags``, and
        ``sequence << 8 | flags``. The worker signals completion when the answer is written."""
        words, command, answer = self._words, self._commands[worker], self._answers[worker]
        return words[command : command + 1], words[answer : answer + 1]

    def read_answer(self, worker: int) -> tuple[int, int]:
        """A worker's last answer: the sequence number of the command that it answers, flags."""
        word = self._words[self._answers[worker]]
        return word >> 8, word & 0xFF

    def all_answered(self, sequence: int) -> bool:
        """Whether all workers have answered this command, none of them with flags."""
        words, word = self._words, sequence << 8
        for place in self._answers:  # noqa: SIM110 a generator costs as much as the rest of an exchange
            if words[place] != word:
                return False
        return True
