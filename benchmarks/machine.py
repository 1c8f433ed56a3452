"""What the numbers were measured on, in words that name no host and no path."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import psutil

PACKAGES = ("shoal", "torch", "torchrl", "tensordict", "gymnasium", "stable_baselines3", "mujoco", "numpy")
BUSY_LOAD = 0.5
"""Load average from which on the machine cannot be called quiet."""


def describe_machine() -> list[str]:
    """Return one line for each fact that matters to the numbers."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0]
    warning = "; other work was running, so read the numbers with care" if load > BUSY_LOAD else ""
    memory = psutil.virtual_memory().total / 2**30
    return [
        f"{cores} cores, {processor_name()}, {memory:.0f} GiB of memory, {platform.system()} {platform.machine()}",
        f"Python {platform.python_version()}, " + ", ".join(f"{name} {package_version(name)}" for name in PACKAGES),
        f"load average over the minute before the start: {load:.1f}{warning}",
    ]


def processor_name() -> str:
    """Return the model of the processor, as far as the system tells."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown processor"


def package_version(name: str) -> str:
    """Return a package's version, or say that it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"
