"""The results as a JSON document; ``docs/bench.md`` describes it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from shoal.cli.configuration import LOOP
from shoal.cli.machine import facts, versions
from shoal.cli.measure import Result
from shoal.cli.report import Recommendation, times_plain
from shoal.cli.target import Target

SCHEMA = 1
"""Counted up when a field changes its meaning or goes; new fields do not count."""


def document(
    target: Target,
    family: str,
    results: Sequence[Result],
    recommendation: Recommendation | None,
    *,
    rows: Sequence[int],
    processes: Sequence[int] | None,
    seconds: float,
    rounds: int,
    load: float | None,
) -> dict[str, Any]:
    """Everything that was asked for and measured, in types that JSON knows."""
    return {
        "schema": SCHEMA,
        "target": target.text,
        "family": family,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
        "machine": facts(load),
        "versions": versions(),
        "settings": {
            "rows": list(rows),
            "processes": None if processes is None else list(processes),
            "seconds": seconds,
            "rounds": rounds,
        },
        "plain_loop": next(_entry(result, results) for result in results if result.configuration.engine == LOOP),
        "batches": [_entry(result, results) for result in results if result.configuration.engine != LOOP],
        "recommendation": None if recommendation is None else _recommended(recommendation),
    }


def _entry(result: Result, results: Sequence[Result]) -> dict[str, Any]:
    configuration, ratio = result.configuration, times_plain(result, results)
    return {
        "engine": configuration.engine,
        "rows": configuration.rows,
        "processes": configuration.processes,
        "status": result.status,
        "reason": result.reason or None,
        "steps_per_second": _rounded(result.rate),
        "steps_per_second_of_rounds": [_rounded(rate) for rate in result.rates],
        "times_plain_loop": _rounded(ratio),
        "startup_seconds": _rounded(result.startup_seconds),
    }


def _recommended(recommendation: Recommendation) -> dict[str, Any]:
    return {
        "engine": recommendation.configuration.engine,
        "rows": recommendation.configuration.rows,
        "processes": recommendation.configuration.processes,
        "steps_per_second": _rounded(recommendation.rate),
        "times_one_process_a_row": _rounded(recommendation.times_one_a_row),
        "sentence": recommendation.sentence,
        "code": recommendation.code,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
