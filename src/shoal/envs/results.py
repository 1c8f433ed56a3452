"""Between TensorDicts and the rows' leaves: what a command reads, and what it gave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection

from shoal.drivers.torchrl_common import as_tensor, td_key
from shoal.engine.pool import Pool
from shoal.engine.protocol import StepInput
from shoal.engine.schema import ACTION, DONE, INPUT, NEXT, ROOT, Key, Leaf
from shoal.envs.plain import PlainWay, plain_way
from shoal.envs.session import Session

Values = dict[int, Any] | None


class Results:
    """Reads input from TensorDicts and makes TensorDicts of results, for some rows of a session.

    Two roads lead to a result. Where all rows have the same leaves, all of fixed shape, each leaf of the batch is one
    copy of one array (or one stack of the rows' tensors). Elsewhere (dynamic shapes, Python objects, rows that differ)
    each row's TensorDict is made on its own, and they are stacked as torchrl's ``maybe_dense_stack`` does.

    Args:
        session: the rows' session.
        rows: which of its rows, in order.
        batch_size: batch size of a result.
        device: device of a result, or None.
        nodes: batch size of each nested TensorDict of the result, by key.
        lazy: whether a result is a lazy stack in any case.
        not_root: flat keys that a step's input and result may have and the root of the following step has not.
    """

    def __init__(
        self,
        session: Session,
        rows: Sequence[int],
        batch_size: torch.Size,
        device: torch.device | None,
        nodes: dict[Key, torch.Size],
        *,
        lazy: bool,
        not_root: frozenset[str],
    ) -> None:
        self._session = session
        self.rows = list(rows)
        self._batch_size = batch_size
        self._device = device
        self._nodes = nodes
        self._lazy = lazy
        self.whole = self.rows == list(range(len(session.rows)))
        self._index = torch.tensor(self.rows)
        self._moves = device is not None and device.type != "cpu"
        first = session.rows[self.rows[0]].schema
        same = all(session.rows[row].schema == first for row in self.rows)
        fixed = all(leaf.fixed for leaf in first.leaves)
        self.dense = same and fixed and not lazy
        transported = session.schemas[self.rows[0]]
        self._leaves = {
            area: [
                (key, td_key(key), self._batch_buffer(area, key, leaf), leaf)
                for key, leaf in transported.by_area[area].items()
            ]
            for area in (INPUT, NEXT, ROOT)
        }
        self._all_buffered = all(buffer is not None for leaves in self._leaves.values() for _, _, buffer, _ in leaves)
        flat = all(len(key) == 1 for leaves in self._leaves.values() for key, *_ in leaves)
        self.plain: PlainWay | None = None
        """The short way for steps of these rows, where there is one."""
        if self.dense and self._all_buffered and flat and self.whole and not self._moves:
            self.plain = plain_way(session, batch_size, device, not_root)
        done = [leaf for leaf in first.leaves if leaf.role == DONE]
        self.whole_rows = len({leaf.key[:-1] for leaf in done}) == 1 and all(prod(leaf.shape) == 1 for leaf in done)
        """Whether a row is done as a whole, if it is."""
        self._row_buffers: dict[tuple[int, str, Key], torch.Tensor] = {}

    def _batch_buffer(self, area: str, key: Key, leaf: Leaf) -> torch.Tensor | None:
        array = self._session.engine.arrays[area].get(key)
        return None if array is None else as_tensor(array, leaf.dtype)

    def _row_buffer(self, row: int, area: str, key: Key, leaf: Leaf) -> torch.Tensor | None:
        buffer = self._row_buffers.get((row, area, key))
        if buffer is None:
            array = self._session.engine.row_arrays[row][area].get(key)
            if array is None:
                return None
            buffer = self._row_buffers[row, area, key] = as_tensor(array, leaf.dtype)
        return buffer

    # What a step reads.

    def write_input(self, tensordict: TensorDictBase, positions: Sequence[int] | None) -> dict[int, Any] | None:
        """Takes the input leaves of a step from a TensorDict of the batch.

        Args:
            tensordict: has at least the actions.
            positions: the rows that step, counted within this batch; None for all.

        Returns:
            What travels by message, by row of the session; None if nothing does.

        Raises:
            RuntimeError: an action is missing, or a leaf has another shape or dtype than its spec.
        """
        given: dict[int, StepInput] = {}
        places = list(range(len(self.rows))) if positions is None else positions
        if self.dense:
            for key, name, buffer, leaf in self._leaves[INPUT]:
                value = self._input(tensordict.get(name, None), key, leaf)
                if value is None:
                    continue
                if buffer is None:
                    chosen = value if positions is None else value[places]
                    for place, part in zip(places, chosen.unbind(0), strict=True):
                        row = self.rows[place]
                        given.setdefault(row, StepInput()).leaves[key] = self._message(part, row)
                elif self.whole and positions is None:
                    buffer.copy_(value.detach())
                else:
                    index = self._index[places]
                    buffer[index] = value.detach()[places].to(buffer.device, buffer.dtype)
        else:
            parts = tensordict.unbind(0)
            for place in places:
                self._write_row(parts[place], self.rows[place], given)
        self._carry(tensordict, places, given)
        return given or None

    def _message(self, value: Any, row: int) -> Any:
        """A value on its way to a driver: one that works on arrays gets an array, so its worker needs no torch."""
        if not isinstance(value, torch.Tensor):
            return value
        if self._session.rows[row].native:
            return value.detach().cpu().numpy()
        if isinstance(self._session.engine, Pool):
            value = value.detach().cpu()
            return value if type(value) is torch.Tensor else value.clone()  # a memory-mapped one does not travel
        return value

    def _input(self, value: Any, key: Key, leaf: Leaf) -> Any:
        expected = (*self._batch_size[:1], *leaf.shape)
        if value is None:
            if leaf.role == ACTION:
                raise RuntimeError(
                    f"the input has no {'.'.join(key)!r}: expected an action of shape {tuple(expected)} "
                    f"({len(self.rows)} rows of {tuple(leaf.shape)}, {leaf.dtype})"
                )
            return self._latest(key)
        if tuple(value.shape) != expected:
            raise RuntimeError(
                f"the input's {'.'.join(key)!r} ({leaf.role}) has shape {tuple(value.shape)}: expected "
                f"{tuple(expected)}, {len(self.rows)} rows of {tuple(leaf.shape)}"
            )
        return self._converted(value, key, leaf)

    @staticmethod
    def _converted(value: Any, key: Key, leaf: Leaf) -> Any:
        """A value of the leaf's own dtype.

        Raises:
            RuntimeError: it is of another kind (a float where an integer belongs).
        """
        dtype = getattr(torch, leaf.dtype)
        if value.dtype != dtype and not torch.can_cast(value.dtype, dtype):
            raise RuntimeError(
                f"the input's {'.'.join(key)!r} ({leaf.role}) has dtype {value.dtype}: expected {dtype}, and it does "
                "not convert without loss of kind"
            )
        return value.to(dtype)

    def _latest(self, key: Key) -> torch.Tensor | None:
        """The rows' own values of a state that the caller left out, where they have any."""
        roots = {leaf_key: buffer for leaf_key, _, buffer, _ in self._leaves[ROOT]}
        if roots.get(key) is None:
            return None
        return self._dense_latest(key)

    def _write_row(self, part: TensorDictBase, row: int, given: dict[int, StepInput]) -> None:
        schema = self._session.schemas[row]
        for key, leaf in schema.by_area[INPUT].items():
            name = td_key(key)
            value = part.get(name, None)
            if value is None:
                if leaf.role == ACTION:
                    raise RuntimeError(
                        f"the input has no {'.'.join(key)!r} for row {row} of {len(self.rows)} rows: expected an "
                        f"action of shape {tuple(leaf.shape)}, {leaf.dtype}"
                    )
                value = self._session.latest[row].get(key)
                if value is None:
                    continue
            if leaf.fixed or leaf.dtype != "object":
                value = self._converted(value, key, leaf)
            if self._session.rows[row].schema.by_area[INPUT][key].fixed and tuple(value.shape) != leaf.shape:
                raise RuntimeError(
                    f"the input's {'.'.join(key)!r} ({leaf.role}) of row {row} of {len(self.rows)} rows has shape "
                    f"{tuple(value.shape)}: expected {leaf.shape}"
                )
            buffer = self._row_buffer(row, INPUT, key, leaf)
            if buffer is None:
                given.setdefault(row, StepInput()).leaves[key] = self._message(value, row)
            else:
                buffer.copy_(value.detach())

    def _carry(self, tensordict: TensorDictBase, places: Sequence[int], given: dict[int, StepInput]) -> None:
        """Leaves that the caller has set in next go to the sub-environments whose specs know them."""
        carried = tensordict.get("next", None)
        if carried is None or carried.is_empty():
            return
        parts = carried.unbind(0)
        for place in places:
            row = self.rows[place]
            if self._session.rows[row].native:
                continue  # a Gymnasium environment takes an action and nothing else
            for key in self._session.rows[row].schema.by_area[NEXT]:
                value = parts[place].get(td_key(key), None)
                if value is not None and self._session.rows[row].schema.by_area[NEXT][key].role != DONE:
                    given.setdefault(row, StepInput()).carried[key] = value

    # What a command gave.

    def read(
        self,
        area: str,
        values: Values,
        positions: Sequence[int] | None = None,
        rest: TensorDictBase | None = None,
        following: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """The result of a command.

        Args:
            area: ``NEXT`` or ``ROOT``.
            values: what came by message, by row of the session.
            positions: the rows that took part, counted within this batch; None for all.
            rest: for the rows that took no part: TensorDict whose values stand in, zeros where it has none.
            following: for the root after a step that may have reset rows: its next, which has the values of the rows
                that were not reset.
        """
        if self.dense and following is not None:
            return self._dense_root(following, values, positions)
        if self.dense:
            source = {
                key: self._dense_leaf(area, key, buffer, leaf, values, positions, rest)
                for key, _, buffer, leaf in self._leaves[area]
            }
            return self.build(source)
        parts = rest.unbind(0) if rest is not None else [None] * len(self.rows)
        took_part = set(range(len(self.rows)) if positions is None else positions)
        return self.stack(
            self._row_result(
                row,
                area,
                values,
                parts[place] if place not in took_part else None,
                place in took_part,
                NEXT if following is not None and not self._session.engine.fresh[row] else area,
            )
            for place, row in enumerate(self.rows)
        )

    def _dense_root(self, following: TensorDictBase, values: Values, positions: Sequence[int] | None) -> TensorDictBase:
        fresh = self._session.engine.fresh
        places = range(len(self.rows)) if positions is None else positions
        reset = [place for place in places if fresh[self.rows[place]]]
        source = {}
        for key, name, buffer, leaf in self._leaves[ROOT]:
            value = following.get(name)
            if reset:
                if buffer is not None:
                    own = buffer[self._index[reset]]
                else:
                    own = torch.stack([_tensor(values[self.rows[place]][ROOT, key], leaf) for place in reset], 0)  # type: ignore[index]
                value = value.index_put((torch.tensor(reset, device=value.device),), own.to(value.device))
            else:
                value = value.clone()
            source[key] = value
        return self.build(source)

    def _dense_leaf(
        self,
        area: str,
        key: Key,
        buffer: torch.Tensor | None,
        leaf: Leaf,
        values: Values,
        positions: Sequence[int] | None,
        rest: TensorDictBase | None,
    ) -> torch.Tensor:
        if buffer is None:
            values = values or {}
            some = [_tensor(values[row][area, key], leaf) for row in self.rows if row in values]
            if positions is None:
                return torch.stack(some, 0)
            stepped = torch.stack(some, 0) if some else None
            value = torch.zeros((len(self.rows), *leaf.shape), dtype=getattr(torch, leaf.dtype))
            if stepped is not None:
                value = value.to(stepped.device).index_put((torch.tensor(positions),), stepped)
        else:
            value = buffer.clone() if self.whole else buffer[self._index]
            if positions is None:
                return value
        mask = torch.zeros(len(self.rows), dtype=torch.bool)
        mask[positions] = True
        other = None if rest is None else rest.get(td_key(key), None)
        if other is None or other.shape != value.shape:
            other = torch.zeros_like(value)
        mask = mask.reshape(-1, *[1] * (value.ndim - 1)).to(value.device)
        return torch.where(mask, value, other.to(value.device, value.dtype))

    def _row_result(
        self, row: int, area: str, values: Values, rest: TensorDictBase | None, took_part: bool, lies_in: str
    ) -> TensorDictBase:
        source: dict[Key, Any] = {}
        zeros: Any = None
        for key, leaf in self._session.schemas[row].by_area[area].items():
            value: Any = None
            if took_part:
                buffer = self._row_buffer(row, lies_in, key, leaf)
                value = buffer.clone() if buffer is not None else _own(values[row][lies_in, key], leaf)  # type: ignore[index]
            else:
                if rest is not None:
                    value = rest.get(td_key(key), None)
                if value is None:
                    zeros = zeros if zeros is not None else self._zeros(row)
                    value = zeros.get(td_key(key), None)
            source[key] = value
        return self._build_row(row, source)

    def _zeros(self, row: int) -> TensorDictBase:
        outputs = self._session.rows[row].specs["output_spec"]
        zeros = outputs["full_observation_spec"].zero()
        for name in ("full_reward_spec", "full_done_spec"):
            zeros.update(outputs[name].zero())
        return zeros

    def _build_row(self, row: int, source: dict[Key, Any]) -> TensorDictBase:
        specs = self._session.rows[row]
        result = TensorDict({}, batch_size=specs.batch_size)
        for key, value in source.items():
            for depth in range(1, len(key)):
                if td_key(key[:depth]) not in result.keys(True):
                    size = _node_size(specs.specs["output_spec"], key[:depth], specs.batch_size)
                    result.set(td_key(key[:depth]), TensorDict({}, batch_size=size))
            if value is not None:
                result.set(td_key(key), value)
        return result

    def stack(self, parts: Iterable[TensorDictBase]) -> TensorDictBase:
        """The rows' TensorDicts as one of the batch."""
        rows = list(parts)
        stack = LazyStackedTensorDict.lazy_stack if self._lazy else LazyStackedTensorDict.maybe_dense_stack
        stacked: TensorDictBase = stack(rows, 0)
        if self._device is not None:
            return stacked.to(self._device)
        return stacked

    def latest(self, rest: TensorDictBase | None, positions: Sequence[int]) -> TensorDictBase:
        """The root values of all rows: of those that were just reset (``positions``) what they were reset to, of the
        others the caller's where it has them, else their own latest."""
        reset = set(positions)
        others = [place for place in range(len(self.rows)) if place not in reset]
        if self.dense:
            source: dict[Key, torch.Tensor] = {}
            for key, name, _, _ in self._leaves[ROOT]:
                own = self._dense_latest(key)
                given = None if rest is None else rest.get(name, None)
                if given is not None and others and given.shape == own.shape:
                    mask = torch.ones(len(self.rows), dtype=torch.bool)
                    mask[others] = False
                    mask = mask.reshape(-1, *[1] * (own.ndim - 1)).to(own.device)
                    own = torch.where(mask, own, given.to(own.device, own.dtype))
                source[key] = own
            return self.build(source)
        parts = rest.unbind(0) if rest is not None else [None] * len(self.rows)
        rows = []
        for place, row in enumerate(self.rows):
            source_row: dict[Key, Any] = {}
            value: Any
            given_row: Any = None if place in reset else parts[place]
            area = NEXT if self._session.in_next[row] else ROOT
            for key, leaf in self._session.schemas[row].by_area[ROOT].items():
                value = None if given_row is None else given_row.get(td_key(key), None)
                if value is None:
                    buffer = self._row_buffer(row, area, key, leaf)
                    value = buffer.clone() if buffer is not None else _own(self._session.latest[row].get(key), leaf)
                source_row[key] = value
            rows.append(self._build_row(row, source_row))
        return self.stack(rows)

    def _dense_latest(self, key: Key) -> torch.Tensor:
        roots = {leaf_key: (buffer, leaf) for leaf_key, _, buffer, leaf in self._leaves[ROOT]}
        buffer, leaf = roots[key]
        if buffer is None:
            zero = torch.zeros(leaf.shape, dtype=getattr(torch, leaf.dtype))
            return torch.stack([_tensor(self._session.latest[row].get(key, zero), leaf) for row in self.rows], 0)
        stepped = [row for row in self.rows if self._session.in_next[row]]
        value = buffer.clone()
        if stepped:
            following = {leaf_key: b for leaf_key, _, b, _ in self._leaves[NEXT]}[key]
            assert following is not None
            value[stepped] = following[stepped]
        return value if self.whole else value[self._index]

    def advance(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The root of the following step, from a step's result, where each row has keys of its own."""
        parts = tensordict.unbind(0)
        return self.stack(self.root_of_row(part, row) for part, row in zip(parts, self.rows, strict=True))

    def root_of_row(self, part: TensorDictBase, row: int) -> TensorDictBase:
        """The root of one row's following step, from its step's result."""
        areas = self._session.rows[row].schema.by_area
        dropped = [key for key, leaf in areas[NEXT].items() if leaf.role == DONE or key not in areas[ROOT]]
        masks = [(*key[:-1], "_reset") for key, leaf in areas[NEXT].items() if leaf.role == DONE]
        root = part.exclude("next", "_step", *map(td_key, dropped), *map(td_key, masks)).copy()
        for key in areas[ROOT]:
            value = part.get(("next", *key), None)
            if value is not None:
                root.set(td_key(key), value)
        return root

    def completed(self, following: TensorDictBase, preset: TensorDictBase | None) -> TensorDictBase:
        """A step's next with the entries that the caller had set in it beforehand and the step does not give."""
        if preset is None:
            return following
        if not isinstance(following, LazyStackedTensorDict) and not isinstance(preset, LazyStackedTensorDict):
            return following.update(preset.exclude(*following.keys(True, True)))
        pairs = zip(following.unbind(0), preset.unbind(0), strict=True)
        return self.stack(part.copy().update(more.exclude(*part.keys(True, True))) for part, more in pairs)

    def merged(self, base: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        """``base`` with the entries of ``fresh``: written to it, or a new stack where rows have shapes of their own."""
        if not isinstance(base, LazyStackedTensorDict) and not isinstance(fresh, LazyStackedTensorDict):
            return base.update(fresh)
        pairs = zip(base.unbind(0), fresh.unbind(0), strict=True)
        return self.stack(part.copy().update(change) for part, change in pairs)

    def build(self, source: dict[Key, torch.Tensor]) -> TensorDictBase:
        """A TensorDict of the batch with these leaves."""
        if self._device is not None:
            source = {key: value.to(self._device) for key, value in source.items()}
        tree: dict[str, Any] = {}
        for key, value in source.items():
            node = tree
            for name in key[:-1]:
                node = node.setdefault(name, {})
            node[key[-1]] = value
        return self._build(tree, ())

    def _build(self, tree: dict[str, Any], prefix: Key) -> TensorDictBase:
        for name, value in tree.items():
            if isinstance(value, dict):
                tree[name] = self._build(value, (*prefix, name))
        size = self._nodes.get(prefix, self._batch_size) if prefix else self._batch_size
        result: TensorDictBase = TensorDict._new_unsafe(source=tree, batch_size=size, device=self._device)
        return result


def _tensor(value: Any, leaf: Leaf) -> Any:
    return as_tensor(value, leaf.dtype) if isinstance(value, np.ndarray) else value


def _own(value: Any, leaf: Leaf) -> Any:
    """A value that came by message, in memory of its own: the session keeps it too, as the row's latest."""
    value = _tensor(value, leaf)
    return value.clone() if isinstance(value, torch.Tensor) or is_tensor_collection(value) else value


def _node_size(outputs: Any, prefix: Key, default: torch.Size) -> torch.Size:
    for name in ("full_observation_spec", "full_done_spec", "full_reward_spec"):
        spec = outputs[name] if name in outputs.keys() else None
        for part in prefix:
            spec = spec[part] if spec is not None and part in spec.keys() else None
        if spec is not None:
            return torch.Size(spec.shape)
    return default
