"""Which ways to step are compared."""

from __future__ import annotations

import pytest

from shoal.cli.configuration import LOOP, PARALLEL, SERIAL, Configuration, default_processes, plan


def tried(configurations: list[Configuration], rows: int) -> list[int | None]:
    return [each.processes for each in configurations if each.rows == rows and each.engine != LOOP and not each.skipped]


@pytest.mark.parametrize(
    ("cpus", "expected"), [(1, [1, 2]), (2, [1, 2, 4]), (6, [1, 2, 4, 6, 12]), (8, [1, 2, 4, 8, 16])]
)
def test_splits_are_powers_of_two_up_to_the_cpus_their_number_and_twice_that(cpus: int, expected: list[int]) -> None:
    assert default_processes(cpus) == expected


def test_a_plan_has_the_plain_loop_first_then_serial_splits_and_one_process_a_row() -> None:
    configurations = plan([8, 64], None, 2)
    assert configurations[0] == Configuration(LOOP, 1)
    assert [each.engine for each in configurations if each.rows == 8] == [SERIAL] + 4 * [PARALLEL]
    assert tried(configurations, 8) == [None, 1, 2, 4, 8]
    assert tried(configurations, 64) == [None, 1, 2, 4, 64]


def test_no_split_has_more_processes_than_rows_and_none_is_there_twice() -> None:
    assert tried(plan([2], None, 4), 2) == [None, 1, 2]


def test_one_process_a_row_is_skipped_beyond_64_and_the_reason_names_the_way_to_ask() -> None:
    skipped = [each for each in plan([64, 65], None, 2) if each.skipped]
    assert [(each.rows, each.processes) for each in skipped] == [(65, 65)]
    assert "--processes 65" in skipped[0].skipped
    assert tried(plan([65], [65], 2), 65) == [None, 65]


def test_default_splits_of_a_large_machine_stop_at_64_processes_too() -> None:
    configurations = plan([256], None, 64)
    assert tried(configurations, 256) == [None, 1, 2, 4, 8, 16, 32, 64]
    assert [each.processes for each in configurations if each.skipped] == [256]


def test_splits_that_were_asked_for_replace_the_default_and_those_over_the_rows_say_so() -> None:
    configurations = plan([8], [3, 16], 2)
    assert tried(configurations, 8) == [None, 3, 8]
    assert [(each.processes, each.skipped) for each in configurations if each.skipped] == [
        (16, "more processes than rows")
    ]


@pytest.mark.parametrize(
    ("configuration", "label", "call"),
    [
        (Configuration(LOOP, 1), "one plain loop", None),
        (Configuration(SERIAL, 1), "1 row in this process (SerialEnv)", "SerialEnv(1, make)"),
        (Configuration(PARALLEL, 64, 1), "64 rows on 1 process", "ParallelEnv(64, make, processes=1)"),
        (Configuration(PARALLEL, 8, 8), "8 rows on 8 processes", "ParallelEnv(8, make)"),
    ],
)
def test_a_configuration_in_words_and_in_code(configuration: Configuration, label: str, call: str | None) -> None:
    assert configuration.label == label
    assert call is None or configuration.call("make") == call
