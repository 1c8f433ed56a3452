"""The chart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shoal.cli import main, plot
from shoal.cli.failures import CommandError
from tests.cli.support import results


def test_a_chart_is_written_with_failed_and_skipped_configurations_in_it(tmp_path: Path) -> None:
    plot.draw(results(), str(tmp_path / "chart.svg"), "a title")
    plot.draw(results(), str(tmp_path / "chart.png"), "a title")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_a_chart_shows_every_configuration(tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot.draw(results(), str(tmp_path / "chart.svg"), "a title")
    text = (tmp_path / "chart.svg").read_text()
    expected = ("a title", "8 rows", "128 rows", "51,000", "(5.1x)", "failed", "skipped", "one plain loop, 10,000")
    assert all(f">{part}" in text or part in text for part in expected)
    assert all(label in text for label in ("SerialEnv", "2 processes", "8 processes, one a row"))


def test_the_plain_loop_is_a_line_in_every_panel_and_named_once() -> None:
    figure = plot.figure_of(results(), "a title")
    assert len(figure.axes) == 2
    for axes in figure.axes:
        assert [10_000.0, 10_000.0] in [list(line.get_xdata()) for line in axes.lines]
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts.count("one plain loop, 10,000") == 1


def test_the_fastest_of_its_rows_has_a_color_of_its_own() -> None:
    from matplotlib.colors import to_hex

    panel = plot.figure_of(results(), "a title").axes[0]
    bars = [to_hex(bar.get_facecolor()) for bar in panel.patches]
    assert bars == [plot.COLOR, plot.BEST_COLOR, plot.COLOR]


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(CommandError, match=r"shoal\[plot\]") as caught:
        plot.check("chart.png")
    assert caught.value.code == 1


@pytest.mark.parametrize(
    ("path", "message"), [("chart.txt", r"must end in one of .*\.png"), ("no/such/chart.png", "no folder no/such")]
)
def test_a_file_that_cannot_be_written_is_refused(path: str, message: str) -> None:
    plot.check("chart.png")
    with pytest.raises(CommandError, match=message) as caught:
        plot.check(path)
    assert caught.value.code == 2


def test_the_command_draws_a_chart_beside_its_table(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chart = tmp_path / "chart.png"
    arguments = ["--seconds", "0.005", "--rounds", "1", "--rows", "2", "--processes", "1", "--quiet"]
    assert main(["bench", "CartPole-v1", *arguments, "--plot", str(chart)]) == 0
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert "steps/s" in capfd.readouterr().out
