"""From results to a table, a recommendation and a JSON document."""

from __future__ import annotations

import json
import platform

import pytest

from shoal.cli.configuration import LOOP, PARALLEL, SERIAL
from shoal.cli.document import document
from shoal.cli.report import recommend, remarks, seconds_text, table, times, title
from shoal.engine.signals import usable_cpus
from tests.cli.support import TARGET, result, results


def test_the_recommendation_is_the_fastest_batch_beside_one_process_a_row() -> None:
    best = recommend(results(), TARGET)
    assert best is not None
    assert best.sentence == "8 rows on 2 processes: 51,000 steps/s, 3.0 times one process a row"
    assert best.code.splitlines() == [
        "from my_envs import make_env",
        "from shoal import ParallelEnv",
        "",
        "env = ParallelEnv(8, make_env, processes=2)",
    ]
    assert best.times_one_a_row == 3.0


def test_without_a_number_for_one_process_a_row_the_plain_loop_takes_its_place() -> None:
    best = recommend([result(LOOP, 1, None, 100.0), result(SERIAL, 128, None, 250.0)], TARGET)
    assert best is not None
    assert best.sentence == "128 rows in this process (SerialEnv): 250 steps/s, 2.5 times one plain loop"
    assert best.times_one_a_row is None


def test_one_process_a_row_is_not_compared_with_itself() -> None:
    best = recommend([result(LOOP, 1, None, 100.0), result(PARALLEL, 4, 4, 250.0)], TARGET)
    assert best is not None
    assert best.sentence == "4 rows on 4 processes: 250 steps/s, 2.5 times one plain loop"
    assert best.code.endswith("ParallelEnv(4, make_env)")


def test_neither_the_plain_loop_nor_a_failed_batch_is_ever_recommended() -> None:
    assert recommend([result(LOOP, 1, None, 100.0), result(SERIAL, 4, None, 9e9, failure="boom")], TARGET) is None


def test_the_table_has_the_median_the_range_the_ratio_and_the_start_up_and_marks_the_fastest_of_its_rows() -> None:
    lines = table(results()).splitlines()
    assert " ".join(lines[0].split()) == "rows processes steps/s slowest to fastest x plain loop start-up"
    cells = [" ".join(line.split()) for line in lines[2:] if line]
    assert cells[0] == "1 plain loop 10,000 9,000 to 11,000 1.0 0.25 s"
    assert cells[1] == "8 SerialEnv 5,000 4,000 to 6,000 0.50 0.25 s"
    assert cells[2] == "8 2 51,000 50,000 to 90,000 5.1 0.25 s *"
    assert cells[3] == "8 4 failed"
    assert cells[4] == "8 8 (one a row) 17,000 17,000 to 17,000 1.7 0.25 s"
    assert cells[5].endswith("0.25 s *")
    assert cells[6] == "128 128 (one a row) skipped"


def test_the_columns_of_the_table_line_up_and_each_number_of_rows_stands_alone() -> None:
    lines = table(results()).splitlines()
    ends = {line.index("steps/s") + len("steps/s") for line in lines[:1]}
    ends |= {line.index(number) + len(number) for line in lines for number in ("10,000", "51,000") if number in line}
    assert len(ends) == 1
    assert [index for index, line in enumerate(lines) if not line] == [3, 8]


def test_the_range_is_left_out_where_there_is_one_round_only() -> None:
    assert " to " not in table([result(LOOP, 1, None, 100.0)]).splitlines()[2]


def test_remarks_say_why_something_has_no_number() -> None:
    told = remarks(results(), recommend(results(), TARGET))
    assert "failed, 8 rows on 4 processes: ValueError: boom" in told
    assert "skipped, 128 rows on 128 processes: over 64 processes" in told
    assert not any("No batch is faster" in line for line in told)


def test_remarks_say_so_where_no_batch_beats_the_plain_loop() -> None:
    slow = [result(LOOP, 1, None, 2_000_000.0), result(SERIAL, 4, None, 100.0)]
    told = remarks(slow, recommend(slow, TARGET))
    assert any("No batch is faster than one plain loop, where a step takes 0.5 µs" in line for line in told)


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.094, "0.09"), (0.994, "0.99"), (3.14, "3.1"), (31.4, "31.4"), (314.2, "314")]
)
def test_ratios(ratio: float, text: str) -> None:
    assert times(ratio) == text


@pytest.mark.parametrize(("seconds", "text"), [(6.5e-6, "6.5 µs"), (0.0021, "2.1 ms"), (1.5, "1.5 s")])
def test_times(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_the_title_says_what_was_measured_and_how() -> None:
    assert title(TARGET, 2, 1.0, 3) == "my_envs:make_env on 2 CPUs, median of 3 rounds of 1 s"
    assert title(TARGET, 1, 0.5, 1) == "my_envs:make_env on 1 CPU, one round of 0.5 s"


def test_the_document_has_all_that_its_page_promises() -> None:
    given = results()
    best = recommend(given, TARGET)
    made = document(TARGET, "gymnasium", given, best, rows=[8, 128], processes=None, seconds=1.0, rounds=3, load=0.25)
    assert json.loads(json.dumps(made)) == made
    assert (made["schema"], made["target"], made["family"]) == (1, "my_envs:make_env", "gymnasium")
    assert (made["machine"]["usable_cpus"], made["machine"]["load_average"]) == (usable_cpus(), 0.25)
    assert made["versions"]["python"] == platform.python_version()
    assert set(made["versions"]) == {"python", "shoal", "torch", "torchrl", "tensordict", "gymnasium", "numpy"}
    assert made["settings"] == {"rows": [8, 128], "processes": None, "seconds": 1.0, "rounds": 3}
    assert made["plain_loop"]["steps_per_second"] == 10_000.0
    assert made["batches"][1] == {
        "engine": "ParallelEnv",
        "rows": 8,
        "processes": 2,
        "status": "measured",
        "reason": None,
        "steps_per_second": 51_000.0,
        "steps_per_second_of_rounds": [51_000.0, 50_000.0, 90_000.0],
        "times_plain_loop": 5.1,
        "startup_seconds": 0.25,
    }
    assert [(each["status"], each["reason"]) for each in made["batches"] if each["reason"]] == [
        ("failed", "ValueError: boom"),
        ("skipped", "over 64 processes"),
    ]
    assert made["recommendation"]["sentence"] == best.sentence if best else False
    assert (made["recommendation"]["processes"], made["recommendation"]["times_one_process_a_row"]) == (2, 3.0)


def test_the_document_has_null_where_nothing_is_recommended() -> None:
    made = document(
        TARGET, "torchrl", [result(LOOP, 1, None, 1.0)], None, rows=[8], processes=[1], seconds=1.0, rounds=1, load=None
    )
    assert made["recommendation"] is None
    assert made["settings"]["processes"] == [1]
