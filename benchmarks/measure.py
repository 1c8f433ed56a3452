"""The four measurements. Each returns plain numbers; `report.py` turns them into tables."""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from contenders import CONTENDERS, Run, Task
from environments import SLOW_ENV
from hosting import ContenderFailed, HostProcess, Memory
from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WARM_UP_SECONDS = 0.15
IDLE_WINDOW_SECONDS = 1.0


@dataclass(frozen=True)
class Configuration:
    """One throughput comparison: these contenders, on so many rows of this environment."""

    name: str
    env: str
    rows: int

    @property
    def title(self) -> str:
        """The configuration in words."""
        return f"{self.env}, {self.rows} envs"


CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        Configuration("cartpole-8", "CartPole-v1", 8),
        Configuration("cartpole-64", "CartPole-v1", 64),
        Configuration("halfcheetah-8", "HalfCheetah-v5", 8),
    )
}


@dataclass
class Measured:
    """What every measurement has: contenders that had to be left out, with the reason, and things worth a warning."""

    left_out: dict[str, str] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    def leave_out(self, key: str, reason: str) -> None:
        """Note that a contender has no numbers here."""
        self.left_out[key] = reason


@dataclass
class Throughput(Measured):
    """Steps per second of each contender, one number a round, and the cores (1.0 = one) each uses while it is idle."""

    configuration: Configuration = CONFIGURATIONS["cartpole-8"]
    rates: dict[str, list[float]] = field(default_factory=dict)
    idle_cores: dict[str, float] = field(default_factory=dict)

    @property
    def torchrl(self) -> str:
        """The torchrl `ParallelEnv` that others are compared to: as it comes, else with forked workers (faster)."""
        return "torchrl" if self.rates.get("torchrl") else "torchrl-fork"

    def ratio(self, key: str, baseline: str) -> float | None:
        """Median over the rounds of the two contenders' ratio in that round; None if either has no numbers."""
        if not self.rates.get(key) or not self.rates.get(baseline):
            return None
        return statistics.median(a / b for a, b in zip(self.rates[key], self.rates[baseline], strict=True))


@dataclass
class Builds(Measured):
    """Per contender: seconds to be ready in each round, and the memory of its processes in the last."""

    rows: int = 8
    seconds: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)


@dataclass(frozen=True)
class WaitSample:
    """One run with slow environments: steps per second, and cores used by the stepping process and by its workers."""

    rate: float
    parent_cores: float
    worker_cores: float


@dataclass
class Waiting(Measured):
    """Per contender, one sample a round."""

    rows: int = 8
    samples: dict[str, list[WaitSample]] = field(default_factory=dict)


@dataclass
class Results:
    """All that one run of the command measured; a section that was not asked for is empty."""

    throughput: dict[str, Throughput] = field(default_factory=dict)
    builds: Builds | None = None
    waiting: Waiting | None = None


def rotated(keys: Sequence[str], turn: int) -> list[str]:
    """Order the contenders for one round: another one first each time, and every other round backwards."""
    first = turn % len(keys)
    order = [*keys[first:], *keys[:first]]
    return order[::-1] if turn % 2 else order


@contextlib.contextmanager
def opened_hosts(
    keys: Sequence[str], task: Task, measured: Measured, verbose: bool
) -> Iterator[dict[str, HostProcess]]:
    """Build all contenders, each in its own process, at the same time; close those that are left at the end."""
    hosts: dict[str, HostProcess] = {}
    try:
        for key in keys:
            hosts[key] = HostProcess(key, task, verbose=verbose)
        for command in ("load", "open"):
            if command == "open":
                for host in hosts.values():
                    host.send("open")
            for key in list(hosts):
                _receive_or_drop(hosts, key, measured)
        yield hosts
    finally:
        for host in hosts.values():
            host.begin_close()
        for key, host in hosts.items():
            measured.complaints += [f"{CONTENDERS[key].label}: {text}" for text in host.shut()]


def _receive_or_drop(hosts: dict[str, HostProcess], key: str, measured: Measured) -> object:
    try:
        return hosts[key].receive()
    except ContenderFailed as error:
        measured.leave_out(key, str(error))
        hosts.pop(key).shut()
        return None


def measure_throughput(
    configuration: Configuration, keys: Sequence[str], *, rounds: int, slice_seconds: float, verbose: bool = False
) -> Throughput:
    """Let the contenders step in turn, a short time slice each, round after round."""
    result = Throughput(configuration=configuration)
    task = Task(configuration.env, configuration.rows)
    with (
        tqdm(total=rounds * len(keys), desc=f"{configuration.title}: building", unit="slice") as progress,
        opened_hosts(keys, task, result, verbose) as hosts,
    ):
        for key in list(hosts):
            _run_or_drop(hosts, key, WARM_UP_SECONDS, result)
        result.idle_cores = _idle_cores(hosts)
        for turn in range(rounds):
            for key in rotated(keys, turn):
                progress.set_description(f"{configuration.title}: {CONTENDERS[key].label}")
                if key in hosts and (run := _run_or_drop(hosts, key, slice_seconds, result)):
                    result.rates.setdefault(key, []).append(run.rate)
                progress.update()
    for key in result.left_out:
        result.rates.pop(key, None)
    return result


def _run_or_drop(hosts: dict[str, HostProcess], key: str, seconds: float, measured: Measured) -> Run | None:
    hosts[key].send("run", WARM_UP_SECONDS)
    if _receive_or_drop(hosts, key, measured) is None:
        return None
    hosts[key].send("run", seconds)
    run = _receive_or_drop(hosts, key, measured)
    assert run is None or isinstance(run, Run)
    return run


def _idle_cores(hosts: dict[str, HostProcess]) -> dict[str, float]:
    """See what each contender uses while nobody asks it for anything."""
    before = {key: host.cpu_seconds() for key, host in hosts.items()}
    time.sleep(IDLE_WINDOW_SECONDS)
    return {key: (host.cpu_seconds() - before[key]) / IDLE_WINDOW_SECONDS for key, host in hosts.items()}


def measure_builds(keys: Sequence[str], *, rows: int, rounds: int, verbose: bool = False) -> Builds:
    """Build each contender in a fresh interpreter, one at a time, in turn; then look at its workers' memory."""
    result = Builds(rows=rows)
    task = Task("CartPole-v1", rows)
    with tqdm(total=rounds * len(keys), desc="start-up and memory", unit="build") as progress:
        for turn in range(rounds):
            for key in rotated(keys, turn):
                progress.set_description(f"start-up and memory: {CONTENDERS[key].label}")
                if key not in result.left_out:
                    _build_once(key, task, result, verbose)
                progress.update()
    for key in result.left_out:
        result.seconds.pop(key, None)
    return result


def _build_once(key: str, task: Task, result: Builds, verbose: bool) -> None:
    host = HostProcess(key, task, verbose=verbose)
    try:
        host.receive()
        result.seconds.setdefault(key, []).append(host.ask("open"))
        host.ask("run", WARM_UP_SECONDS)
        result.memory[key] = host.memory()
    except ContenderFailed as error:
        result.leave_out(key, str(error))
    finally:
        complaints = host.shut()
        if key not in result.left_out:
            result.complaints += [f"{CONTENDERS[key].label}: {text}" for text in complaints]


def measure_waiting(keys: Sequence[str], *, rows: int, rounds: int, seconds: float, verbose: bool = False) -> Waiting:
    """Step environments that sleep, and count the processor time that waiting for them costs."""
    result = Waiting(rows=rows)
    with (
        tqdm(total=rounds * len(keys), desc="waiting: building", unit="run") as progress,
        opened_hosts(keys, Task(SLOW_ENV, rows), result, verbose) as hosts,
    ):
        for turn in range(rounds):
            for key in rotated(keys, turn):
                progress.set_description(f"waiting: {CONTENDERS[key].label}")
                if key in hosts and (sample := _wait_once(hosts, key, seconds, result)):
                    result.samples.setdefault(key, []).append(sample)
                progress.update()
    for key in result.left_out:
        result.samples.pop(key, None)
    return result


def _wait_once(hosts: dict[str, HostProcess], key: str, seconds: float, measured: Measured) -> WaitSample | None:
    host = hosts[key]
    before = host.worker_cpu_seconds()
    run = _run_or_drop(hosts, key, seconds, measured)
    if run is None:
        return None
    workers = host.worker_cpu_seconds() - before
    return WaitSample(run.rate, run.cpu_seconds / run.seconds, workers / (run.seconds + WARM_UP_SECONDS))
