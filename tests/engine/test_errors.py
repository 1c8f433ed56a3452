"""How an exception crosses from a worker to its parent."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from shoal.engine import pickling
from shoal.engine.errors import EnvError, Fault, WorkerTraceback, raise_faults
from tests.support import TwoArguments, Unpicklable


def cross(exception: BaseException) -> Fault:
    try:
        raise exception
    except BaseException as error:
        fault = Fault.capture(2, "step", error, remote=True)
    crossed: Fault = pickling.loads(pickling.dumps(fault))
    return crossed


@pytest.mark.parametrize(
    "exception",
    [
        ValueError("boom", 3),
        KeyError("key"),
        OSError(2, "no such thing", "name"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "why"),
        SystemExit(4),
        TwoArguments(1, 2),
    ],
    ids=lambda exception: type(exception).__name__,
)
def test_an_exception_keeps_its_type_and_text(exception: BaseException) -> None:
    with pytest.raises(type(exception)) as caught:
        raise_faults([cross(exception)])
    assert type(caught.value) is type(exception)
    assert str(caught.value) == str(exception)
    assert vars(caught.value).items() >= {"row": 2, "command": "step"}.items()
    assert isinstance(caught.value.__cause__, WorkerTraceback)
    shown = "".join(traceback.format_exception(caught.value))
    assert "row 2, command 'step'" in shown
    assert "in cross" in shown


def test_attributes_cross_where_they_can() -> None:
    rebuilt: Any = cross(TwoArguments(1, 2)).rebuild()
    assert (rebuilt.first, rebuilt.second) == (1, 2)


def test_what_cannot_be_rebuilt_becomes_an_env_error_with_its_name_and_text() -> None:
    with pytest.raises(EnvError, match=r"Unpicklable in row 2, command 'step'.*cannot be pickled") as caught:
        raise_faults([cross(Unpicklable(key=0))])
    assert (caught.value.row, caught.value.command) == (2, "step")


def test_an_exception_whose_text_raises_is_reported_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    fault = cross(Mute())
    assert fault.name == "Mute"
    assert "could not be made" in fault.message


def test_the_first_of_several_faults_is_raised_and_all_are_shown() -> None:
    faults = [cross(ValueError("first")), cross(KeyError("second"))]
    with pytest.raises(ValueError, match="first") as caught:
        raise_faults(faults)
    assert "second" in str(caught.value.__cause__)


def test_the_traceback_of_a_function_from_a_notebook_names_its_file_and_line() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def factory():\n    raise ValueError('x')", "/notebook/cell.py", "exec"), namespace)
    copy = pickling.loads(pickling.dumps(namespace["factory"]))
    with pytest.raises(ValueError, match="x") as caught:
        copy()
    assert '"/notebook/cell.py", line 2' in "".join(traceback.format_exception(caught.value))
