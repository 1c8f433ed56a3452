"""Attributes and methods of the sub-environments, from the batch: ``env.name``, `call`, `get_attr`, `set_attr`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shoal.engine.protocol import Opcode

_NEVER_FORWARDED = frozenset({"is_closed", "parent_channels", "batch_size", "dtype"})


class RemoteAttributes:
    """Mixin: what a batched environment does with names it does not have itself."""

    def _forward(self, opcode: Opcode, given: list[Any]) -> list[Any]:
        session, rows = self._started(), self.__dict__["_results"].rows
        values = session.run(opcode, rows, dict(zip(rows, given, strict=True))) or {}
        return [values.get(row) for row in rows]

    def get_attr(self, name: str) -> list[Any]:
        """The attribute's value in each sub-environment; ``"a.b"`` follows attributes.

        Raises:
            AttributeError: a sub-environment has no such attribute.
        """
        return self._forward(Opcode.GET_ATTR, [tuple(name.split("."))] * self.num_workers)

    def set_attr(self, name: str, values: Any) -> None:
        """Sets an attribute in each sub-environment, where it is defined, through wrappers.

        Args:
            name: the attribute.
            values: one value for all, or a list or tuple of N values.

        Raises:
            AttributeError: a sub-environment has no such attribute.
            ValueError: a list or tuple of another length than N.
        """
        count = self.num_workers
        if not isinstance(values, (list, tuple)):
            values = [values] * count
        if len(values) != count:
            raise ValueError(f"set_attr({name!r}) was given {len(values)} values for {count} sub-environments")
        self._forward(Opcode.SET_ATTR, [(name, value) for value in values])

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a method of each sub-environment and gives the N results."""
        return self._forward(Opcode.CALL, [(tuple(name.split(".")), args, kwargs)] * self.num_workers)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if name.startswith("_") or name in _NEVER_FORWARDED or "_session" not in self.__dict__:
                raise
        if any(name in vars(kind) for kind in type(self).__mro__):
            # A property of the batch itself has raised: that error is the answer, not the sub-environments' namesake.
            return object.__getattribute__(self, name)
        if self.is_closed:
            raise RuntimeError(
                f"{name!r} is looked up in the sub-environments, and the environment is not started: start it first, "
                "for instance with reset()"
            )
        return RemoteValues(self, (name,))


class RemoteValues(Sequence[Any]):
    """The N values of an attribute of the sub-environments.

    Iterate it, index it, compare it, print it; call it to call the method it names (N results); follow it with further
    names. Values are fetched when they are needed.
    """

    def __init__(self, env: Any, path: tuple[str, ...]) -> None:
        self._env = env
        self._path = path
        self._values: list[Any] | None = None
        self._missing(path)

    def _missing(self, path: tuple[str, ...]) -> None:
        """Raises if no sub-environment has the name."""
        if not all(self._env._forward(Opcode.HAS_ATTR, [path] * self._env.num_workers)):
            raise AttributeError(
                f"neither {type(self._env).__name__} nor its sub-environments ({self._env._dummy_env_str}) have an "
                f"attribute {'.'.join(path)!r}"
            )

    def _fetch(self) -> list[Any]:
        if self._values is None:
            self._values = self._env.get_attr(".".join(self._path))
        return self._values

    def __getitem__(self, index: Any) -> Any:
        return self._fetch()[index]

    def __len__(self) -> int:
        return len(self._fetch())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._fetch())

    def __eq__(self, other: object) -> bool:
        return self._fetch() == (other._fetch() if isinstance(other, RemoteValues) else other)

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        args = tuple(arg for arg in args if arg is not self._env)
        results: list[Any] = self._env.call(".".join(self._path), *args, **kwargs)
        return results

    def __getattr__(self, name: str) -> RemoteValues:
        if name.startswith("_"):
            raise AttributeError(name)
        return RemoteValues(self._env, (*self._path, name))

    def __repr__(self) -> str:
        try:
            return repr(self._fetch())
        except Exception as error:
            return f"<{'.'.join(self._path)} of {self._env.num_workers} sub-environments: {error}>"
