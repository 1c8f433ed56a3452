"""Workers end with their parent, however it ends and whatever they do at that moment."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support import ended, script

pytestmark = pytest.mark.usefixtures("nothing_left")

START = """
import time
from shoal.engine.pool import Pool, PoolOptions
from shoal.engine.protocol import Opcode
from shoal.engine.rows import Builder
from tests.support import Counter, Trouble, children
pool = Pool([Builder({env}, {{}})] * 2, PoolOptions(processes=2, start_method={method!r}))
print(*children(), flush=True)
"""
MOMENTS = {
    "not attached": "while True: time.sleep(0.1)",
    "idle": "pool.attach([d.schema for d in pool.descriptions])\nwhile True: time.sleep(0.1)",
    "busy": "pool.attach([d.schema for d in pool.descriptions])\nwhile True: pool.execute(Opcode.RESET)",
    "hanging": "pool.attach([d.schema for d in pool.descriptions])\nwhile True: pool.execute(Opcode.STEP)",
}


@pytest.mark.parametrize("whole_group", [False, True], ids=["alone", "group"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_workers_end_with_their_parent(number: int, moment: str, start_method: str, whole_group: bool) -> None:
    env = "lambda: Trouble('hang')" if moment == "hanging" else "Counter"
    process = script(START.format(env=env, method=start_method) + MOMENTS[moment])
    assert process.stdout is not None
    assert process.stderr is not None
    pids = list(map(int, process.stdout.readline().split()))
    assert len(pids) >= 2
    start = time.monotonic()
    (os.killpg if whole_group else os.kill)(process.pid, number)
    process.wait(20)
    assert time.monotonic() - start < 3.0
    assert ended(pids)
    assert process.stderr.read().count("Traceback") == (number == signal.SIGINT)
    process.stdout.close()
    process.stderr.close()
