"""Steps the Gymnasium environments of one process in one loop.

Gives what each driver would give on its own, row by row, and writes rewards and flags of all rows at once: for cheap
environments that is most of what a driver costs. A driver still knows its own row only; here is nothing that it could
not do itself.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from operator import or_
from typing import Any

import numpy as np

from shoal.drivers.base import Driver
from shoal.drivers.gymnasium import DONE_KEYS, GymnasiumDriver
from shoal.drivers.spaces import ARRAY, CATEGORICAL, ONE_HOT
from shoal.engine.layout import Array, bytes_of
from shoal.engine.schema import INPUT, NEXT, ROOT, Key

MEASURED_EVERY = 16
"""One step in so many is measured row by row, and stands for all: a clock costs as much as a row's transport."""

Failed = list[tuple[int, BaseException]]
"""Rows that raised, and what."""


class Together:
    """The rows of one process, to be stepped in one loop.

    Args:
        drivers: of the rows, in order; `may_step_together` has said yes.
        arrays: ``[n, ...]`` arrays of the rows' leaves, by area and key.
        fresh: ``[n]`` flags that say which rows were reset.
        times: ``[n, 2]`` doubles: seconds in each environment, and number of its resets and steps.
        catch: what to catch of a row.
    """

    def __init__(
        self,
        drivers: dict[int, GymnasiumDriver],
        arrays: dict[str, dict[Key, Array]],
        fresh: Array,
        times: Array,
        catch: type[BaseException],
    ) -> None:
        self._fresh = bytes_of(fresh)
        self._spent, self._calls = times[:, 0], times[:, 1]
        self._count = 0
        self._catch = catch
        self._rows = list(drivers)
        self._drivers = list(drivers.values())
        self._each = [(driver._inner.step, driver._write_next) for driver in self._drivers]
        self._read = _reader(self._drivers, arrays[INPUT])
        # Few values at a time: plain lists and memory views take a fraction of what numpy's calls do.
        rewards = arrays[NEXT][("reward",)]
        self._code = str(rewards.dtype.char)
        self._rewards: Any = bytes_of(rewards).cast(self._code)  # type: ignore[call-overload]
        self._done, self._terminated, self._truncated = (bytes_of(arrays[NEXT][key]) for key in DONE_KEYS)
        self._ended = bytes(len(self._rows))

    def step(self) -> Failed:
        """Steps all rows; writes the ``NEXT`` area."""
        failed: Failed = []
        rewards: list[float] = []
        terminated: list[bool] = []
        truncated: list[bool] = []
        place = 0
        self._count += 1
        measured = self._count % MEASURED_EVERY == 0
        seconds: list[float] = []
        clock = time.perf_counter
        last = clock() if measured else 0.0
        try:
            for action, (step, write) in zip(self._read(), self._each, strict=True):
                try:
                    observation, reward, ended, cut, _ = step(action)
                    write(observation)
                    if not isinstance(reward, float):
                        reward = _plain(reward)
                    ended, cut = bool(ended), bool(cut)
                except self._catch as error:
                    failed.append((place, error))
                    reward, ended, cut = self._before(place)
                rewards.append(reward)
                terminated.append(ended)
                truncated.append(cut)
                place += 1
                if measured:
                    now = clock()
                    seconds.append(now - last)
                    last = now
        finally:  # a Ctrl-C in a serial environment: the rows that have stepped keep what they gave
            self._rewards[:place] = array(self._code, rewards[:place])
            self._terminated[:place] = ends = bytes(terminated[:place])
            self._truncated[:place] = cuts = bytes(truncated[:place])
            self._done[:place] = self._ended = bytes(map(or_, ends, cuts))
        self._calls += 1.0
        if measured:
            self._spent += np.multiply(seconds, MEASURED_EVERY)
        return failed

    def step_and_maybe_reset(self) -> Failed:
        """Steps all rows, writes ``NEXT``, resets the rows that are done, and writes their ``ROOT``."""
        failed = self.step()
        ended = self._ended
        self._fresh[:] = ended  # before the resets: next is complete, whatever becomes of them
        for place, _ in failed:
            self._fresh[place] = 0
        if 1 in ended:
            out = {place for place, _ in failed}
            for place, done in enumerate(ended):
                if not done or place in out:
                    continue
                start = time.perf_counter()
                try:
                    self._drivers[place]._reset({})
                except self._catch as error:
                    failed.append((place, error))
                self._spent[place] += time.perf_counter() - start
        return failed

    def _before(self, place: int) -> tuple[float, bool, bool]:
        """What a row that raised has shown last: it goes on showing it."""
        return float(self._rewards[place]), bool(self._terminated[place]), bool(self._truncated[place])


