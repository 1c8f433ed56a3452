"""docs/faults.md quotes messages: they are those that the library produces."""

from __future__ import annotations

import functools
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from shoal import ParallelEnv
from tests.support import ACTS, Counter

pytestmark = pytest.mark.usefixtures("nothing_left")

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
QUOTED = dict(re.findall(r"<!-- message: (\w+) -->\n```text\n(.*?)```", PAGE.read_text(), re.DOTALL))


class Falls(Counter):
    """Fails in its first step."""

    def __init__(self, what: str = "fall") -> None:
        super().__init__()
        self.what = what

    def step(self, action: int) -> Any:
        if self.what == "fall":
            raise ValueError("the pole fell off")
        ACTS[self.what]()
        return super().step(action)


def batch(what: str, **kwargs: Any) -> Any:
    factories: list[Any] = [Counter, functools.partial(Falls, what)]
    return ParallelEnv(2, factories, **kwargs)


def matches(quoted: str, text: str) -> bool:
    """Whether a text is what the page quotes, where ``...`` stands for anything."""
    pattern = re.escape(quoted.strip()).replace(re.escape("..."), r"[^\n]+?")
    return re.fullmatch(pattern, text.strip()) is not None


def step(env: Any) -> gym.Env:
    tensordict = env.rand_action(env.reset())
    return env.step(tensordict)


def message_of(env: Any) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one, the page says
        step(env)
    return str(caught.value)


SCRIPT = """
from shoal import ParallelEnv
from tests.faults.test_docs import Counter, Falls
env = ParallelEnv(2, [Counter, Falls])
tensordict = env.rand_action(env.reset())
env.step(tensordict)
"""


def test_what_an_environment_raises(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    process = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(root)}
    )
    printed = iter(process.stderr.splitlines())
    for line in QUOTED["raise"].splitlines():  # in that order; the page leaves out the library's own lines
        assert not line.strip() or any(matches(line, each) for each in printed), f"{line!r} of\n{process.stderr}"


@pytest.mark.parametrize(
    ("name", "what", "kwargs"), [("died", "kill", {}), ("late", "hang", {"step_timeout": 0.5})], ids=["died", "late"]
)
def test_what_a_lost_worker_raises(name: str, what: str, kwargs: dict[str, Any]) -> None:
    env = batch(what, **kwargs)
    text = message_of(env)
    assert matches(QUOTED[name], text), text
    td = env.fake_tensordict()
    with pytest.raises(RuntimeError) as caught:
        env.step(td.exclude("next"))
    assert matches(QUOTED["lost"], str(caught.value))


def test_what_a_row_says_that_was_not_reset() -> None:
    env = batch("fall")
    td = env.rand_action(env.reset())
    with pytest.raises(ValueError, match="pole"):
        env.step(td.clone())
    with pytest.raises(RuntimeError) as caught:
        env.step(td)
    assert matches(QUOTED["again"], str(caught.value).splitlines()[0])
    env.close()


def test_what_the_list_of_faults_says() -> None:
    env = batch("fall", on_failure="restart")
    step(env)
    assert matches(QUOTED["faults"], repr(env.faults[0]))
    env.close()


def test_what_the_log_says(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shoal"):
        env = batch("kill", on_failure="restart")
        step(env)
    text = "\n".join(f"{record.name} {record.levelname} {record.getMessage()}" for record in caplog.records)
    assert matches(QUOTED["log"], text), text
    env.close()


def test_each_message_of_the_page_is_compared() -> None:
    assert set(QUOTED) == {"raise", "again", "died", "late", "lost", "faults", "log"}
