"""What happens after a fault: raise it, or put the row's environment up again and go on.

A row that was put up again has lost its episode. What its training code must see is a truncation: the last good
observation, no reward, ``done`` and ``truncated`` set, ``terminated`` not, so that the value of that observation is
bootstrapped. So a step in which a row failed gives that, whatever the worker may have written of it; and where a row
failed in another command, the next step gives it, without moving the fresh environment.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from shoal.engine.errors import Fault
from shoal.engine.faults import RAISED, RESTARTED, FaultLog, RestartPolicy
from shoal.engine.layout import storage_dtype
from shoal.engine.local import LocalEngine
from shoal.engine.pool import Pool
from shoal.engine.protocol import Answer, Opcode
from shoal.engine.schema import DONE, NEXT, OBSERVATION, ROOT, Key, Leaf, Schema

Engine = LocalEngine | Pool

_STEPS = frozenset({Opcode.STEP, Opcode.STEP_AND_MAYBE_RESET})
_MOVES = _STEPS | {Opcode.RESET}
_MENDED = _MOVES | {Opcode.SEED}


class Recovery:
    """Runs commands on an engine whose options allow to build rows anew, and mends what goes wrong.

    Exceptions of a reset, a step or a seeding are mended by building the environment anew; those of a state, an
    attribute or a method are answers, and raised. A lost worker is replaced in any case; what it was asked for, if it
    was one of the latter, is raised too, since there is no answer to give.

    Args:
        engine: runs the commands; attached.
        schemas: the leaves of each row, as they are transported.
        policy: how often to try.
        faults: where to note what happens.

    Attributes:
        restarted: the rows whose episode the last step has ended because they were put up again.
    """

    def __init__(self, engine: Engine, schemas: Sequence[Schema], policy: RestartPolicy, faults: FaultLog) -> None:
        self._engine = engine
        self._schemas = schemas
        self._policy = policy
        self._faults = faults
        self._replaced: set[int] = set()
        self._completed: set[int] = set()
        self.restarted: set[int] = set()
        self._recent: dict[int, deque[float]] = {}
        self._seeds: dict[int, int] = {}
        self._seedings: dict[int, int] = {}
        self._good = _GoodValues(engine, schemas)

    def run(
        self,
        opcode: Opcode,
        rows: Sequence[int] | None,
        given: dict[int, Any] | None,
        timeout: float | None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Answer | None:
        """Runs a command; its answer has faults only where they are to be raised.

        Raises:
            WorkerDied, WorkerTimeout: a worker was lost once more than the policy allows; the pool is closed then.
        """
        with self._engine.claim():
            return self._run(opcode, rows, given, timeout, meanwhile)

    def _run(
        self,
        opcode: Opcode,
        rows: Sequence[int] | None,
        given: dict[int, Any] | None,
        timeout: float | None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Answer | None:
        everyone = set(range(len(self._schemas)) if rows is None else rows)
        if opcode == Opcode.SEED:
            self._note_seeds(given)
        if opcode == Opcode.STEP_AND_MAYBE_RESET:
            self._engine.fresh[:] = False
            self._completed = set()
        truncated = self._replaced & everyone if self._replaced and opcode in _STEPS else set()
        going = sorted(everyone - truncated) if truncated else rows
        answer: Answer | None = None
        if going or not truncated:
            answer = self._engine.execute_claimed(opcode, going, given, timeout, meanwhile)
        running = everyone
        while answer is not None and answer.faults:
            faults, answer.faults = answer.faults, []
            if opcode == Opcode.STEP_AND_MAYBE_RESET:
                self._completed = {fault.row for fault in faults if self._has_completed(fault.row)}
            if opcode == Opcode.RESET:
                self._replaced -= running - {fault.row for fault in faults}
            put_up, answer.faults = self._mend(opcode, faults)
            if answer.faults:
                break
            # Others than those that failed may have been put up with them: those that share a lost process. Where they
            # took no part in this command, they come back truncated when they step next.
            running = put_up & everyone
            for row in running:
                answer.values.pop(row, None)
            if opcode in _STEPS:
                truncated |= running
            elif running:
                again = self._engine.execute_claimed(opcode, sorted(running), given, timeout) or Answer()
                answer.values.update(again.values)
                answer.faults = again.faults
        if answer is not None and answer.faults:
            self._keep(opcode, sorted(everyone - self._replaced - {fault.row for fault in answer.faults}), answer)
            return answer
        if opcode == Opcode.RESET:
            self._replaced -= running
        if opcode in _STEPS:
            self.restarted = truncated
        if truncated:
            answer = answer or Answer()
            self._end_episodes(opcode, truncated, everyone, answer, timeout)
        self._keep(opcode, rows, answer)
        return answer

    def _has_completed(self, row: int) -> bool:
        """Whether a row that failed has done its step, and only the reset after it failed: its next is as it should be,
        where all of that lies in buffers."""
        schema = self._schemas[row]
        return bool(self._engine.fresh[row]) and all(leaf.fixed for leaf in schema.by_area[NEXT].values())

    def _end_episodes(
        self, opcode: Opcode, truncated: set[int], everyone: set[int], answer: Answer, timeout: float | None
    ) -> None:
        """Lets rows that were put up come back truncated from a step, and resets them if that is part of it."""
        ends: dict[int, dict[Key, Any]] = {}
        while truncated:
            for row in truncated - ends.keys() - self._completed:
                ends[row] = self._end_of_episode(row)
            if opcode == Opcode.STEP:
                break
            for row in truncated:
                self._engine.fresh[row] = True
            fresh = self._run(Opcode.RESET, sorted(truncated), None, timeout) or Answer()
            answer.values.update(fresh.values)
            answer.faults = fresh.faults
            truncated = set() if fresh.faults else self._replaced & everyone
            self.restarted = self.restarted | truncated
        for row, values in ends.items():
            arrays = self._engine.row_arrays[row][NEXT]
            for key, value in values.items():
                if key in arrays:
                    arrays[key][...] = value
                else:
                    answer.values.setdefault(row, {})[NEXT, key] = value

    def _end_of_episode(self, row: int) -> dict[Key, Any]:
        """What the ``NEXT`` area of a row shows that was put up again."""
        return {
            key: _copied(self._good.value(row, key)) if leaf.role == OBSERVATION else _end_value(key, leaf)
            for key, leaf in self._schemas[row].by_area[NEXT].items()
        }

    def _keep(self, opcode: Opcode, rows: Sequence[int] | None, answer: Answer | None) -> None:
        if opcode == Opcode.STEP_AND_MAYBE_RESET:
            reset = self._engine.fresh.nonzero()[0].tolist()
            self._good.keep(NEXT, rows, answer)
            self._good.keep(ROOT, reset if rows is None else [row for row in rows if row in reset], answer)
        elif opcode in _MOVES:
            self._good.keep(NEXT if opcode == Opcode.STEP else ROOT, rows, answer)

    def _mend(self, opcode: Opcode, faults: list[Fault]) -> tuple[set[int], list[Fault]]:
        """Puts up again the environments of the rows that failed, which want a reset then.

        Returns:
            The rows that were put up, and the faults that are to be raised all the same.
        """
        if opcode in _MENDED:
            return self._put_up(faults, seeded=opcode != Opcode.SEED)
        lost = [fault for fault in faults if fault.lost]
        put_up, left = self._put_up(lost, seeded=True) if lost else (set(), [])
        self._faults.add([fault for fault in faults if not fault.lost], RAISED)
        return put_up, left or faults

    def _put_up(self, faults: list[Fault], *, seeded: bool) -> tuple[set[int], list[Fault]]:
        put_up: set[int] = set()
        while faults:
            rows = sorted({fault.row for fault in faults})
            put_up.update(rows)
            self._replaced.update(rows)
            wait = self._admit(rows)
            if wait is None:
                return put_up, self._given_up(faults)
            self._faults.add(faults, RESTARTED, f" in {wait:g} s")
            time.sleep(wait)
            faults = self._engine.rebuild(rows) or (self._seed_again(rows) if seeded else [])
        self._good.restore(put_up - self._completed)
        return put_up, []

    def _admit(self, rows: Sequence[int]) -> float | None:
        """How long to wait before these rows are put up again; None if one of them has failed too often lately."""
        policy, now = self._policy, time.monotonic()
        most = 0
        for row in rows:
            recent = self._recent.setdefault(row, deque())
            while recent and recent[0] < now - policy.span:
                recent.popleft()
            most = max(most, len(recent))
        if most >= policy.tries:
            return None
        for row in rows:
            self._recent[row].append(now)
        return min(policy.delay * 2.0 ** min(most, 60), policy.longest_delay)

    def _given_up(self, faults: list[Fault]) -> list[Fault]:
        """Raises for good: what the policy allows is used up.

        Raises:
            WorkerDied, WorkerTimeout: a worker is gone; the pool is closed then.
        """
        policy = self._policy
        self._faults.add(faults, RAISED, f": {policy.tries} faults within {policy.span:g} s were mended before")
        lost = [fault for fault in faults if fault.lost]
        if lost and isinstance(self._engine, Pool):
            error = lost[0].rebuild()
            self._engine.close_after(error)
            raise error
        return faults

    def _seed_again(self, rows: Sequence[int]) -> list[Fault]:
        """Seeds fresh environments of rows that were seeded: with another seed than before, or the new episode would
        run into the same wall, and with the same one in each run of the program."""
        given = {}
        for row in rows:
            if row in self._seeds:
                self._seedings[row] = count = self._seedings.get(row, 0) + 1
                entropy = [self._seeds[row] % 2**64, count]
                given[row] = (int(np.random.SeedSequence(entropy).generate_state(1)[0]), True)
        answer = self._engine.execute_claimed(Opcode.SEED, list(given), given) if given else None
        return [] if answer is None else answer.faults

    def _note_seeds(self, given: dict[int, Any] | None) -> None:
        for row, (seed, _) in (given or {}).items():
            self._seedings.pop(row, None)
            if seed is None:
                self._seeds.pop(row, None)
            else:
                self._seeds[row] = seed


class _GoodValues:
    """The rows' last good observations: copies, since a worker may die in the middle of writing.

    Args:
        engine: its arrays are copied from.
        schemas: the leaves of each row, as they are transported.
    """

    def __init__(self, engine: Engine, schemas: Sequence[Schema]) -> None:
        self._engine, self._schemas = engine, schemas
        self._shared = {key: array.copy() for key, array in engine.arrays[ROOT].items()}
        self._own = [
            {key: array.copy() for key, array in arrays[ROOT].items() if key not in self._shared}
            for arrays in engine.row_arrays
        ]
        self._with_own = {row for row, own in enumerate(self._own) if own}
        self._sent: list[dict[Key, Any]] = [{} for _ in schemas]

    def keep(self, area: str, rows: Sequence[int] | None, answer: Answer | None) -> None:
        """Takes the values that rows (None: all) have in an area for good ones."""
        if rows is not None and not rows:
            return
        for key, shadow in self._shared.items():
            if key in self._engine.arrays[area]:
                if rows is None:
                    np.copyto(shadow, self._engine.arrays[area][key])
                else:
                    shadow[rows] = self._engine.arrays[area][key][rows]
        values = {} if answer is None else answer.values
        if not self._with_own and not values:
            return
        chosen = set(range(len(self._own)) if rows is None else rows)
        for row in chosen & self._with_own:
            for key, shadow in self._own[row].items():
                if key in self._engine.row_arrays[row][area]:
                    shadow[...] = self._engine.row_arrays[row][area][key]
        for row in chosen.intersection(values):
            for (where, key), value in values[row].items():
                if where == area:
                    self._sent[row][key] = value

    def restore(self, rows: Iterable[int]) -> None:
        """Puts the last good values where rows that are not reset show theirs: a dying worker may have written."""
        for row in rows:
            for area in (NEXT, ROOT):
                arrays = self._engine.row_arrays[row][area]
                for key in [*self._shared, *self._own[row]]:
                    if key in arrays:
                        arrays[key][...] = self.value(row, key)

    def value(self, row: int, key: Key) -> Any:
        """A row's last good value of a leaf; zeros if it never had any."""
        if key in self._shared:
            return self._shared[key][row]
        if key in self._own[row]:
            return self._own[row][key]
        return self._sent[row].get(key, _blank(self._schemas[row].by_area[ROOT][key], 0))


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _end_value(key: Key, leaf: Leaf) -> Any:
    """Reward or done flag of a row that was put up again."""
    return _blank(leaf, leaf.role == DONE and key[-1] != "terminated")


def _blank(leaf: Leaf, value: Any) -> Any:
    if leaf.dtype == "object":
        return None
    shape = tuple(max(size, 0) for size in leaf.shape)
    return np.full(shape, value, storage_dtype(leaf.dtype))
