"""What the numbers are measured on, in words that name no host and no path."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

from shoal.engine.signals import usable_cpus

PACKAGES = ("shoal", "torch", "torchrl", "tensordict", "gymnasium", "numpy")

BUSY_SHARE = 0.25
"""Share of the usable CPUs that other work may take before the numbers call for care."""


def load_average() -> float | None:
    """Runnable processes, on average over the last minute; None where the system does not tell."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def is_busy(load: float | None, cpus: int) -> bool:
    """Whether other work takes so much that the numbers call for care."""
    return load is not None and load > BUSY_SHARE * cpus


def facts(load: float | None) -> dict[str, Any]:
    """The machine, in types that JSON knows; with the load before the measurement."""
    return {
        "cpus": os.cpu_count(),
        "usable_cpus": usable_cpus(),
        "load_average": load,
        "system": platform.system(),
        "architecture": platform.machine(),
    }


def versions() -> dict[str, str]:
    """Of Python, shoal and what it stands on."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}
