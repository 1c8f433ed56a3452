"""The walls between the rooms: what each may import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "shoal"


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("shoal", ("torch", "gymnasium", "numpy")),
        ("shoal.engine.pool", ("torch", "gymnasium")),
        ("shoal.engine.template", ("torch", "gymnasium")),
        ("shoal.drivers", ("torch", "gymnasium")),
        ("shoal.drivers.spaces", ("torch",)),
        ("shoal.drivers.gymnasium", ("torch",)),
    ],
)
def test_importing_a_room_loads_nothing_it_must_not_know(module: str, forbidden: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {forbidden!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_torchrls_own_batched_environments_are_used_for_registration_only() -> None:
    for path in SOURCE.rglob("*.py"):
        names = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Attribute | ast.Name)
            and ast.unparse(node.value) == "reference"
        }
        text = path.read_text()
        if "batched_envs" in text:
            assert names <= {"BatchedEnvBase", "SerialEnv", "ParallelEnv"}, path
            assert text.count("reference.") == text.count(".register(") == 1, path


def test_every_public_name_resolves() -> None:
    import shoal

    for name in shoal.__all__:
        assert getattr(shoal, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such"):
        _ = shoal.no_such
