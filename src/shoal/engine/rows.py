"""Runs commands on the rows of one process: the part that serial and parallel share."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shoal.drivers import driver_for, together_for
from shoal.drivers.base import Description, Driver
from shoal.engine import pickling
from shoal.engine.errors import EnvError, Fault
from shoal.engine.isolation import isolated
from shoal.engine.layout import Array, Layout
from shoal.engine.protocol import Answer, Opcode
from shoal.engine.schema import Key, Schema

_STEPS = frozenset({Opcode.STEP, Opcode.STEP_AND_MAYBE_RESET})
_TIMED = _STEPS | {Opcode.RESET}
_MOVES = _STEPS | {Opcode.RESET, Opcode.SEED, Opcode.LOAD_STATE_DICT}


class Builder(NamedTuple):
    """How to build one sub-environment."""

    factory: Callable[..., Any]
    kwargs: dict[str, Any]

    def isolated(self) -> Builder:
        """The builder as its row gets it where it stays in this process."""
        try:
            kwargs = copy.deepcopy(self.kwargs)
        except Exception:  # something in them cannot be copied: the row has to do with what there is
            kwargs = dict(self.kwargs)
        return Builder(isolated(self.factory), kwargs)

    def pack(self) -> PackedBuilder:
        """The builder in a form that crosses a process."""
        return PackedBuilder(*pickling.dumps_shared(tuple(self)))


class PackedBuilder(NamedTuple):
    """A builder on its way to a worker.

    Attributes:
        data: the builder, pickled.
        descriptors: what goes with it: of this process.
    """

    data: bytes
    descriptors: list[int]

    def unpack(self) -> Builder:
        """The builder, in the process that received it."""
        return Builder(*pickling.loads_shared(self.data, self.descriptors))


class RowGroup:
    """The rows of one process.

    Args:
        rows: indices of the rows in the batch.
        remote: whether faults must be sent to another process (then any exception is caught, also ``SystemExit``).
        rebuilds: whether rows may be built anew; what builds them is kept for that.
        prepare: called before each environment is built, when what its factory refers to is loaded.

    An exception of one row ends that row's part of the command; the other rows go on. A row whose state an exception
    may have broken refuses to step until it was reset.
    """

    def __init__(
        self,
        rows: Sequence[int],
        *,
        remote: bool,
        rebuilds: bool = False,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self.rows = tuple(rows)
        self._remote = remote
        self._rebuilds = rebuilds
        self._prepare = prepare
        self._builders: dict[int, Builder | PackedBuilder] = {}
        self._leaves: dict[int, Schema] = {}
        self._arrays: dict[str, dict[Key, Array]] = {}
        self.loops: dict[int, Callable[[], Any]] = {}
        """What runs a command for all rows in one go, by opcode, and gives the rows that failed (by place) and why: see
        `shoal.drivers.together`. Empty where each row goes by itself."""
        self._times: Any = None
        self._attachment: tuple[dict[int, Schema], Layout, Any] | None = None
        self._catch: type[BaseException] = BaseException if remote else Exception
        self._drivers: dict[int, Driver] = {}
        self._broken: dict[int, str] = {}
        self._unbuilt: set[int] = set()

    def build(self, builders: Sequence[Builder | PackedBuilder]) -> Answer:
        """Builds the environments; the answer's values are their descriptions."""
        answer = Answer()
        if self._rebuilds:
            self._builders = dict(zip(self.rows, builders, strict=True))
        for row, builder in zip(self.rows, builders, strict=True):
            try:
                self._drivers[row], answer.values[row] = self._built(row, builder)
                self._leaves[row] = answer.values[row].schema
            except self._catch as error:
                answer.faults.append(self._fault(row, Opcode.BUILD, error))
        return answer

    def _built(self, row: int, builder: Builder | PackedBuilder) -> tuple[Driver, Description]:
        own = builder.unpack() if isinstance(builder, PackedBuilder) else builder.isolated()
        if self._prepare is not None:
            self._prepare()
        driver = driver_for(own.factory(**own.kwargs), row)
        return driver, driver.describe()

    def _rebuild(self, rows: Sequence[int]) -> Answer | None:
        """Closes the environments of these rows and builds them anew; they want a reset before they step."""
        assert self._attachment is not None
        schemas, layout, buffer = self._attachment
        answer = Answer()
        for row in rows:
            try:
                self._drivers[row].close()
            except self._catch:
                pass  # it has failed already, and how it takes its end matters to nobody
            try:
                driver, description = self._built(row, self._builders[row])
                same_leaves(row, self._leaves[row], description.schema)
                driver.attach(schemas[row], layout.row(buffer, row), sent=self._remote)
            except self._catch as error:
                answer.faults.append(self._fault(row, Opcode.BUILD, error))
                self._unbuilt.add(row)
                continue
            self._drivers[row] = driver
            self._broken.pop(row, None)
            self._unbuilt.discard(row)
        self._take_together()
        return answer if answer.faults else None

    def attach(self, schemas: dict[int, Schema], layout: Layout, buffer: Any, fresh: Any, times: Any) -> None:
        """Gives each row its arrays in a block laid out for the whole batch.

        Args:
            schemas: the rows' leaves.
            layout: where they lie.
            buffer: in which block.
            fresh: one byte a row of the batch, to say who was reset.
            times: two doubles a row of the batch: seconds in its environment, and number of its resets and steps.
        """
        self._fresh = np.frombuffer(fresh, bool)
        self._times = memoryview(times)
        if self._rebuilds:
            self._attachment = schemas, layout, buffer
        for row, driver in self._drivers.items():
            driver.attach(schemas[row], layout.row(buffer, row), sent=self._remote)
        first, last = self.rows[0], self.rows[-1] + 1
        self._arrays = {
            area: {key: array[first:last] for key, array in arrays.items()}
            for area, arrays in layout.batch(buffer).items()
        }
        self._take_together()

    def _take_together(self) -> None:
        whole = len(self._drivers) == len(self.rows) and not self._broken and not self._unbuilt
        fresh = self._fresh[self.rows[0] : self.rows[-1] + 1]
        times = np.frombuffer(self._times).reshape(-1, 2)[self.rows[0] : self.rows[-1] + 1]
        together = together_for(self._drivers, self._arrays, fresh, times, self._catch) if whole else None
        self.loops.clear()
        if together is not None:
            self.loops[Opcode.STEP] = together.step
            self.loops[Opcode.STEP_AND_MAYBE_RESET] = together.step_and_maybe_reset

    def execute(self, opcode: int, mask: Any, given: dict[int, Any] | None) -> Answer | None:
        """Runs one command.

        Args:
            opcode: the command.
            mask: one byte a row of the whole batch, zero for the rows that take no part; None for all.
            given: arguments by row.

        Returns:
            What does not lie in the buffers, or None if everything does.
        """
        if mask is None and given is None:
            loop = self.loops.get(opcode)
            if loop is not None:
                failed = loop()
                return self.failures(opcode, failed) if failed else None
        if opcode == Opcode.REBUILD:
            return self._rebuild([row for row in self.rows if mask is None or mask[row]])
        run = _COMMANDS[opcode]
        answer: Answer | None = None
        times, clock, moves = self._times, time.perf_counter, opcode in _TIMED
        for row, driver in self._drivers.items():
            if mask is not None and not mask[row]:
                continue
            try:
                if row in self._unbuilt:
                    raise EnvError(f"row {row} could not be built anew after a fault, and has no environment now")
                if self._broken and row in self._broken and opcode in _STEPS:
                    raise EnvError(
                        f"row {row} raised an exception in {self._broken[row]!r} and was not reset since: reset it "
                        'before it steps again (a mask under "_reset" resets single rows)'
                    )
                driver.was_reset = False
                start = clock()
                value = run(driver, None if given is None else given.get(row))
                if moves:
                    times[2 * row] += clock() - start
                    times[2 * row + 1] += 1.0
            except self._catch as error:
                if opcode == Opcode.STEP_AND_MAYBE_RESET:
                    self._fresh[row] = driver.was_reset  # whether it was the reset that failed, after a complete step
                answer = answer or Answer()
                answer.faults.append(self._fault(row, Opcode(opcode), error))
                continue
            if opcode == Opcode.STEP_AND_MAYBE_RESET:
                self._fresh[row] = driver.was_reset
            if value is not None or opcode in _ANSWERING:
                answer = answer or Answer()
                answer.values[row] = value
            if self._broken and opcode == Opcode.RESET:
                self._broken.pop(row, None)
                if not self._broken and not self.loops:
                    self._take_together()
        return answer

    def refuse(self, opcode: Opcode, mask: Any, why: str) -> Answer:
        """Gives each row that takes part a fault, with nothing done."""
        answer = Answer()
        for row in self._drivers:
            if mask is None or mask[row]:
                error = EnvError(f"row {row} cannot {opcode.command!r}: {why}")
                answer.faults.append(Fault.capture(row, opcode.command, error, remote=self._remote))
        return answer

    def failures(self, opcode: int, failed: Sequence[tuple[int, BaseException]]) -> Answer:
        """The answer to a command that one of the `loops` has run."""
        return Answer(faults=[self._fault(self.rows[place], Opcode(opcode), error) for place, error in failed])

    def close(self) -> Answer:
        """Calls each environment's own close."""
        answer = Answer()
        for row, driver in self._drivers.items():
            try:
                driver.close()
            except self._catch as error:
                answer.faults.append(self._fault(row, Opcode.CLOSE, error))
        self._drivers.clear()
        return answer

    def _fault(self, row: int, opcode: Opcode, error: BaseException) -> Fault:
        if opcode in _MOVES:
            self._broken.setdefault(row, opcode.command)
            self.loops.clear()  # until all rows are well again
        return Fault.capture(row, opcode.command, error, remote=self._remote)


