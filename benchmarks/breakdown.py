"""Where a step's microseconds go, and the ratios that `compare.py` does not measure.

    python benchmarks/breakdown.py            # about four minutes on two cores
    python benchmarks/breakdown.py --write    # and writes benchmarks/PROFILE.md below its text

Peers alternate in one run; each number is the median of the rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import torch
from environments import PixelEnv
from machine import describe_machine
from torchrl.envs import GymEnv, GymWrapper
from torchrl.envs import ParallelEnv as TorchRLParallelEnv
from torchrl.envs import SerialEnv as TorchRLSerialEnv
from torchrl_environments import OwnEnv, transformed

from shoal import ParallelEnv, SerialEnv
from shoal.engine.pool import Pool, PoolOptions
from shoal.engine.protocol import Opcode
from shoal.engine.rows import Builder

PAGE = Path(__file__).with_name("PROFILE.md")
MARK = "<!-- measured -->"
ROUNDS = 5
SECONDS = 0.4

cartpole = partial(gymnasium.make, "CartPole-v1")
gym_env = partial(GymEnv, "CartPole-v1")
cheetah, gym_cheetah = partial(gymnasium.make, "HalfCheetah-v5"), partial(GymEnv, "HalfCheetah-v5")


def per_call(function: Callable[[], Any], seconds: float = SECONDS) -> float:
    """Microseconds of one call."""
    for _ in range(5):
        function()
    calls, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        for _ in range(10):
            function()
        calls += 10
    return 1e6 * passed / calls


def alternate(functions: dict[str, Callable[[], Any]], seconds: float = SECONDS) -> dict[str, float]:
    """The median microseconds of one call of each, in alternating rounds."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            samples[name].append(per_call(function, seconds))
    return {name: statistics.median(values) for name, values in samples.items()}


