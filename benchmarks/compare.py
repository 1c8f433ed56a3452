"""Compare shoal with its peers, side by side, on this machine.

    python benchmarks/compare.py                      # everything, about 7 minutes on two cores
    python benchmarks/compare.py --quick              # a first impression
    python benchmarks/compare.py --only throughput --configurations cartpole-8
    python benchmarks/compare.py --write --plot benchmarks/compare.png

Every contender lives in a process of its own and steps when it is its turn, a short slice at a time, so that a
machine that is now fast and now slow treats all of them alike.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from contenders import CONTENDERS
from machine import describe_machine
from measure import CONFIGURATIONS, Results, measure_builds, measure_throughput, measure_waiting
from report import all_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from measure import Throughput
    from report import Table

RESULTS_PAGE = Path(__file__).with_name("RESULTS.md")
SECTIONS = ("throughput", "startup", "memory", "idle")
ROWS = 8
BUILD_CONTENDERS = ("shoal", "shoal-gymenv", "torchrl", "gymnasium-async")
WAIT_CONTENDERS = ("shoal", "torchrl-fork", "gymnasium-async")
MOST_ROWS_OF_TORCHRL_DEFAULT = 16


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    slice_seconds: float
    build_rounds: int
    wait_rounds: int
    wait_seconds: float


FULL = Effort(rounds=6, slice_seconds=1.0, build_rounds=3, wait_rounds=2, wait_seconds=3.0)
QUICK = Effort(rounds=3, slice_seconds=0.3, build_rounds=1, wait_rounds=1, wait_seconds=1.5)
QUICK_CONFIGURATIONS = ("cartpole-8", "cartpole-64")


def choice_list(choices: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of comma-separated choices."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(part.strip() for part in text.split(",") if part.strip())
        if unknown := [part for part in chosen if part not in choices]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(choices)}")
        return chosen

    return parse


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    description, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", type=choice_list(SECTIONS), default=SECTIONS, help=f"sections, of {','.join(SECTIONS)} (all)"
    )
    parser.add_argument(
        "--configurations",
        type=choice_list(tuple(CONFIGURATIONS)),
        help=f"what throughput steps, of {','.join(CONFIGURATIONS)} (all; quick: {','.join(QUICK_CONFIGURATIONS)})",
    )
    parser.add_argument(
        "--without",
        type=choice_list(tuple(CONTENDERS)),
        default=(),
        help=f"contenders to leave out, of {','.join(CONTENDERS)} (none)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few and short rounds, and torchrl with forked workers only"
    )
    parser.add_argument("--rounds", type=int, help="rounds of throughput")
    parser.add_argument("--slice", type=float, help="seconds that each contender steps in a round of throughput")
    parser.add_argument("--write", action="store_true", help=f"write the tables to benchmarks/{RESULTS_PAGE.name}")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the throughput as a chart")
    parser.add_argument("--verbose", action="store_true", help="let the contenders write to the terminal")
    return parser.parse_args()


def chosen(keys: Iterable[str], arguments: argparse.Namespace, rows: int) -> list[str]:
    """Return the contenders to measure.

    torchrl's workers as they come each import torch: 3 s of processor time and 260 MB a row. Where that is too much, or
    the run has to be quick, its forked workers stand in for them. They are the faster ones.
    """
    heavy = {"torchrl"} if arguments.quick or rows > MOST_ROWS_OF_TORCHRL_DEFAULT else set()
    return [key for key in keys if key not in arguments.without and key not in heavy]


def measure(arguments: argparse.Namespace) -> Results:
    """Run the sections that were asked for."""
    effort = QUICK if arguments.quick else FULL
    results = Results()
    if "throughput" in arguments.only:
        for name in arguments.configurations or (QUICK_CONFIGURATIONS if arguments.quick else CONFIGURATIONS):
            results.throughput[name] = measure_throughput(
                CONFIGURATIONS[name],
                chosen(CONTENDERS, arguments, CONFIGURATIONS[name].rows),
                rounds=arguments.rounds or effort.rounds,
                slice_seconds=arguments.slice or effort.slice_seconds,
                verbose=arguments.verbose,
            )
    if "startup" in arguments.only or "memory" in arguments.only:
        results.builds = measure_builds(
            chosen(BUILD_CONTENDERS, arguments, ROWS),
            rows=ROWS,
            rounds=effort.build_rounds if "startup" in arguments.only else 1,
            verbose=arguments.verbose,
        )
    if "idle" in arguments.only:
        results.waiting = measure_waiting(
            chosen(WAIT_CONTENDERS, arguments, ROWS),
            rows=ROWS,
            rounds=effort.wait_rounds,
            seconds=effort.wait_seconds,
            verbose=arguments.verbose,
        )
    return results


def command_line() -> str:
    """Return the command that is running, with no path of this machine in it."""
    words = [os.path.relpath(word) if os.path.isabs(word) else word for word in sys.argv[1:]]
    return shlex.join(["python", "benchmarks/compare.py", *words])


def results_page(tables: Sequence[Table], facts: Sequence[str]) -> str:
    """Return the Markdown page."""
    date = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    head = [
        "# shoal and its peers, side by side\n",
        f"Measured on {date} by `{command_line()}`.\n",
        *(f"- {fact}" for fact in facts),
        "",
        "Every contender lives in a process of its own and steps when it is its turn, a short slice at a time.",
        "torchrl's environments and shoal's are stepped by `step_and_maybe_reset`, which resets finished rows in the",
        "same call; the vector environments of Gymnasium and Stable-Baselines3 by `step`. All take random actions that",
        "were drawn beforehand.",
        "",
        "torchrl's `ParallelEnv` starts its workers by `spawn`, so that each imports torch. Forked workers start at",
        "once, share most of their memory, and are faster, so they are measured too. Where 64 workers would take",
        "17 GB, they stand in for the others. Stable-Baselines3's workers are forked everywhere.",
    ]
    return "\n".join(head) + "\n\n" + "\n\n".join(table.as_markdown() for table in tables) + "\n"


def write_plot(throughputs: Sequence[Throughput], path: Path) -> None:
    """Draw the chart, or say why there is none."""
    if not throughputs:
        print("\nno chart: no throughput was measured")
        return
    try:
        from plot import draw_throughput
    except ImportError as error:
        print(f"\nno chart: {error}")
        return
    draw_throughput(throughputs, path)


def main() -> None:
    """Measure, print, and write what was asked for."""
    arguments = parse_arguments()
    facts = describe_machine()
    print("\n".join(facts), flush=True)
    try:
        results = measure(arguments)
    except KeyboardInterrupt:
        sys.exit("interrupted; every contender was closed")
    tables = all_tables(results, arguments.only)
    for table in tables:
        print(f"\n{table.as_text()}")
    if arguments.write:
        RESULTS_PAGE.write_text(results_page(tables, facts))
    if arguments.plot:
        write_plot([throughput for throughput in results.throughput.values() if throughput.rates], arguments.plot)


if __name__ == "__main__":
    main()
