"""Section 7 of the contract, cell by cell: what happens, while what is done, in which setting, under which policy.

In every cell: the right exception with row, command, process and cause, in bounded time; the state afterwards as
promised; no process, descriptor or name left.
"""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shoal import EnvError, ParallelEnv, WorkerDied, WorkerTimeout
from tests.faults.envs import TroubleEnv
from tests.support import Trouble, TwoArguments

pytestmark = pytest.mark.usefixtures("nothing_left")

LIMIT = 0.4
BOUND = 4.0
"""Seconds within which the caller must know: ``LIMIT``, what the contract allows on top, and a slow machine."""

EXCEPTIONS: dict[str, tuple[type[Exception], str]] = {
    "raise": (ValueError, "boom"),
    "two": (TwoArguments, "1 and 2"),
    "unpicklable": (EnvError, "Unpicklable in row 1"),
    "memory": (MemoryError, ""),
}
DEATHS: dict[str, tuple[int, str]] = {
    "exit": (3, "exit code 3"),
    "kill": (-signal.SIGKILL, "SIGKILL"),
}
DELAYS = ("stop", "spin")
WHATS = [*EXCEPTIONS, *DEATHS, *DELAYS]
TROUBLES = {"attribute": "method", "step_and_maybe_reset": "step"}
COMMANDS = {"attribute": "call", "state": "state_dict"}
ASKING = ("state", "attribute")
ROW, N_ROWS = 1, 3


@dataclass
class Cell:
    """One cell of the matrix."""

    what: str
    when: str
    processes: int
    use_buffers: bool
    on_failure: str
    family: type

    def env(self) -> Any:
        trouble = functools.partial(self.family, self.what, TROUBLES.get(self.when, self.when))
        factories = [trouble if row == ROW else self.family for row in range(N_ROWS)]
        return ParallelEnv(
            N_ROWS,
            factories,
            processes=self.processes,
            use_buffers=self.use_buffers,
            on_failure=self.on_failure,
            step_timeout=LIMIT,
            build_timeout=LIMIT if self.when == "build" and self.what in DELAYS else None,
            shutdown_timeout=LIMIT,
        )

    @property
    def command(self) -> str:
        return COMMANDS.get(self.when, self.when)

    @property
    def lost_rows(self) -> list[int]:
        """The rows that live in the process of the row in trouble."""
        return [ROW] if self.processes == N_ROWS else [0, 1]

    @property
    def failed_rows(self) -> list[int]:
        return [ROW] if self.what in EXCEPTIONS else self.lost_rows

    @contextmanager
    def raises(self, pids: dict[int, int] | None = None) -> Iterator[None]:
        """Expects the exception that this cell is to give, in bounded time."""
        kind: type[BaseException]
        if self.what in EXCEPTIONS:
            kind, words = EXCEPTIONS[self.what]
        elif self.what in DEATHS:
            kind, words = WorkerDied, DEATHS[self.what][1]
        else:
            kind, words = WorkerTimeout, rf"did not finish '{self.command}' within {LIMIT:g} s"
        start = time.monotonic()
        with pytest.raises(kind, match=words or None) as caught:
            yield
        assert time.monotonic() - start < BOUND
        error: Any = caught.value
        assert error.command == self.command
        if self.what in EXCEPTIONS:
            assert error.row == ROW
            assert pids is None or error.pid == pids[ROW]
            assert "in trouble" in str(error.__cause__)
            assert f"row {ROW}, command '{self.command}', process {error.pid}" in str(error.__cause__)
        else:
            assert list(error.rows) == self.lost_rows
            assert ", ".join(map(str, self.lost_rows)) in str(error)
            assert pids is None or str(pids[ROW]) in str(error)
        if self.what in DEATHS:
            assert error.exitcode == DEATHS[self.what][0]
            assert pids is None or error.pid == pids[ROW]


def steps(tensordict: Any) -> list[float]:
    """How many steps each row has done since its reset, as its observation says."""
    return tensordict["observation"][:, 0].tolist()  # type: ignore[no-any-return]


def acted(env: Any, tensordict: Any) -> Any:
    return env.rand_action(tensordict.copy())


