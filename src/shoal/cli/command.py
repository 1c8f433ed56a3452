"""The command line: reads it, runs the command, and turns what goes wrong into one message and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence

from shoal import __version__
from shoal.cli.configuration import plan
from shoal.cli.failures import FAILED, INTERRUPTED, USAGE, CommandError, Failure
from shoal.cli.interrupts import Interrupts

BENCH = """\
Finds out how fast an environment can be stepped here: in one plain loop, in SerialEnv, and in ParallelEnv on several
numbers of processes.

  shoal bench CartPole-v1                      an environment of Gymnasium's
  shoal bench my_package.envs:make_env         a factory: a function or class without arguments
  shoal bench envs.py:make_env --rows 16       a factory in a file
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command ``shoal``.

    Args:
        arguments: the command line without the program's name; None for that of this process.

    Returns:
        The exit code: 0, 1 for what failed, 2 for wrong usage, 130 for Ctrl-C.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return USAGE
    try:
        with Interrupts() as interrupts:
            try:
                return _bench(options, interrupts)
            except CommandError:
                interrupts.check()
                raise
    except CommandError as error:
        _complain(str(error), error.failure, options)
        return error.code
    except KeyboardInterrupt:
        _complain("interrupted; all workers have ended", None, options)
        return INTERRUPTED
    except BrokenPipeError:  # nobody reads the output any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _bench(options: argparse.Namespace, interrupts: Interrupts) -> int:
    from shoal.cli import plot
    from shoal.cli.document import document
    from shoal.cli.machine import is_busy, load_average
    from shoal.cli.measure import family_of, measure
    from shoal.cli.progress import Progress
    from shoal.cli.report import recommend, remarks, table, title
    from shoal.cli.target import resolve
    from shoal.engine.signals import usable_cpus

    if options.plot is not None:
        plot.check(options.plot)
    cpus, load = usable_cpus(), load_average()
    configurations = plan(options.rows, options.processes, cpus)
    with _output_kept_clean():
        target = resolve(options.target)
        family = family_of(target.factory)
        todo = options.rounds * sum(not configuration.skipped for configuration in configurations)
        progress = Progress(None if options.quiet else sys.stderr, todo)
        try:
            results = measure(
                target.factory,
                configurations,
                seconds=options.seconds,
                rounds=options.rounds,
                progress=progress,
                interrupts=interrupts,
            )
        finally:
            progress.clear()
    recommendation = recommend(results, target)
    heading = title(target, cpus, options.seconds, options.rounds)
    if options.json:
        settings = {name: getattr(options, name) for name in ("rows", "processes", "seconds", "rounds")}
        print(json.dumps(document(target, family, results, recommendation, load=load, **settings), indent=2))
    else:
        print(f"{heading}\n\n{table(results)}\n")
        for remark in remarks(results, recommendation):
            print(remark)
        if is_busy(load, cpus):
            print(f"Other work was running before the start (load average {load}): read the numbers with care.")
        if recommendation is not None:
            print(f"\n{recommendation.sentence}\n\n{textwrap.indent(recommendation.code, '    ')}")
    sys.stdout.flush()
    if options.plot is not None:
        plot.draw(results, options.plot, heading)
    failures = [result.failure for result in results if result.failure is not None]
    if options.traceback:
        print(*(failure.trace for failure in failures), sep="\n", end="", file=sys.stderr)
    if recommendation is None:
        raise CommandError("no batch could be measured" + (f": {failures[-1].text}" if failures else ""), FAILED)
    return 0


@contextlib.contextmanager
def _output_kept_clean() -> Iterator[None]:
    """Sends what environments and their workers print to the error stream: the output is for the results alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _complain(message: str, failure: Failure | None, options: argparse.Namespace) -> None:
    if failure is not None and options.traceback:
        print(failure.trace, end="", file=sys.stderr)
    print(f"shoal bench: {message}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shoal", description="Batched reinforcement-learning environments.")
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    bench = commands.add_parser(
        "bench",
        help="find out how fast an environment can be stepped here, and on how many processes",
        description=BENCH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument(
        "target", metavar="TARGET", help="MODULE:FACTORY, FILE.py:FACTORY, or the id of a Gymnasium environment"
    )
    bench.add_argument("--rows", type=_counts, default=[8, 64], metavar="N,...", help="batch sizes (default: 8,64)")
    bench.add_argument(
        "--processes",
        type=_counts,
        metavar="N,...",
        help="numbers of processes beside one a row (default: 1, 2, 4, ... up to the CPUs there are, and twice that)",
    )
    bench.add_argument(
        "--seconds", type=_seconds, default=1.0, metavar="S", help="seconds for each in a round (default: 1)"
    )
    bench.add_argument("--rounds", type=_count, default=3, metavar="N", help="rounds, of which the median (default: 3)")
    bench.add_argument("--json", action="store_true", help="print a JSON document in place of the table")
    bench.add_argument("--plot", metavar="FILE.png", help="draw a chart, too")
    bench.add_argument("--quiet", action="store_true", help="show no progress")
    bench.add_argument("--traceback", action="store_true", help="show the whole traceback of what fails")
    return parser


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return count


def _counts(text: str) -> list[int]:
    return sorted({_count(part) for part in text.split(",")})


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds
