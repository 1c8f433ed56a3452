"""Leaving without a close: Ctrl-C in a terminal, an exception, signals to the script and to its whole group."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from tests.support import ended

pytestmark = pytest.mark.usefixtures("nothing_left")

SCRIPT = """
import time, torch
from shoal import ParallelEnv
from tests.support import Counter, SlowMethod, Trouble, children
env = ParallelEnv(3, {env}, mp_start_method={method!r}, on_failure={on_failure!r})
print("workers", *children(), flush=True)
"""
MOMENTS = {
    "before its first use": "while True: time.sleep(0.1)",
    "idle": "env.reset()\nwhile True: time.sleep(0.1)",
    "resetting": "while True: env.reset()",
    "rolling out": "while True: env.rollout(50, break_when_any_done=False)",
    "in a step that hangs": "td = env.rand_action(env.reset())\nenv.step(td)",
    "in a method": "env.reset()\nenv.call('slow', 60.0)",
    "learning": "env.reset()\nwhile True: torch.ones(200, 200) @ torch.ones(200, 200)",
}
ENVS = {"in a step that hangs": "lambda: Trouble('hang', at=1)", "in a method": "SlowMethod"}


class Terminal:
    """A script that runs in a terminal of its own."""

    def __init__(self, code: str) -> None:
        self.screen, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self.text = ""

    def read_until(self, words: str, seconds: float = 60.0) -> None:
        """Reads what the script prints until these words, or its end."""
        deadline = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < deadline, self.text
            if not select.select([self.screen], [], [], 0.2)[0]:
                continue
            try:
                self.text += os.read(self.screen, 65536).decode()
            except OSError:  # the other side is closed
                return

    def press_ctrl_c(self) -> None:
        os.write(self.screen, b"\x03")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.screen)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def code_of(moment: str, method: str = "forkserver", on_failure: str = "raise") -> str:
    env = ENVS.get(moment, "Counter")
    return SCRIPT.format(env=env, method=method, on_failure=on_failure) + MOMENTS[moment]


@pytest.mark.parametrize(
    ("method", "moment"),
    [
        *(("forkserver", moment) for moment in MOMENTS),
        # How workers start matters to who is signalled, not to what the parent does at that moment.
        *((method, "rolling out") for method in ("spawn", "fork")),
    ],
)
def test_ctrl_c_in_a_terminal_ends_everything_in_three_seconds_with_one_traceback(method: str, moment: str) -> None:
    terminal = Terminal(code_of(moment, method))
    try:
        terminal.read_until("\n")
        pids = list(map(int, terminal.text.split("workers")[1].split()))
        assert len(pids) >= 3
        start = time.monotonic()
        terminal.press_ctrl_c()
        terminal.process.wait(20)
        assert time.monotonic() - start < 3.0
        terminal.read_until("will not come")
        assert terminal.text.count("Traceback") == 1
        assert terminal.text.rstrip().endswith("KeyboardInterrupt")
        assert ended(pids)
    finally:
        terminal.close()


@pytest.mark.parametrize("whole_group", [False, True], ids=["alone", "group"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("moment", ["rolling out", "in a method"])
def test_a_signal_to_the_script_ends_its_workers(moment: str, number: int, whole_group: bool) -> None:
    """Each further moment, without the face and so without torch: tests/engine/test_ending.py."""
    process = subprocess.Popen(
        [sys.executable, "-c", code_of(moment, on_failure="restart")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    pids = list(map(int, process.stdout.readline().split()[1:]))
    assert len(pids) >= 3
    start = time.monotonic()
    (os.killpg if whole_group else os.kill)(process.pid, number)
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - start < 3.0
    assert ended(pids)
    assert process.returncode == -number
    assert err.count("Traceback") == (number == signal.SIGINT)


def test_an_exception_in_the_script_shows_one_traceback_and_ends_everything() -> None:
    code = SCRIPT.format(env="Counter", method="forkserver", on_failure="restart") + "env.reset()\n1 / 0"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert process.returncode == 1
    assert process.stderr.count("Traceback") == 1
    assert process.stderr.rstrip().endswith("ZeroDivisionError: division by zero")
    assert ended(list(map(int, process.stdout.split()[1:])))
