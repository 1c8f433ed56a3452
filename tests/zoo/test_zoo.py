"""The zoo is what it says: its environments pass torchrl's own checks, are deterministic, and pickle."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchrl.envs import check_env_specs

from tests.differential.harness import Auto, Reset, Script, Seed, as_single, assert_same_traces, plain_loop
from tests.zoo.gymnasium_envs import GYM_ZOO
from tests.zoo.torchrl_envs import TORCHRL_ZOO

CASES = {
    **{f"gymnasium-{name}": case for name, case in GYM_ZOO.items() if not case.wrapper_fault},
    **{f"torchrl-{name}": case for name, case in TORCHRL_ZOO.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_specs_hold(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        env = as_single(CASES[name]())
        env.set_seed(0)
        check_env_specs(env)
        env.close()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.deterministic])
def test_a_seed_and_actions_determine_all_values(name: str) -> None:
    script: Script = [Seed(9), Reset(), *[Auto()] * 9]
    first, second = (plain_loop([pickle.loads(pickle.dumps(CASES[name]))] * 2, script) for _ in range(2))
    assert_same_traces(first, second)
    ends = [bool(entry.values["result"]["next"].get(key).any()) for entry in first.entries[2:] for key in _ends(name)]
    assert any(ends), "no episode ended in nine steps"


def _ends(name: str) -> list[str | tuple[str, ...]]:
    return list(as_single(CASES[name]()).done_keys)


def test_gymnasium_zoo_imports_no_torch() -> None:
    code = "import sys, tests.zoo.gymnasium_envs; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
