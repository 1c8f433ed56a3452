"""The interface between the engine and one environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from shoal.engine.layout import Array
from shoal.engine.protocol import ResetInput, StepInput
from shoal.engine.schema import Key, Schema

Messages = dict[tuple[str, Key], Any]
"""Values of leaves that travel by message, by area and key."""


@dataclass
class Description:
    """What a driver tells about its environment once it is built.

    Attributes:
        family: name of the driver's module (``"gymnasium"``, ``"torchrl"``).
        schema: the leaves.
        details: what only the face of that family understands (spaces, specs).
        text: the environment as text, for ``repr``.
        chains_seed: whether ``seed`` returns what torchrl's chain of seeds gives, so that a caller may compute it.
        native: whether the driver works on arrays alone, so that no gradient can pass through it.
    """

    family: str
    schema: Schema
    details: Any
    text: str
    chains_seed: bool
    native: bool


class Driver(ABC):
    """Drives one environment, the one of its row. It never sees another row.

    Arrays given to `attach` are the row's own slices of shared memory: a driver reads its input from them and writes
    its results to them, and never hands them to the environment, which might keep them.

    An exception of the environment passes through unchanged.
    """

    env: Any
    was_reset = False
    """Whether the last `step_and_maybe_reset` has written the ``ROOT`` area; set before it resets for that."""

    @abstractmethod
    def describe(self) -> Description:
        """Describes the environment. It is neither reset nor stepped for that."""

    @abstractmethod
    def attach(self, schema: Schema, arrays: dict[str, dict[Key, Array]], *, sent: bool) -> None:
        """Says which leaves are to be buffered and where: those of ``schema`` that are fixed, at ``arrays``.

        Args:
            schema: the leaves as the caller wants them transported.
            arrays: one array of the row's shape for each buffered leaf, by area and key.
            sent: whether message leaves are sent to another process (else they are handed over as they are).
        """

    @abstractmethod
    def reset(self, given: ResetInput | None) -> Messages | None:
        """Resets; writes the ``ROOT`` area."""

    @abstractmethod
    def step(self, given: StepInput | None) -> Messages | None:
        """Steps with the ``INPUT`` area; writes the ``NEXT`` area."""

    @abstractmethod
    def step_and_maybe_reset(self, given: StepInput | None) -> Messages | None:
        """Steps, writes ``NEXT``, resets if the row is done, and then writes ``ROOT``.

        ``NEXT`` is written before the reset: an environment may reuse its observation's memory. Where the root values
        are those of ``NEXT``, `was_reset` says so, and they are not written, or sent, a second time.
        """

    @abstractmethod
    def seed(self, seed: int | None, static: bool) -> int | None:
        """Seeds the environment and returns the next seed of the chain (the same one if ``static``)."""

    @abstractmethod
    def state_dict(self) -> Any:
        """The environment's state, in a form that can be sent."""

    @abstractmethod
    def load_state_dict(self, state: Any, kwargs: dict[str, Any]) -> None:
        """Takes a state that `state_dict` gave."""

    @abstractmethod
    def set_attr(self, name: str, value: Any) -> None:
        """Sets an attribute where it is defined, through wrappers.

        Raises:
            AttributeError: it is defined nowhere.
        """

    def get_attr(self, path: tuple[str, ...]) -> Any:
        """Follows a path of attribute names from the environment on."""
        value = self.env
        for name in path:
            value = getattr(value, name)
        return value

    @abstractmethod
    def close(self) -> None:
        """Calls the environment's own close."""
