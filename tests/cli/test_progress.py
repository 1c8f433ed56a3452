"""What is told while a benchmark runs."""

from __future__ import annotations

import io

from shoal.cli.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def tell(progress: Progress) -> None:
    for label, outcome in (("8 rows on 2 processes", "12 steps/s"), ("a" * 500, "failed: boom")):
        progress.begin(label)
        progress.end(label, outcome)
    progress.clear()


def test_elsewhere_than_in_a_terminal_each_measurement_has_a_plain_line_with_its_outcome() -> None:
    stream = io.StringIO()
    tell(Progress(stream, 2))
    assert stream.getvalue() == f"[1/2] 8 rows on 2 processes: 12 steps/s\n[2/2] {'a' * 500}: failed: boom\n"


def test_in_a_terminal_one_line_changes_never_wraps_and_is_gone_at_the_end() -> None:
    stream = Terminal()
    tell(Progress(stream, 2))
    shown = stream.getvalue().split("\r\x1b[2K")
    assert "\n" not in stream.getvalue()
    assert shown[1] == "[1/2] 8 rows on 2 processes"
    assert shown[2].startswith("[2/2] aaa")
    assert len(shown[2]) < 200
    assert shown[-1] == ""


def test_a_terminal_hears_how_long_it_will_take() -> None:
    stream = Terminal()
    progress = Progress(stream, 3)
    progress.begin("one")
    progress.end("one", "fine")
    progress.begin("two")
    assert "s left" in stream.getvalue()


def test_quiet_is_quiet() -> None:
    tell(Progress(None, 2))
