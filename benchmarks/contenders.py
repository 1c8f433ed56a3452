"""The contenders: one small adapter for each way to step a batch of environments.

An adapter is used inside a host process (see `host.py`) that holds this one contender and nothing else, so that no
contender sees the threads, the garbage or the imports of another.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from environments import gymnasium_factory, make_gymnasium

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

ACTION_BATCHES = 128
"""Batches of actions drawn before the clock starts, then used round and round."""

PLAIN_STEPS_PER_CALL = 64
"""Steps of a plain loop between two looks at the clock."""


@dataclass(frozen=True)
class Task:
    """What a contender has to step.

    Attributes:
        env: An id of Gymnasium, or `environments.SLOW_ENV`.
        rows: How many environments.
    """

    env: str
    rows: int


@dataclass(frozen=True)
class Run:
    """One time slice of a contender: environment steps, wall time, and processor time of the stepping process (s)."""

    steps: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """Environment steps per second."""
        return self.steps / self.seconds


class Contender(ABC):
    """A way to step environments. Importing is done by the constructor, so that `open` can be timed without it."""

    steps_per_call: int

    def __init__(self, task: Task) -> None:
        self.task = task
        self.steps_per_call = task.rows

    @abstractmethod
    def open(self) -> None:
        """Construct the environments and reset them."""

    def prepare(self) -> None:  # noqa: B027 (a plain loop has nothing to prepare)
        """Draw the actions, outside any measured time."""

    @abstractmethod
    def step(self) -> None:
        """Make `steps_per_call` environment steps."""

    @abstractmethod
    def close(self) -> None:
        """End all that `open` started."""

    def run(self, seconds: float) -> Run:
        """Step for that long."""
        step, clock, calls = self.step, time.perf_counter, 0
        cpu_start = time.process_time()
        start = now = clock()
        while now - start < seconds:
            step()
            calls += 1
            now = clock()
        return Run(calls * self.steps_per_call, now - start, time.process_time() - cpu_start)


class TorchRLFaced(Contender):
    """An `EnvBase`, stepped by `step_and_maybe_reset` with given actions, its root handed back to it."""

    env: Any

    def open(self) -> None:
        self.env = self.build()
        self.root = self.env.reset()

    @abstractmethod
    def build(self) -> Any:
        """Construct the batched environment."""

    def prepare(self) -> None:
        import torch

        torch.manual_seed(0)
        self.actions = itertools.cycle([self.env.action_spec.rand() for _ in range(ACTION_BATCHES)])

    def step(self) -> None:
        self.root.set("action", next(self.actions))
        _, self.root = self.env.step_and_maybe_reset(self.root)

    def close(self) -> None:
        self.env.close()


class Shoal(TorchRLFaced):
    """shoal's environments, over Gymnasium factories or torchrl ones."""

    def __init__(self, task: Task, *, serial: bool = False, processes: int | None = None, torchrl: bool = False):
        super().__init__(task)
        from torchrl_environments import torchrl_factory

        import shoal

        self.engine = shoal.SerialEnv if serial else shoal.ParallelEnv
        self.factory = (torchrl_factory if torchrl else gymnasium_factory)(task.env)
        self.options = {} if processes is None else {"processes": processes}

    def build(self) -> Any:
        return self.engine(self.task.rows, self.factory, **self.options)


class TorchRL(TorchRLFaced):
    """torchrl's own batched environments, as they come or with an option."""

    def __init__(self, task: Task, *, serial: bool = False, **options: Any):
        super().__init__(task)
        import torchrl.envs
        from torchrl_environments import torchrl_factory

        self.factory = torchrl_factory(task.env)
        self.engine = torchrl.envs.SerialEnv if serial else torchrl.envs.ParallelEnv
        self.options = options

    def build(self) -> Any:
        return self.engine(self.task.rows, self.factory, **self.options)


