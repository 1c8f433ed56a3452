"""The short way between TensorDicts and rows: plain TensorDicts of flat leaves that all lie in buffers.

The result of a step is made while the rows are at it: memory for its values, tensors over that, TensorDicts over these.
When they have finished, the values are copied in, those of a small batch by one copy for all leaves. Nothing of that
needs the values, and all of it would else be done while every worker waits.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from shoal.drivers.torchrl_common import BFLOAT16, as_tensor
from shoal.engine.protocol import Opcode
from shoal.engine.schema import DONE, INPUT, NEXT, ROOT
from shoal.envs.session import Session

_SMALL_BYTES = 1 << 12
"""Up to this size the leaves of a result share one piece of memory: who keeps one of them keeps all of them."""

_from_numpy = torch.from_numpy


class PlainWay:
    """What the short way knows of the rows of a session; made by `plain_way`.

    Args:
        session: the rows' session.
        batch_size: batch size of a result.
        device: device of a result, the CPU or None.
        not_root: names that a step's input and result may have and the root of the following step has not.

    Attributes:
        leaves: name and buffer of each area's leaves.
    """

    def __init__(
        self, session: Session, batch_size: torch.Size, device: torch.device | None, not_root: frozenset[str]
    ) -> None:
        self.session = session
        self._batch_size = batch_size
        self._device = device
        self._not_root = not_root
        schema, arrays = session.schemas[0], session.engine.arrays
        self.leaves: dict[str, list[tuple[str, torch.Tensor]]] = {
            area: [(key[0], as_tensor(arrays[area][key], leaf.dtype)) for key, leaf in schema.by_area[area].items()]
            for area in (INPUT, NEXT, ROOT)
        }
        self._done = [arrays[NEXT][key] for key, leaf in schema.by_area[NEXT].items() if leaf.role == DONE]
        self._next_names = {name for name, _ in self.leaves[NEXT]}
        self._input = [(name, buffer, buffer.shape, buffer.dtype) for name, buffer in self.leaves[INPUT]]

    def write_input(self, tensordict: TensorDictBase) -> bool:
        """Takes the input of a step. False, with nothing done, where the long way is needed: another batch size, masks,
        leaves set in next, a leaf that is missing, misshapen or must be converted."""
        if type(tensordict) is not TensorDict or tensordict._batch_size != self._batch_size or tensordict.is_locked:
            return False
        source = tensordict._tensordict
        if "next" in source or "_step" in source:
            return False
        for name, _, shape, dtype in self._input:
            value = source.get(name)
            if (
                type(value) is not torch.Tensor
                or value.shape != shape
                or value.dtype is not dtype
                or value.requires_grad
            ):
                return False
        for name, buffer, _, _ in self._input:
            buffer.copy_(source[name])
        return True

    def run(self, opcode: Opcode, tensordict: TensorDictBase) -> TensorDictBase:
        """Runs a step, whose input `write_input` has taken, and sets ``"next"`` in it.

        Returns:
            The root of the following step; for ``STEP`` next itself.
        """
        session, resets = self.session, opcode == Opcode.STEP_AND_MAYBE_RESET
        made: list[Any] = []
        session.run(opcode, meanwhile=partial(self._make, tensordict, resets, made))
        if made:
            session.meter.engine -= made[3]  # not the engine's, though done in its time
        else:
            self._make(tensordict, resets, made)
        following, after, values, _ = made
        self._fill(values)
        tensordict._tensordict["next"] = following
        return after

    def _make(self, tensordict: TensorDictBase, resets: bool, made: list[Any]) -> None:
        """Makes the result of a step but for its values.

        Args:
            tensordict: the step's input.
            resets: whether there is a root.
            made: gets next, the root of the following step, where their values go, and the seconds that it took.
        """
        start = time.perf_counter()
        next_leaves, root_leaves, values = self._room(resets)
        size, device = self._batch_size, self._device
        after = following = TensorDict._new_unsafe(source=next_leaves, batch_size=size, device=device, nested=False)
        if resets:
            root = self._carried(tensordict)
            root.update(root_leaves)
            after = TensorDict._new_unsafe(source=root, batch_size=size, device=device, nested=False)
        made[:] = following, after, values, time.perf_counter() - start

    def _carried(self, tensordict: TensorDictBase) -> dict[str, Any]:
        """What of a step's input goes on to the following root."""
        dropped = self._not_root
        return {
            name: value if type(value) is torch.Tensor else _apart(value)
            for name, value in tensordict._tensordict.items()
            if name not in dropped
        }

    def advance(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """What torchrl's ``step_mdp`` makes of a step's result; None where it is not one as these rows give it."""
        if type(tensordict) is not TensorDict or tensordict._batch_size != self._batch_size:
            return None
        source = tensordict._tensordict
        following = source.get("next")
        if type(following) is not TensorDict or "_step" in source or tensordict._has_names():
            return None
        given = following._tensordict
        if given.keys() != self._next_names or any(type(value) is not torch.Tensor for value in given.values()):
            return None
        root = self._carried(tensordict)
        for name, _ in self.leaves[ROOT]:
            root[name] = given[name]
        after: TensorDictBase = TensorDict._new_unsafe(
            source=root, batch_size=self._batch_size, device=tensordict.device, nested=False
        )
        return after

    def any_done(self) -> bool:
        """Whether the last step has ended an episode."""
        return any(b"\x01" in array.tobytes() for array in self._done)

    def root_after(self, tensordict: TensorDictBase, *, resets: bool) -> TensorDictBase:
        """The root that follows a step with this input (which may have reset rows), where nobody wants its next."""
        root, latest = self._carried(tensordict), dict(self.leaves[NEXT])
        for name, _ in self.leaves[ROOT]:
            root[name] = latest[name].clone()
        if resets:
            self._take_resets(root)
        after: TensorDictBase = TensorDict._new_unsafe(
            source=root, batch_size=self._batch_size, device=self._device, nested=False
        )
        return after

    def _take_resets(self, root: dict[str, torch.Tensor]) -> None:
        """Gives root leaves that hold next's values those of the rows that the last step has reset."""
        rows = self.session.engine.fresh.nonzero()[0]
        if len(rows):
            reset = torch.from_numpy(rows)
            for name, buffer in self.leaves[ROOT]:
                root[name][reset] = buffer[reset]

    def _room(self, resets: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any]:
        """The leaves of next and root, without values in them, and what `_fill` wants to know of them."""
        raise NotImplementedError

    def _fill(self, values: Any) -> None:
        """Copies the values that the rows have given to their place."""
        raise NotImplementedError


class SmallWay(PlainWay):
    """For a batch whose leaves are so small that the call is most of what a copy costs: they are copied together."""

    def __init__(self, session: Session, *args: Any) -> None:
        super().__init__(session, *args)
        engine = session.engine
        self._fresh = engine.fresh
        self._next, self._root = engine.areas[NEXT], engine.areas[ROOT]
        self._next_leaves = [(key[0], field) for key, field in self._next.fields.items()]
        self._root_leaves = [(key[0], field) for key, field in self._root.fields.items()]
        record = self._root.over(self._root.memory)
        # What a reset gives: each leaf with the flags that say which rows were reset, in the shape that goes with it.
        self._resets = [
            (field, record[field], self._fresh.reshape(-1, *[1] * (record[field].ndim - 1)))
            for field in self._root.fields.values()
        ]

    def _room(self, resets: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any]:
        memory, record = self._next.blank()
        following = {name: _from_numpy(record[field]) for name, field in self._next_leaves}
        if not resets:
            return following, {}, (memory, None, None)
        root, record = self._root.blank()
        return (
            following,
            {name: _from_numpy(record[field]) for name, field in self._root_leaves},
            (memory, root, record),
        )

    def _fill(self, values: Any) -> None:
        memory, root, record = values
        memory[:] = self._next.memory
        if root is None:
            return
        root[:] = memory[: len(root)]  # see `shoal.engine.layout`: next begins like the root
        if b"\x01" in self._fresh.tobytes():
            for field, array, mask in self._resets:
                np.copyto(record[field], array, where=mask)


class LargeWay(PlainWay):
    """For a batch whose leaves are worth a copy each."""

    def _room(self, resets: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any]:
        following = {name: torch.empty_like(buffer) for name, buffer in self.leaves[NEXT]}
        root = {name: torch.empty_like(following[name]) for name, _ in self.leaves[ROOT]} if resets else {}
        return following, root, (following, root)

    def _fill(self, values: Any) -> None:
        following, root = values
        for name, buffer in self.leaves[NEXT]:
            following[name].copy_(buffer)
        if root:
            for name, value in root.items():
                value.copy_(following[name])
            self._take_resets(root)


def _apart(value: Any) -> Any:
    """A nested TensorDict as the following root has it: what is written there must not appear in the step before."""
    return value.copy() if is_tensor_collection(value) else value


def plain_way(
    session: Session, batch_size: torch.Size, device: torch.device | None, not_root: frozenset[str]
) -> PlainWay:
    """The short way for the rows of a session, all of which have the same leaves, of flat keys, that lie in buffers."""
    areas = session.engine.areas
    odd = any(leaf.dtype == BFLOAT16 for leaf in session.schemas[0].leaves)  # numpy does not know it
    small = not odd and all(areas[area].memory.nbytes <= _SMALL_BYTES for area in (NEXT, ROOT))
    return (SmallWay if small else LargeWay)(session, batch_size, device, not_root)
