"""The command line as a whole: output, error stream, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import __version__
from shoal.cli import main

SHORT = ["--seconds", "0.005", "--rounds", "1", "--rows", "2", "--processes", "1"]

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])


def usage_error(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
    return capfd.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["--version"], []])
def test_help_and_version_load_neither_torch_nor_gymnasium_nor_numpy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom shoal.cli import main\n"
        f"try:\n    print('code', main({arguments!r}))\nexcept SystemExit as end:\n    print('code', end.code)\n"
        "print([name for name in ('torch', 'gymnasium', 'numpy', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.stdout.splitlines()[-2] == ("code 0" if arguments else "code 2")
    assert __version__ in done.stdout or "usage: shoal" in done.stdout + done.stderr


def test_a_table_a_sentence_and_code_go_to_the_output_and_progress_to_the_error_stream(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "tests.cli.support:Counter", *SHORT]) == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("tests.cli.support:Counter on ")
    assert lines[2].split()[0] == "rows"
    assert any(line.startswith("2 rows ") and "steps/s, " in line for line in lines)
    assert "    from tests.cli.support import Counter" in lines
    assert lines[-1].startswith("    env = ")
    assert [line.split()[0] for line in err.splitlines()] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]


def test_quiet_shows_no_progress(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tests.cli.support:Counter", *SHORT, "--quiet"]) == 0
    assert capfd.readouterr().err == ""


def test_the_recommended_code_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "CartPole-v1", *SHORT, "--json"]) == 0
    scope: dict[str, object] = {}
    exec(
        json.loads(capfd.readouterr().out)["recommendation"]["code"] + "\nsize = env.batch_size[0]\nenv.close()", scope
    )
    assert scope["size"] == 2


NOISY = """
import gymnasium
print("import")
class Noisy(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1)
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self):
        print("build", flush=True)
    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}
    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}
"""


def test_a_program_with_several_rounds_prints_one_json_document_whatever_environments_print(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    command = [sys.executable, "-m", "shoal", "bench", "noisy.py:Noisy", *SHORT, "--rounds", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [len(each["steps_per_second_of_rounds"]) for each in document["batches"]] == [2, 2, 2]
    assert "build" in done.stderr


def test_ctrl_c_ends_with_130_one_message_and_no_process_left(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "shoal",
        "bench",
        "CartPole-v1",
        "--seconds",
        "60",
        "--rows",
        "2",
        "--processes",
        "1",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=tmp_path)
    assert process.stderr is not None
    try:
        with pytest.raises(subprocess.TimeoutExpired):  # the plain loop alone is measured for a minute
            process.wait(3.0)
        os.killpg(process.pid, signal.SIGINT)
        err = process.communicate(timeout=30)[1]
    finally:
        process.kill()
    assert process.returncode in (130, -signal.SIGINT)
    assert err.splitlines()[-1] == "shoal bench: interrupted; all workers have ended"
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--rows", "8,0"], "'0' is not a whole number of at least 1"),
        (["x", "--rows", ""], "'' is not a whole number"),
        (["x", "--processes", "two"], "'two' is not a whole number"),
        (["x", "--rounds", "0"], "'0' is not a whole number"),
        (["x", "--seconds", "0"], "'0' is not a number of seconds above 0"),
        (["x", "--seconds", "nan"], "'nan' is not a number of seconds above 0"),
        ([], "TARGET"),
    ],
)
def test_wrong_arguments_are_usage_errors_that_show_them(
    capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in usage_error(capfd, *arguments)


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ("no_such_module:make", 2, "no module named no_such_module"),
        ("tests.cli.support:build_raises", 1, "the factory raised ValueError: boom"),
        ("tests.cli.support:step_raises", 1, "the environment raised ValueError: boom"),
    ],
)
def test_what_fails_is_one_message_and_an_exit_code(
    capfd: pytest.CaptureFixture[str], target: str, code: int, message: str
) -> None:
    assert main(["bench", target, *SHORT, "--quiet"]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"shoal bench: {message}")
    assert len(err.splitlines()) == 1


def test_the_traceback_is_there_for_the_asking(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tests.cli.support:step_raises", *SHORT, "--quiet", "--traceback"]) == 1
    err = capfd.readouterr().err
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("shoal bench: the environment raised")


def test_a_ctrl_c_that_became_another_exception_is_still_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tests.cli.support:swallows_ctrl_c", *SHORT]) == 130
    assert capfd.readouterr().err == "shoal bench: interrupted; all workers have ended\n"


def test_a_chart_that_cannot_be_written_is_refused_before_anything_is_measured(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "tests.cli.support:Counter", *SHORT, "--plot", "no/such/chart.png"]) == 2
    out, err = capfd.readouterr()
    assert (out, err) == ("", "shoal bench: --plot no/such/chart.png: there is no folder no/such\n")


def test_where_no_batch_can_be_measured_the_table_says_why_and_the_command_fails(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no seat")

    monkeypatch.setattr("shoal.SerialEnv", fail, raising=False)
    monkeypatch.setattr("shoal.ParallelEnv", fail, raising=False)
    assert main(["bench", "tests.cli.support:Counter", *SHORT, "--quiet"]) == 1
    out, err = capfd.readouterr()
    assert out.count("RuntimeError: no seat") == 3
    assert err.startswith("shoal bench: no batch could be measured: RuntimeError: no seat")
    assert main(["bench", "tests.cli.support:Counter", *SHORT, "--quiet", "--traceback"]) == 1
    assert capfd.readouterr().err.count("Traceback (most recent call last)") == 3
