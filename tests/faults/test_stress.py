"""Thousands of random commands under random failures, against a twin that knows of no failure but those reported."""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tensordict import TensorDict

from shoal import ParallelEnv, RestartPolicy, WorkerDied, WorkerTimeout
from tests.faults.flaky import Flaky, Steady
from tests.support import children, descriptors

pytestmark = pytest.mark.usefixtures("nothing_left")

N_ROWS, PROCESSES = 7, 3
COMMANDS = int(os.environ.get("SHOAL_STRESS", "10000"))
KINDS = ["maybe_reset"] * 10 + ["step"] * 3 + ["some step"] * 3 + ["some reset"] * 2 + ["reset", "call", "seed"]


class Twin:
    """What the rows must show: plain environments, put up again where the batch reports that it did so."""

    def __init__(self) -> None:
        self.envs = [Steady(row) for row in range(N_ROWS)]
        self.shown = np.zeros((N_ROWS, 3))
        self.lost: set[int] = set()
        self.before: dict[int, Steady] = {}

    def failed(self, rows: set[int]) -> None:
        self.before = {row: self.envs[row] for row in rows - self.lost}
        for row in rows:
            self.envs[row] = Steady(row)
        self.lost |= rows

    def reset(self, row: int) -> None:
        self.lost.discard(row)
        self.shown[row], _ = self.envs[row].reset()

    def step(self, row: int, action: int, terminated: bool) -> tuple[float, bool, bool]:
        """Reward, done and truncated. A row that failed may have come to its natural end in that command, so that only
        the reset after it failed: it says so by being terminated."""
        if row in self.lost and terminated and row in self.before:
            self.shown[row], reward, done, _, _ = self.before[row].step(action)
            return reward, done, False
        if row in self.lost:
            return 0.0, True, True
        self.shown[row], reward, done, _, _ = self.envs[row].step(action)
        return reward, done, False