class Stepper:
    """Steps a batch as a collector does, with actions given."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.root = env.rand_action(env.reset())
        self.action = self.root["action"]

    def __call__(self) -> None:
        self.root.set("action", self.action)
        _, self.root = self.env.step_and_maybe_reset(self.root)

    def close(self) -> None:
        self.env.close()


class PlainLoop:
    """One environment in a plain loop."""

    def __init__(self) -> None:
        self.env = cartpole()
        self.env.reset(seed=0)

    def __call__(self) -> None:
        _, _, terminated, truncated, _ = self.env.step(1)
        if terminated or truncated:
            self.env.reset()


def where_time_goes() -> list[str]:
    lines = [
        "| CartPole-v1 | whole step | engine | face | environments alone | steps/s |",
        "| :--- | ---: | ---: | ---: | ---: | ---: |",
    ]
    cases: list[tuple[str, int, Any]] = [
        ("8 rows, `SerialEnv`", 8, partial(SerialEnv, 8)),
        ("8 rows on 2 processes", 8, partial(ParallelEnv, 8, processes=2)),
        ("8 rows, one process each", 8, partial(ParallelEnv, 8)),
        ("64 rows, `SerialEnv`", 64, partial(SerialEnv, 64)),
        ("64 rows on 2 processes", 64, partial(ParallelEnv, 64, processes=2)),
    ]
    for name, rows, build in cases:
        step = Stepper(build(cartpole))
        session = step.env.__dict__["_session"]
        engine = partial(session.engine.execute, Opcode.STEP_AND_MAYBE_RESET)
        loop = PlainLoop()
        found = alternate({"whole": step, "engine": engine, "plain": loop})
        before = session.meter.stats(session.engine)
        per_call(step)
        after = session.meter.stats(session.engine)
        commands = after.commands - before.commands
        face = 1e6 * (after.face_seconds - before.face_seconds) / commands
        carriers = 1 if "SerialEnv" in name else min(2, rows)
        alone = found["plain"] * rows / carriers
        lines.append(
            f"| {name} | {found['whole']:.0f} us | {found['engine']:.0f} us | {face:.0f} us | {alone:.0f} us | "
            f"{1e6 * rows / found['whole']:,.0f} |"
        )
        step.close()
    return lines


def ratio_lines() -> list[str]:
    lines = ["| measured | shoal | peer | times | asked |", "| :--- | ---: | ---: | ---: | ---: |"]

    def compare(name: str, mine: Any, peer: Any, asked: str, seconds: float = SECONDS, unit: str = "us") -> None:
        found = alternate({"mine": mine, "peer": peer}, seconds)
        scale = 1.0 if unit == "us" else 1e-6
        lines.append(
            f"| {name} | {found['mine'] * scale:,.3g} {unit} | {found['peer'] * scale:,.3g} {unit} | "
            f"{found['peer'] / found['mine']:.2f} | {asked} |"
        )
        for each in (mine, peer):
            if isinstance(each, (Stepper, Rollout)):
                each.close()

    fork = {"mp_start_method": "fork"}
    compare(
        "an `EnvBase` of one's own, 8 rows, one process each, against torchrl `ParallelEnv` (forked)",
        Stepper(ParallelEnv(8, OwnEnv)),
        Stepper(TorchRLParallelEnv(8, OwnEnv, **fork)),
        "2.5",
    )
    compare(
        "the same on 2 processes, against the same",
        Stepper(ParallelEnv(8, OwnEnv, processes=2)),
        Stepper(TorchRLParallelEnv(8, OwnEnv, **fork)),
        "",
    )
    compare(
        "`SerialEnv`, 8 `GymEnv` factories (CartPole-v1), against torchrl `SerialEnv`",
        Stepper(SerialEnv(8, gym_env)),
        Stepper(TorchRLSerialEnv(8, gym_env)),
        "10",
    )
    compare(
        "8 `GymEnv` factories, one process each, against torchrl `ParallelEnv` (forked)",
        Stepper(ParallelEnv(8, gym_env)),
        Stepper(TorchRLParallelEnv(8, gym_env, **fork)),
        "12",
    )
    for name, options in (("one process each", {}), ("2 processes", {"processes": 2})):
        compare(
            f"8 `GymEnv` behind `StepCounter`, `RewardSum` and `DoubleToFloat` (CartPole-v1), {name}, against torchrl "
            "`ParallelEnv` (forked)",
            Stepper(ParallelEnv(8, transformed, **options)),
            Stepper(TorchRLParallelEnv(8, transformed, **fork)),
            "",
        )
    wrapped = partial(wrap_pixels)
    for name, mine in (
        ("`rollout(256)` of 16 pixel environments (84x84x4), 2 processes", ParallelEnv(16, PixelEnv, processes=2)),
        ("the same, one process each", ParallelEnv(16, PixelEnv)),
    ):
        compare(
            f"{name}, against torchrl `ParallelEnv` (forked)",
            Rollout(mine),
            Rollout(TorchRLParallelEnv(16, wrapped, **fork)),
            "4",
            seconds=0.5,
            unit="s",
        )
    compare(
        "`rollout(256, policy)` of 16 pixel environments, 2 processes, against torchrl `ParallelEnv` (forked)",
        Rollout(ParallelEnv(16, PixelEnv, processes=2), policy=True),
        Rollout(TorchRLParallelEnv(16, wrapped, **fork), policy=True),
        "",
        seconds=0.5,
        unit="s",
    )
    compare(
        "`rollout(256, policy)` until a row is done, 8 HalfCheetah-v5 on 2 processes, against torchrl `ParallelEnv` "
        "(forked)",
        Rollout(ParallelEnv(8, cheetah, processes=2), policy=True, until_done=True),
        Rollout(TorchRLParallelEnv(8, gym_cheetah, **fork), policy=True, until_done=True),
        "",
        seconds=0.5,
        unit="s",
    )
    return lines


def wrap_pixels() -> GymWrapper:
    return GymWrapper(PixelEnv())


class Rollout:
    """Rolls a batch out, 256 steps of random actions, or of a policy that always does the same."""

    def __init__(self, env: Any, *, policy: bool = False, until_done: bool = False) -> None:
        self.env, self.until_done = env, until_done
        env.reset()
        action = env.action_spec.rand()
        self.policy = (lambda td: td.set("action", action)) if policy else None

    def __call__(self) -> None:
        self.env.rollout(256, self.policy, break_when_any_done=self.until_done)

    def close(self) -> None:
        self.env.close()


class NoOp(gymnasium.Env[Any, Any]):
    """Does nothing, as fast as that can be done."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return 0, 0.0, False, False, {}


def there_and_back() -> list[str]:
    """A no-op environment at the engine, against two semaphores on which both sides sleep."""
    pool = Pool([Builder(NoOp, {})], PoolOptions(processes=1))
    pool.attach([description.schema for description in pool.descriptions])
    pool.execute(Opcode.RESET)
    context = multiprocessing.get_context("fork")
    there, back = context.Semaphore(0), context.Semaphore(0)

    def answer() -> None:
        while True:
            there.acquire()
            back.release()

    process = context.Process(target=answer, daemon=True)
    process.start()

    def semaphores() -> None:
        there.release()
        back.acquire()

    found = alternate({"engine": partial(pool.execute, Opcode.STEP), "semaphores": semaphores})
    process.kill()
    pool.close()
    return [
        f"A no-op environment, there and back at the engine: {found['engine']:.1f} us; a pair of semaphores with both "
        f"sides sleeping: {found['semaphores']:.1f} us; {found['engine'] / found['semaphores']:.2f} of its time "
        "(asked: half)."
    ]