class VectorEnv(Contender):
    """A vectorised environment with `reset()` and `step(actions)`: Gymnasium's, and Stable-Baselines3's."""

    env: Any

    def __init__(self, task: Task, engine: Callable[..., Any], **options: Any):
        super().__init__(task)
        self.engine, self.options = engine, options

    def open(self) -> None:
        self.env = self.engine([gymnasium_factory(self.task.env)] * self.task.rows, **self.options)
        self.env.reset()

    def prepare(self) -> None:
        space = getattr(self.env, "single_action_space", self.env.action_space)
        space.seed(0)
        batches = [np.stack([space.sample() for _ in range(self.task.rows)]) for _ in range(ACTION_BATCHES)]
        self.actions = itertools.cycle(batches)

    def step(self) -> None:
        self.env.step(next(self.actions))

    def close(self) -> None:
        self.env.close()


def gymnasium_async(task: Task) -> VectorEnv:
    """Gymnasium's vector environment with one process a row, as it comes."""
    return VectorEnv(task, gymnasium.vector.AsyncVectorEnv)


def gymnasium_sync(task: Task) -> VectorEnv:
    """Gymnasium's vector environment in this process, as it comes."""
    return VectorEnv(task, gymnasium.vector.SyncVectorEnv)


def stable_baselines3_subproc(task: Task) -> VectorEnv:
    """Stable-Baselines3's vector environment with one process a row.

    Its workers are forked: by default each would import torch, which takes 155 MB and makes them a fifth slower.
    """
    from stable_baselines3.common.vec_env import SubprocVecEnv

    return VectorEnv(task, SubprocVecEnv, start_method="fork")


