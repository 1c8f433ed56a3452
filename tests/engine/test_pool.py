"""The parent's side of the worker processes, without any face."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shoal.engine.errors import WorkerDied, WorkerTimeout
from shoal.engine.local import LocalEngine
from shoal.engine.pool import Pool, PoolOptions, split_rows
from shoal.engine.protocol import Opcode
from shoal.engine.rows import Builder
from shoal.engine.schema import INPUT, NEXT, ROOT
from tests.support import Counter, SlowMethod, Trouble

pytestmark = pytest.mark.usefixtures("nothing_left")

OBSERVATION, ACTION = ("observation",), ("action",)
ROADS: dict[str, dict[str, Any]] = {
    "forkserver": {},
    "spawn": {"start_method": "spawn"},
    "fork": {"start_method": "fork"},
    "portable": {"portable": True},
    "memmap": {"memmap": True},
}


def builders(n_rows: int, **kwargs: Any) -> list[Builder]:
    return [Builder(Counter, {"length": 3 + row, **kwargs}) for row in range(n_rows)]


def attached(engine: Any) -> Any:
    engine.attach([description.schema for description in engine.descriptions])
    return engine


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = attached(Pool(builders(5), PoolOptions(processes=2)))
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("n_rows", "processes", "sizes"),
    [(17, 6, [3, 3, 3, 3, 3, 2]), (4, 4, [1, 1, 1, 1]), (5, 2, [3, 2]), (3, 1, [3])],
)
def test_rows_are_dealt_out_evenly_and_in_order(n_rows: int, processes: int, sizes: list[int]) -> None:
    groups = split_rows(n_rows, processes)
    assert [len(group) for group in groups] == sizes
    assert [row for group in groups for row in group] == list(range(n_rows))


@pytest.mark.parametrize("road", ROADS)
def test_every_road_gives_what_the_engine_without_processes_gives(road: str) -> None:
    pool = attached(Pool(builders(5), PoolOptions(processes=2, **ROADS[road])))
    local = attached(LocalEngine(builders(5)))
    rng = np.random.default_rng(0)
    for engine in (pool, local):
        engine.execute(Opcode.RESET)
    for _ in range(20):
        action = np.eye(3, dtype=np.int64)[rng.integers(0, 3, 5)]
        for engine in (pool, local):
            engine.arrays[INPUT][ACTION][:] = action
            engine.execute(Opcode.STEP_AND_MAYBE_RESET)
        for area in (NEXT, ROOT):
            for key, array in pool.arrays[area].items():
                np.testing.assert_array_equal(array, local.arrays[area][key], err_msg=f"{area} {key}")
    pool.close()
    local.close()


def test_only_the_rows_that_are_addressed_move(pool: Pool) -> None:
    pool.execute(Opcode.RESET)
    pool.execute(Opcode.STEP, [0, 4])
    pool.execute(Opcode.STEP, [4])
    pool.execute(Opcode.STEP)
    assert pool.arrays[NEXT][OBSERVATION][:, 0].tolist() == [2, 1, 1, 1, 3]


def test_no_row_at_all_is_no_command(pool: Pool) -> None:
    pool.execute(Opcode.RESET)
    before = pool.arrays[ROOT][OBSERVATION].copy()
    assert pool.execute(Opcode.STEP, []) is None
    np.testing.assert_array_equal(pool.arrays[ROOT][OBSERVATION], before)


def test_arguments_and_results_of_any_size_go_by_message(pool: Pool) -> None:
    data = os.urandom(5_000_000)
    given = {row: (("__class__", "__name__", "join"), ([str(row), "x"],), {}) for row in range(5)}
    answer = pool.execute(Opcode.CALL, None, given)
    assert answer is not None
    assert answer.values == {row: f"{row}Counterx" for row in range(5)}
    pool.execute(Opcode.SET_ATTR, None, dict.fromkeys(range(5), ("log", None)))
    answer = pool.execute(Opcode.CALL, None, {row: (("double",), (data,), {}) for row in range(5)})
    assert answer is not None
    assert all(answer.values[row] == data + data for row in range(5))


def test_rows_keep_their_results_when_another_raises() -> None:
    rows = [Builder(Trouble, {"what": "raise"} if row == 1 else {}) for row in range(4)]
    pool = attached(Pool(rows, PoolOptions(processes=2)))
    pool.execute(Opcode.RESET)
    pool.execute(Opcode.STEP)
    answer = pool.execute(Opcode.STEP)
    assert answer is not None
    assert [(fault.row, fault.name) for fault in answer.faults] == [(1, "ValueError")]
    assert pool.arrays[NEXT][OBSERVATION][[0, 2, 3], 0].tolist() == [2, 2, 2]
    answer = pool.execute(Opcode.STEP)
    assert answer is not None
    assert "was not reset since" in answer.faults[0].message
    assert pool.arrays[NEXT][OBSERVATION][[0, 2, 3], 0].tolist() == [3, 3, 3]
    assert pool.execute(Opcode.RESET, [1]) is None
    pool.close()


@pytest.mark.parametrize("road", ["forkserver", "spawn", "fork", "portable"])
@pytest.mark.parametrize(("what", "code", "words"), [("exit", 3, "exit code 3"), ("kill", -9, "SIGKILL")])
def test_the_death_of_a_worker_is_named_within_two_seconds(road: str, what: str, code: int, words: str) -> None:
    rows = [Builder(Trouble, {"what": what} if row == 2 else {}) for row in range(4)]
    pool = attached(Pool(rows, PoolOptions(processes=2, **ROADS[road])))
    pool.execute(Opcode.RESET)
    pool.execute(Opcode.STEP)
    start = time.monotonic()
    with pytest.raises(WorkerDied, match=rf"rows 2, 3 .*{words}.*'step'") as caught:
        pool.execute(Opcode.STEP)
    assert time.monotonic() - start < 2.0
    assert (caught.value.rows, caught.value.exitcode, caught.value.command) == ((2, 3), code, "step")
    assert pool.closed


@pytest.mark.parametrize("what", ["hang", "stop"])
def test_a_command_that_outlasts_its_limit_is_named_and_everything_ended(what: str) -> None:
    rows = [Builder(Trouble, {"what": what} if row == 2 else {}) for row in range(3)]
    pool = attached(Pool(rows, PoolOptions(processes=3, step_timeout=0.5)))
    pool.execute(Opcode.RESET)
    pool.execute(Opcode.STEP)
    start = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"row 2 .*'step' within 0.5 s") as caught:
        pool.execute(Opcode.STEP)
    assert time.monotonic() - start < 2.5
    assert caught.value.rows == (2,)


def test_an_interrupted_command_is_waited_for_and_dropped_by_the_next() -> None:
    pool = attached(Pool([Builder(SlowMethod, {}), Builder(Counter, {})], PoolOptions(processes=2)))
    pool.execute(Opcode.RESET)
    timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pool.execute(Opcode.CALL, [0, 1], {0: (("slow",), (0.6,), {}), 1: (("double",), (4,), {})})
    timer.join()
    answer = pool.execute(Opcode.CALL, [0, 1], {row: (("double",), (row,), {}) for row in (0, 1)})
    assert answer is not None
    assert answer.values == {0: 0, 1: 2}
    pool.close()


def test_close_is_bounded_with_a_worker_that_hangs_in_its_own_close() -> None:
    rows = [Builder(Trouble, {"what": "hang", "when": "close", "at": 1} if row == 5 else {}) for row in range(8)]
    pool = attached(Pool(rows, PoolOptions(processes=8, shutdown_timeout=0.5)))
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 1.5


def test_a_pool_that_nobody_holds_any_more_ends_its_workers() -> None:
    pool = attached(Pool(builders(2), PoolOptions(processes=2)))
    pool.execute(Opcode.RESET)
    del pool