def pids_of(env: Any) -> dict[int, int]:
    pool = env.__dict__["_session"].engine
    pool._launcher.look()
    return {row: pool._launcher.pids[worker] for worker, rows in enumerate(pool._groups) for row in rows}


def advance(env: Any, when: str) -> tuple[Any, dict[int, int]]:
    """Two resets and one step; where the trouble is to come the second time, the first time is behind."""
    pids = pids_of(env)
    root = env.reset()
    if when != "reset":
        root = env.reset()
    if when == "seed":
        env.set_seed(0)
        root = env.reset()
    if when == "state":
        env.state_dict()
    if when == "attribute":
        env.call("method")
    return env.step_mdp(env.step(acted(env, root))), pids


DOING: dict[str, Callable[[Any, Any], Any]] = {
    "reset": lambda env, root: env.reset(),
    "step": lambda env, root: env.step(acted(env, root))["next"],
    "step_and_maybe_reset": lambda env, root: env.step_and_maybe_reset(acted(env, root)),
    "seed": lambda env, root: env.set_seed(5),
    "state": lambda env, root: env.state_dict(),
    "attribute": lambda env, root: env.call("method"),
}


def check_raised(cell: Cell) -> None:
    """``on_failure="raise"``."""
    env = cell.env()
    root, pids = advance(env, cell.when)
    with cell.raises(pids):
        DOING[cell.when](env, root)
    assert {fault.row for fault in env.faults} == set(cell.failed_rows)
    assert {fault.action for fault in env.faults} == {"raised"}
    if cell.what not in EXCEPTIONS:
        assert env.is_closed
        with pytest.raises(RuntimeError, match="reset it"):
            env.step(acted(env, root))
        assert steps(env.reset()) == [0, 0, 0]
        env.close()
        return
    assert not env.is_closed
    assert pids_of(env) == pids
    if cell.when in ASKING:  # nothing has moved, and nothing is broken
        assert steps(env.step(acted(env, root))["next"]) == [2, 2, 2]
        env.close()
        return
    with pytest.raises(EnvError, match=rf"row {ROW} raised an exception in '{cell.command}'.*reset it"):
        env.step(acted(env, root))
    mask = torch.tensor([[row == ROW] for row in range(N_ROWS)])
    root = env.reset(root.copy().exclude("observation").set("_reset", mask))
    others = {"reset": 1, "seed": 2, "step": 3, "step_and_maybe_reset": 3}[cell.when]
    if cell.when == "seed" and cell.family is Trouble:
        others = 1  # Gymnasium seeds by a reset
    # The others have done the command, and the step that row 1 refused: they kept the results of both.
    assert steps(root) == [others, 0, others]
    assert steps(env.step(acted(env, root))["next"]) == [others + 1, 1, others + 1]
    env.close()


def check_restarted(cell: Cell) -> None:
    """``on_failure="restart"``."""
    env = cell.env()
    root, pids = advance(env, cell.when)
    failed = cell.failed_rows
    start = time.monotonic()
    if cell.when in ASKING:
        with cell.raises(pids):
            DOING[cell.when](env, root)
    else:
        result = DOING[cell.when](env, root)
    assert time.monotonic() - start < BOUND
    assert not env.is_closed
    mended = cell.when not in ASKING or cell.what not in EXCEPTIONS
    assert [(f.row, f.command, f.pid, f.action) for f in env.faults] == [
        (row, cell.command, pids[row], "restarted" if mended else "raised") for row in failed
    ]
    survivors = [row for row in range(N_ROWS) if row not in cell.lost_rows or cell.what in EXCEPTIONS]
    now = pids_of(env)
    assert [row for row in range(N_ROWS) if now[row] == pids[row]] == survivors

    truncated = [[row in failed] for row in range(N_ROWS)]
    if cell.when == "reset":
        assert steps(result) == [0, 0, 0]
        assert steps(env.step(acted(env, result))["next"]) == [1, 1, 1]
    elif cell.when == "step":
        check_end_of_episode(result, truncated)
        assert steps(result) == [1 if row in failed else 2 for row in range(N_ROWS)]
        root = env.maybe_reset(env.step_mdp(root.copy().set("next", result)))
        assert steps(root) == [0 if row in failed else 2 for row in range(N_ROWS)]
    elif cell.when == "step_and_maybe_reset":
        done, root = result
        check_end_of_episode(done["next"], truncated)
        assert steps(done["next"]) == [1 if row in failed else 2 for row in range(N_ROWS)]
        assert steps(root) == [0 if row in failed else 2 for row in range(N_ROWS)]
        assert not root["done"].any()
    elif mended:
        # A row that failed elsewhere has lost its episode all the same, and the next step says so.
        done, fresh = env.step_and_maybe_reset(acted(env, root))
        check_end_of_episode(done["next"], truncated)
        assert steps(done["next"])[ROW] == steps(root)[ROW]
        assert steps(fresh)[ROW] == 0
        assert [steps(fresh)[row] > 0 for row in range(N_ROWS)] == [row not in failed for row in range(N_ROWS)]
    else:
        assert steps(env.step(acted(env, root))["next"]) == [2, 2, 2]
    env.close()