def face_against_copies() -> list[str]:
    """What the face costs over the waiting, against the bare copies of the leaves that it hands out."""
    step = Stepper(SerialEnv(8, cartpole))
    session, results = step.env.__dict__["_session"], step.env.__dict__["_results"]
    buffers = [buffer for area in ("next", "root") for _, buffer in results.plain.leaves[area]]
    run = session.run
    session.run = lambda *args, **kwargs: None
    found = alternate({"face": step, "copies": lambda: [buffer.clone() for buffer in buffers]})
    session.run = run
    step.close()
    return [
        f"The face, `step_and_maybe_reset` of 8 CartPole rows with the engine taken out: {found['face']:.1f} us; the "
        f"bare copies of the {len(buffers)} leaves that it hands out: {found['copies']:.1f} us; "
        f"{found['face'] / found['copies']:.1f} times their time (asked: 6 at most)."
    ]


def while_the_parent_learns() -> list[str]:
    """Processor time of the workers while nobody asks them for anything for a second at a time."""
    import psutil

    step = Stepper(ParallelEnv(8, cartpole))
    pids = [process.pid for process in step.env.stats().processes]
    processes = [psutil.Process(pid) for pid in pids]
    shares = []
    for _ in range(3):
        before = [sum(process.cpu_times()[:2]) for process in processes]
        for _ in range(2):
            step()
            time.sleep(1.0)
        after = [sum(process.cpu_times()[:2]) for process in processes]
        shares.append(max((b - a) / 2.0 for a, b in zip(before, after, strict=True)))
    step.close()
    return [
        f"While the parent is busy elsewhere for a second between steps, the busiest of 8 workers uses "
        f"{100 * statistics.median(shares):.1f} % of a core (asked: under 3 %)."
    ]


def scale() -> list[str]:
    lines = [
        "| rows on 2 processes | us a row's step | | processes, 64 rows | us a row's step |",
        "| ---: | ---: | --- | ---: | ---: |",
    ]
    left = []
    for rows in (8, 32, 128, 512, 1024):
        step = Stepper(ParallelEnv(rows, cartpole, processes=2))
        left.append((rows, alternate({"step": step})["step"] / rows))
        step.close()
    right = []
    for processes in (2, 4, 8, 16, 64):
        step = Stepper(ParallelEnv(64, cartpole, processes=processes))
        right.append((processes, alternate({"step": step})["step"] / 64))
        step.close()
    for (rows, mine), (processes, other) in zip(left, right, strict=True):
        lines.append(f"| {rows} | {mine:.1f} | | {processes} | {other:.1f} |")
    return lines


def cost_of_stats() -> list[str]:
    """What the clocks of `env.stats()` cost: their readings in a step, times what one reading costs."""
    step = Stepper(SerialEnv(64, cartpole))
    whole = per_call(step)
    reading = per_call(time.perf_counter)
    readings = 6 + 64 / 16  # two in the session, two in the engine, two in the face; each row in one step of sixteen
    step.close()
    return [
        f"`env.stats()`: a step of 64 rows reads the clock {readings:.0f} times on average, {reading:.2f} us each: "
        f"{100 * readings * reading / whole:.1f} % of its {whole:.0f} us."
    ]


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the tables to benchmarks/PROFILE.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = [f"Measured by `python benchmarks/breakdown.py`, medians of {ROUNDS} alternating rounds.", ""]
    lines += [f"- {fact}" for fact in describe_machine()]
    sections: list[tuple[str, Callable[[], list[str]]]] = [
        ("Where a step goes", where_time_goes),
        ("Against peers", ratio_lines),
        ("There and back", there_and_back),
        ("The face", face_against_copies),
        ("Waiting", while_the_parent_learns),
        ("Scale", scale),
        ("Clocks", cost_of_stats),
    ]
    for title, measure in sections:
        lines += ["", f"### {title}", "", *measure()]
        print("\n".join(lines[-12:] if title == "Scale" else lines[lines.index(f"### {title}") :]), flush=True)
    if arguments.write:
        text = PAGE.read_text().partition(MARK)[0]
        PAGE.write_text(text + MARK + "\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
