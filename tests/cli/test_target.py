"""From the TARGET of a command line to a factory."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import pytest

from shoal.cli.failures import FAILED, USAGE, CommandError
from shoal.cli.target import resolve
from tests.cli import support
from tests.support import Counter


@pytest.fixture(autouse=True)
def own_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test imports from a folder of its own and leaves nothing imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def complaint(target: str, code: int = USAGE) -> str:
    with pytest.raises(CommandError) as caught:
        resolve(target)
    assert caught.value.code == code
    return str(caught.value)


def test_a_module_and_a_factory() -> None:
    target = resolve("tests.cli.support:Counter")
    assert target.factory is Counter
    assert (target.imports, target.expression) == (("from tests.cli.support import Counter",), "Counter")


def test_dotted_attributes() -> None:
    target = resolve("tests.cli.support:Nest.make")
    assert target.factory is Counter
    assert (target.imports, target.expression) == (("from tests.cli.support import Nest",), "Nest.make")


def test_modules_of_the_current_folder_are_found(tmp_path: Path) -> None:
    (tmp_path / "cli_envs_here.py").write_text("def make(): return 1\n")
    assert resolve("cli_envs_here:make").factory() == 1


def test_a_file_is_imported_by_its_name_with_its_neighbours_so_that_workers_find_it_too(tmp_path: Path) -> None:
    folder = tmp_path / "sub"
    folder.mkdir()
    (folder / "cli_neighbour.py").write_text("answer = 42\n")
    (folder / "cli_envs_file.py").write_text("import cli_neighbour\ndef make(): return cli_neighbour.answer\n")
    target = resolve("sub/cli_envs_file.py:make")
    assert target.factory() == 42
    assert target.imports == ("from cli_envs_file import make",)
    assert str(folder) in sys.path
    assert pickle.loads(pickle.dumps(target.factory)) is target.factory


def test_a_file_whose_name_belongs_to_another_module_is_not_mixed_up_with_it(tmp_path: Path) -> None:
    (tmp_path / "pickle.py").write_text("def make(): return 1\n")
    assert "another module is called pickle" in complaint("pickle.py:make")


@pytest.mark.parametrize(
    ("text", "made"), [("CartPole-v1", "CartPole-v1"), ("CartPole", "CartPole-v1"), ("gymnasium:CartPole-v1", None)]
)
def test_ids_of_gymnasium_with_and_without_version_and_module(text: str, made: str | None) -> None:
    target = resolve(text)
    env = pickle.loads(pickle.dumps(target.factory))()
    assert isinstance(env, gym.Env)
    env.close()
    assert target.imports == ("import gymnasium as gym",)
    assert target.expression == f'lambda: gym.make("{made or text}")'


def registering(folder: Path, name: str, env_id: str) -> None:
    (folder / f"{name}.py").write_text(
        f"import gymnasium\ngymnasium.register({env_id!r}, entry_point='tests.support:Counter')\n"
    )


def test_an_id_that_a_module_registers_and_that_looks_like_an_attribute(tmp_path: Path) -> None:
    registering(tmp_path, "cli_registers", "CliCounter")
    try:
        assert isinstance(resolve("cli_registers:CliCounter").factory().unwrapped, Counter)
    finally:
        gym.registry.pop("CliCounter", None)


def test_ids_of_ale_need_no_module_before_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registering(tmp_path, "ale_py", "ALE/Pong-v5")
    monkeypatch.setitem(sys.modules, "ale_py", None)
    assert "comes with the module ale_py" in complaint("ALE/Pong-v5") if "ALE/Pong-v5" not in gym.registry else True
    monkeypatch.delitem(sys.modules, "ale_py")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        target = resolve("ALE/Pong-v5")
        assert target.expression == 'lambda: gym.make("ale_py:ALE/Pong-v5")'
    finally:
        gym.registry.pop("ALE/Pong-v5", None)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("CartPol-v1", ["the Gymnasium id CartPol-v1", "Did you mean", "PACKAGE:CartPol-v1"]),
        ("tests.cli.support", ["tests.cli.support is a module", "tests.cli.support:FACTORY"]),
        ("envs.py", ["names a file and no factory in it", "envs.py:FACTORY"]),
        ("missing.py:make", ["no file missing.py"]),
        ("no_such_module:make", ["no module named no_such_module", "MODULE:FACTORY"]),
        ("tests.cli.no_such:make", ["no module named tests.cli.no_such"]),
        (
            "tests.cli.support:absent",
            ["the attribute absent of the module tests.cli.support", "the Gymnasium id absent"],
        ),
        ("tests.cli.support:Nest.absent", ["no attribute 'absent'"]),
        ("tests.cli.support:value", ["a value of type int", "a callable that builds an environment"]),
        ("tests.cli.support:Absent-v0", ["the Gymnasium id Absent-v0"]),
        (":make", ["lacks a module"]),
        ("envs:", ["lacks a factory"]),
    ],
)
def test_what_is_not_found_says_what_was_tried_and_the_way_out(text: str, parts: list[str]) -> None:
    message = complaint(text)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(: pass", "SyntaxError: invalid syntax (cli_broken.py, line 1)"),
        ("\nimport no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing' (cli_broken.py:2)"),
        ("raise SystemExit(3)", "SystemExit: 3 (cli_broken.py:1)"),
    ],
)
def test_a_module_that_raises_is_a_failure_with_its_line(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "cli_broken.py").write_text(source)
    assert complaint("cli_broken:make", FAILED) == f"importing cli_broken raised {message}"


def test_the_factories_of_the_tests_are_what_they_seem() -> None:
    assert resolve("tests.cli.support:no_environment").factory is support.no_environment