def check_end_of_episode(following: Any, truncated: list[list[bool]]) -> None:
    for name, flags in (("done", truncated), ("truncated", truncated), ("terminated", [[False]] * N_ROWS)):
        if name in following.keys():
            assert following[name].tolist() == flags
    assert (following["reward"][torch.tensor(truncated)] == 0).all()


SETTINGS = [
    pytest.param(processes, transport == "buffers", on_failure, id=f"{processes}p-{transport}-{on_failure}")
    for processes in (3, 2)
    for transport in ("buffers", "messages")
    for on_failure in ("raise", "restart")
]
GYMNASIUM = ("reset", "step", "step_and_maybe_reset", "seed", "attribute")
TORCHRL = ("reset", "step", "step_and_maybe_reset", "seed", "attribute")


def _cells() -> Iterator[Any]:
    """Every cell once. The general driver, besides the state that only it has, crosses the columns once more, where
    each transport and each split is met: one process a row with buffers, several rows a process with messages."""
    for setting in SETTINGS:
        processes, use_buffers, _ = setting.values
        for when in GYMNASIUM:
            yield pytest.param(Trouble, when, *setting.values, id=f"gymnasium-{when}-{setting.id}")
        yield pytest.param(TroubleEnv, "state", *setting.values, id=f"torchrl-state-{setting.id}")
        if (processes == N_ROWS) == use_buffers:
            for when in TORCHRL:
                yield pytest.param(TroubleEnv, when, *setting.values, id=f"torchrl-{when}-{setting.id}")


@pytest.mark.parametrize(("family", "when", "processes", "use_buffers", "on_failure"), _cells())
@pytest.mark.parametrize("what", WHATS)
def test_what_a_fault_in_a_command_gives_and_leaves(
    what: str, family: type, when: str, processes: int, use_buffers: bool, on_failure: str
) -> None:
    cell = Cell(what, when, processes, use_buffers, on_failure, family)
    (check_raised if on_failure == "raise" else check_restarted)(cell)


@pytest.mark.parametrize(("processes", "use_buffers", "on_failure"), SETTINGS)
@pytest.mark.parametrize("what", WHATS)
def test_a_fault_while_building_is_raised_and_everything_ended(
    what: str, processes: int, use_buffers: bool, on_failure: str
) -> None:
    cell = Cell(what, "build", processes, use_buffers, on_failure, Trouble)
    with cell.raises():
        cell.env()


@pytest.mark.parametrize(("processes", "use_buffers", "on_failure"), SETTINGS)
@pytest.mark.parametrize("what", WHATS)
def test_a_fault_while_closing_is_told_where_it_is_an_exception_and_everything_ends(
    what: str, processes: int, use_buffers: bool, on_failure: str
) -> None:
    cell = Cell(what, "close", processes, use_buffers, on_failure, functools.partial(Trouble, at=1))  # type: ignore[arg-type]
    env = cell.env()
    env.reset()
    pids = pids_of(env)
    start = time.monotonic()
    if what in EXCEPTIONS:
        with cell.raises(pids):
            env.close()
    else:
        env.close()
    assert time.monotonic() - start < LIMIT + 1.5
    assert env.is_closed
    env.close(raise_if_closed=False)
