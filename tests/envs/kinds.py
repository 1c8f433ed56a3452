"""The kinds of batches that tests of the face run through: one test, each engine, each split."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from shoal import ParallelEnv, SerialEnv

KINDS: dict[str, Any] = {
    "serial": SerialEnv,
    "parallel": ParallelEnv,
    "grouped": functools.partial(ParallelEnv, processes=2),
}
kinds = pytest.mark.parametrize("kind", KINDS)
