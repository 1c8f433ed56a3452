"""What the zoo says of each of its environments. Imports nothing but the standard library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ZooCase:
    """One environment of the zoo: calling the case builds it.

    A case pickles (so its factory is a module-level callable or a ``functools.partial`` of one) and needs no
    argument, so it stands wherever a batched environment takes a ``create_env_fn``.

    Args:
        factory: builds the environment.
        deterministic: two instances with the same seed and the same actions give the same values.
        dynamic: some leaf has no fixed shape.
        non_tensor: some leaf is a string or another Python object.
        wrapper_fault: why torchrl cannot even wrap it (an entry of ``README.md``), or empty.
    """

    factory: Callable[..., Any]
    deterministic: bool = True
    dynamic: bool = False
    non_tensor: bool = False
    wrapper_fault: str = ""

    def __call__(self, **kwargs: Any) -> Any:
        return self.factory(**kwargs)