class Run:
    """One batch, its twin, and the commands that both are given."""

    def __init__(self, seed: int, use_buffers: bool) -> None:
        self.rng = random.Random(seed)
        self.env: Any = ParallelEnv(
            N_ROWS,
            [functools.partial(Flaky, row, seed, 1 / 1200) for row in range(N_ROWS)],
            processes=PROCESSES,
            use_buffers=use_buffers,
            step_timeout=0.5,
            on_failure=RestartPolicy(tries=10**6, delay=0.0),
        )
        self.twin = Twin()
        self.reported = 0
        self.root: Any = None

    def news(self) -> set[int]:
        """The rows that were put up again since the last call."""
        records = [record for record in self.env.faults if record.number > self.reported]
        numbers = [record.number for record in records]
        self.reported += len(records)
        assert not numbers or numbers[-1] == self.reported, "the log has lost some"
        assert all(record.action == "restarted" for record in records)
        return {record.row for record in records}

    def action(self) -> torch.Tensor:
        return torch.tensor([self.rng.randrange(3) for _ in range(N_ROWS)])

    def some(self) -> list[bool]:
        return [self.rng.random() < 0.5 for _ in range(N_ROWS)]

    def go_on(self, commands: int) -> None:
        """So many random commands, while somebody kills workers; all are up at the end."""
        with self.killer():
            for _ in range(commands):
                getattr(self, self.rng.choice(KINDS).replace(" ", "_"))()
        self.reset()

    def reset(self) -> None:
        self.root = self.env.reset()
        self.was_reset([True] * N_ROWS)

    def some_reset(self) -> None:
        rows = self.some()
        given = TensorDict({"_reset": torch.tensor(rows).unsqueeze(-1)}, batch_size=[N_ROWS])
        self.root = self.env.reset(given)
        self.was_reset(rows)

    def was_reset(self, rows: list[bool]) -> None:
        self.twin.failed(self.news())
        for row in np.flatnonzero(rows):
            self.twin.reset(int(row))
        self.same(self.root, "observation", self.twin.shown)

    def maybe_reset(self) -> None:
        action = self.action()
        given = self.root.copy().set("action", torch.nn.functional.one_hot(action, 3))
        done, self.root = self.env.step_and_maybe_reset(given)
        self.twin.failed(self.news())
        ends = self.has_stepped(done["next"], action, [True] * N_ROWS)
        for row in ends:
            self.twin.reset(row)
        self.same(self.root, "observation", self.twin.shown)

    def step(self) -> None:
        self.step_rows([True] * N_ROWS)

    def some_step(self) -> None:
        self.step_rows(self.some())

    def step_rows(self, rows: list[bool]) -> None:
        action = self.action()
        given = self.root.copy().set("action", torch.nn.functional.one_hot(action, 3))
        if not all(rows):
            given.set("_step", torch.tensor(rows))
        following = self.env.step(given)["next"]
        self.twin.failed(self.news())
        ends = self.has_stepped(following, action, rows)
        self.root = self.env.step_mdp(given).exclude("_step")
        mask = torch.zeros(N_ROWS, 1, dtype=torch.bool)
        mask[ends] = True
        if ends:
            self.root = self.env.reset(self.root.set("_reset", mask))
            self.was_reset(mask.flatten().tolist())

    def has_stepped(self, following: Any, action: torch.Tensor, rows: list[bool]) -> list[int]:
        """Compares what a step gave; the rows whose episode is over."""
        ends = following["terminated"].flatten().tolist()
        told = [
            self.twin.step(row, int(action[row]), ends[row]) if rows[row] else (0.0, False, False)
            for row in range(N_ROWS)
        ]
        self.same(following, "observation", self.twin.shown)
        for place, name in enumerate(("reward", "done", "truncated")):
            self.same(following, name, np.array([each[place] for each in told])[:, None])
        return [row for row in range(N_ROWS) if told[row][1]]

    def call(self) -> None:
        try:
            values = self.env.call("told")
        except (WorkerDied, WorkerTimeout):
            self.twin.failed(self.news())
            return
        assert not self.news()
        assert values == [env.told() for env in self.twin.envs]

    def seed(self) -> None:
        self.env.set_seed(self.rng.randrange(1000))
        self.twin.failed(self.news())
        self.reset()

    @staticmethod
    def same(tensordict: Any, name: str, expected: np.ndarray) -> None:
        np.testing.assert_array_equal(tensordict[name].numpy(), expected, err_msg=name)

    @contextmanager
    def killer(self) -> Iterator[None]:
        """Kills workers from outside, at any moment, while the context lasts."""
        chance, over = random.Random(self.rng.random()), threading.Event()
        mine = set(children())

        def kill() -> None:
            while not over.wait(chance.uniform(0.05, 0.4)):
                launcher = self.env.__dict__["_session"].engine._launcher
                pid = launcher.pids.get(chance.randrange(PROCESSES))
                try:
                    if pid is not None and pid in mine | set(children()):
                        os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("transport", "commands"), [("buffers", COMMANDS), ("messages", COMMANDS // 5)])
def test_random_failures_never_touch_a_row_that_did_not_fail(transport: str, commands: int) -> None:
    run = Run(seed=commands, use_buffers=transport == "buffers")
    run.reset()
    run.go_on(commands // 5)
    before = _holdings()
    run.go_on(commands - commands // 5)
    after = _holdings()
    assert after[0] == before[0], "processes"
    assert after[1] == before[1], "descriptors"
    assert after[2] < before[2] + 32 * 2**20, "memory"
    errors = {record.error for record in run.env.faults}
    assert errors >= {"ValueError", "WorkerDied"}
    assert len(run.env.faults) > commands / 200
    run.env.close()


def _holdings() -> tuple[int, int, int]:
    """Processes, descriptors and bytes of memory."""
    gc.collect()
    return len(children()), len(descriptors()), psutil.Process().memory_info().rss