class PlainLoop(Contender):
    """One bare Gymnasium environment in a `for` loop: what an environment step costs before anyone adds to it."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.steps_per_call = PLAIN_STEPS_PER_CALL

    def open(self) -> None:
        self.env = make_gymnasium(self.task.env)
        self.env.reset(seed=0)

    def prepare(self) -> None:
        self.env.action_space.seed(0)
        self.actions: Iterator[Any] = itertools.cycle([self.env.action_space.sample() for _ in range(1000)])

    def step(self) -> None:
        env = self.env
        for action in itertools.islice(self.actions, PLAIN_STEPS_PER_CALL):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    def close(self) -> None:
        self.env.close()


def _serve_plain_loop(task: Task, connection: Connection) -> None:
    loop = PlainLoop(task)
    loop.open()
    loop.prepare()
    while (seconds := connection.recv()) is not None:
        connection.send(loop.run(seconds))
    loop.close()


class TwoPlainLoops(Contender):
    """Two plain loops in two processes at the same time, which never speak: the limit of two cores."""

    def open(self) -> None:
        context = multiprocessing.get_context("fork")
        self.connections, self.processes = [], []
        for _ in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve_plain_loop, args=(self.task, theirs), daemon=True)
            process.start()
            self.connections.append(ours)
            self.processes.append(process)

    def step(self) -> None:
        raise NotImplementedError("the two loops run on their own, see run()")

    def run(self, seconds: float) -> Run:
        for connection in self.connections:
            connection.send(seconds)
        runs = [connection.recv() for connection in self.connections]
        return Run(sum(run.steps for run in runs), max(run.seconds for run in runs), 0.0)

    def close(self) -> None:
        for connection, process in zip(self.connections, self.processes, strict=True):
            connection.send(None)
            process.join()


class BareRows(Contender):
    """The rows in two processes, each a plain loop over its half that waits for a bell before each step and tells when
    it is done, and nothing else: observations, rewards and ends are written to shared memory, but nobody makes a result
    of them, looks for errors or notes who was reset. What a step of a batch costs before anyone adds to it."""

    def open(self) -> None:
        context = multiprocessing.get_context("fork")
        env = make_gymnasium(self.task.env)
        self.space = env.action_space
        rows, observation = self.task.rows, np.zeros(env.observation_space.shape, env.observation_space.dtype)
        action = np.asarray(self.space.sample())
        self.given = _shared(context, (rows, *action.shape), action.dtype)
        outcome = [
            _shared(context, (rows, *observation.shape), observation.dtype),
            _shared(context, (rows,), np.float32),
            _shared(context, (2, rows), bool),
        ]
        self.done, self.bells = context.Semaphore(0), [context.Semaphore(0) for _ in range(2)]
        self.processes = []
        for half, bell in zip((slice(0, rows // 2), slice(rows // 2, rows)), self.bells, strict=True):
            arguments = (self.task, half, self.given, outcome, bell, self.done)
            self.processes.append(context.Process(target=_serve_bare_rows, args=arguments, daemon=True))
            self.processes[-1].start()

    def prepare(self) -> None:
        self.space.seed(0)
        shape = self.given.shape
        batches = [np.stack([self.space.sample() for _ in range(shape[0])]) for _ in range(ACTION_BATCHES)]
        self.actions = itertools.cycle(batches)

    def step(self) -> None:
        self.given[...] = next(self.actions)
        for bell in self.bells:
            bell.release()
        for _ in self.bells:
            _wait(self.done)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _shared(context: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    memory = context.RawArray("b", int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype).reshape(shape)


def _wait(semaphore: Any) -> None:
    """Wait the way that is quickest here: yield the processor, and sleep only when that takes long."""
    for _ in range(20_000):
        if semaphore.acquire(False):
            return
        os.sched_yield()
    semaphore.acquire()


def _serve_bare_rows(
    task: Task, half: slice, given: np.ndarray, outcome: list[np.ndarray], bell: Any, done: Any
) -> None:
    actions, observations, rewards = given[half], outcome[0][half], outcome[1][half]
    ends = outcome[2][:, half]
    envs = [make_gymnasium(task.env) for _ in range(len(actions))]
    for env in envs:
        env.reset(seed=0)
    steps = [env.step for env in envs]
    while True:
        _wait(bell)
        gained, terminations, truncations = [], [], []
        taken = actions.tolist() if actions.ndim == 1 else actions
        for row, (step, action) in enumerate(zip(steps, taken, strict=True)):
            observations[row], reward, terminated, truncated, _ = step(action)
            gained.append(reward)
            terminations.append(terminated)
            truncations.append(truncated)
            if terminated or truncated:
                envs[row].reset()
        rewards[:], ends[0], ends[1] = gained, terminations, truncations
        done.release()


@dataclass(frozen=True)
class Entry:
    """A contender's place in the reports.

    Attributes:
        label: How tables and charts name it.
        kind: `"shoal"`, `"peer"` or `"limit"` (what no batched environment on two cores can be expected to pass).
        make: Builds the adapter for a task.
    """

    label: str
    kind: str
    make: Callable[[Task], Contender]


CONTENDERS: dict[str, Entry] = {
    "shoal": Entry("shoal ParallelEnv, one process a row", "shoal", Shoal),
    "shoal-2": Entry("shoal ParallelEnv, 2 processes", "shoal", lambda task: Shoal(task, processes=2)),
    "shoal-gymenv": Entry(
        "shoal ParallelEnv, GymEnv, one process a row", "shoal", lambda task: Shoal(task, torchrl=True)
    ),
    "shoal-serial": Entry("shoal SerialEnv", "shoal", lambda task: Shoal(task, serial=True)),
    "torchrl": Entry("torchrl ParallelEnv", "peer", TorchRL),
    "torchrl-fork": Entry(
        "torchrl ParallelEnv, forked workers", "peer", lambda task: TorchRL(task, mp_start_method="fork")
    ),
    "torchrl-serial": Entry("torchrl SerialEnv", "peer", lambda task: TorchRL(task, serial=True)),
    "gymnasium-async": Entry("Gymnasium AsyncVectorEnv", "peer", gymnasium_async),
    "gymnasium-sync": Entry("Gymnasium SyncVectorEnv", "peer", gymnasium_sync),
    "sb3-subproc": Entry("Stable-Baselines3 SubprocVecEnv, forked", "peer", stable_baselines3_subproc),
    "bare": Entry("bare loops in 2 processes, told when to step", "limit", BareRows),
    "plain": Entry("plain loop, one env", "limit", PlainLoop),
    "plain-2": Entry("two plain loops in two processes", "limit", TwoPlainLoops),
}