def same_leaves(row: int, expected: Schema, found: Schema) -> None:
    """Checks that an environment that was built anew has the leaves that its row had before.

    Raises:
        EnvError: it has others.
    """
    if expected != found:
        old, new = set(expected.leaves), set(found.leaves)
        raise EnvError(
            f"row {row} was built anew and has other leaves than before: {list(old - new)} became {list(new - old)}; "
            "a factory must build the same kind of environment each time"
        )


def _seed(driver: Driver, given: Any) -> Any:
    seed, static = given
    return driver.seed(seed, static)


def _load_state_dict(driver: Driver, given: Any) -> None:
    state, kwargs = given
    driver.load_state_dict(state, kwargs)


def _get_attr(driver: Driver, given: Any) -> Any:
    return driver.get_attr(given)


def _has_attr(driver: Driver, given: Any) -> bool:
    try:
        driver.get_attr(given)
    except AttributeError:
        return False
    return True


def _set_attr(driver: Driver, given: Any) -> None:
    name, value = given
    driver.set_attr(name, value)


def _call(driver: Driver, given: Any) -> Any:
    path, args, kwargs = given
    method = driver.get_attr(path)
    return method(*args, **kwargs)


_COMMANDS: dict[int, Callable[[Driver, Any], Any]] = {
    Opcode.RESET: lambda driver, given: driver.reset(given),
    Opcode.STEP: lambda driver, given: driver.step(given),
    Opcode.STEP_AND_MAYBE_RESET: lambda driver, given: driver.step_and_maybe_reset(given),
    Opcode.SEED: _seed,
    Opcode.STATE_DICT: lambda driver, given: driver.state_dict(),
    Opcode.LOAD_STATE_DICT: _load_state_dict,
    Opcode.GET_ATTR: _get_attr,
    Opcode.HAS_ATTR: _has_attr,
    Opcode.SET_ATTR: _set_attr,
    Opcode.CALL: _call,
}

_ANSWERING = frozenset({Opcode.SEED, Opcode.STATE_DICT, Opcode.GET_ATTR, Opcode.HAS_ATTR, Opcode.CALL})