class Alone:
    """The only row of a process: what `Together` is for several, without its lists.

    Args:
        driver: of the row; it sends nothing by message.
        fresh: ``[1]`` flag that says whether the row was reset.
        times: ``[1, 2]`` doubles: seconds in the environment, and number of its resets and steps.
        catch: what to catch of the row.
    """

    def __init__(self, driver: GymnasiumDriver, fresh: Array, times: Array, catch: type[BaseException]) -> None:
        self._step, self._reset = driver._step, driver._reset
        self._fresh = bytes_of(fresh)
        self._times: Any = bytes_of(times).cast("d")
        self._catch = catch

    def step(self) -> Failed:
        """Steps the row; writes the ``NEXT`` area."""
        start = time.perf_counter()
        try:
            self._step()
        except self._catch as error:
            return [(0, error)]
        self._times[0] += time.perf_counter() - start
        self._times[1] += 1.0
        return _NONE

    def step_and_maybe_reset(self) -> Failed:
        """Steps the row, writes ``NEXT``, resets it if it is done, and writes its ``ROOT``."""
        start = time.perf_counter()
        fresh = self._fresh
        fresh[0] = 0
        try:
            if self._step()[1]:
                fresh[0] = 1  # before the reset: next is complete, whatever becomes of it
                self._reset({})
        except self._catch as error:
            return [(0, error)]
        self._times[0] += time.perf_counter() - start
        self._times[1] += 1.0
        return _NONE


_NONE: Failed = []


def _plain(reward: Any) -> float:
    if reward is None:
        return 0.0
    return float(reward.reshape(()).item() if isinstance(reward, np.ndarray) else reward)


def _reader(drivers: Sequence[GymnasiumDriver], arrays: dict[Key, Array]) -> Callable[[], Any]:
    """What reads the actions of all rows: at once where they are of a simple kind."""
    encodings = [driver._details.action.encoding for driver in drivers]
    encoding, block = encodings[0], arrays.get(("action",))
    plain = all(each is not None and not np.any(each.start) for each in encodings)
    if encoding is not None and block is not None and plain and len({each.kind for each in encodings if each}) == 1:
        if encoding.kind == ONE_HOT and block.ndim == 2:
            return lambda: block.argmax(1).tolist()
        if encoding.kind == CATEGORICAL and block.ndim == 1:
            return block.tolist
        if encoding.kind == ARRAY and block.ndim > 1:
            return lambda: list(block.copy())
    readers = [driver._read_action for driver in drivers]
    return lambda: [read() for read in readers]


def together_or_alone(
    drivers: dict[int, Driver],
    arrays: dict[str, dict[Key, Array]],
    fresh: Array,
    times: Array,
    catch: type[BaseException],
) -> Together | Alone | None:
    """What steps these drivers' environments, see `shoal.drivers.together_for`; None if each goes by itself."""
    simple = [driver for driver in drivers.values() if isinstance(driver, GymnasiumDriver) and not driver._messages]
    if len(simple) != len(drivers) or any(driver._given for driver in simple):
        return None
    if len(simple) == 1:
        return Alone(simple[0], fresh, times, catch)
    if all(_fits(driver, arrays) for driver in simple):
        return Together(dict(zip(drivers, simple, strict=True)), arrays, fresh, times, catch)
    return None


def _fits(driver: GymnasiumDriver, arrays: dict[str, dict[Key, Array]]) -> bool:
    """Whether one loop can do for a driver what it would do by itself."""
    return (
        driver._frame_skip == 1
        and driver._simple_reward
        and arrays[NEXT][("reward",)].dtype.char in "fd"
        and all(key in arrays[area] for area in (NEXT, ROOT) for key in driver._details.observation.leaves())
        and all(key in arrays[INPUT] for key in driver._action_leaves())
    )
