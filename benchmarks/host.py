"""The process that holds one contender: started by `hosting.py`, spoken to over one connection.

Run as `python host.py FILE_DESCRIPTOR`. It answers each command with `("done", value)` or `("failed", reason)`, and
ends with its controller.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from contenders import CONTENDERS, Contender, Task


class Host:
    """The commands, one method each."""

    contender: Contender

    def load(self, key: str, task: Task) -> None:
        """Import what the contender needs."""
        self.contender = CONTENDERS[key].make(task)

    def open(self) -> float:
        """Build the environments; return the seconds from the constructor to the end of the first reset."""
        start = time.perf_counter()
        self.contender.open()
        seconds = time.perf_counter() - start
        self.contender.prepare()
        return seconds

    def run(self, seconds: float) -> Any:
        """Step for that long."""
        return self.contender.run(seconds)

    def close(self) -> None:
        """Close the environments."""
        self.contender.close()


def reason_of(error: BaseException) -> str:
    """Say in one line what went wrong."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def serve(connection: Connection) -> None:
    """Answer commands until the other end is gone."""
    host = Host()
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = ("done", getattr(host, name)(*arguments))
        except Exception as error:
            traceback.print_exc()
            answer = ("failed", reason_of(error))
        connection.send(answer)


if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    serve(Connection(descriptor))
