"""``env[i]``, ``env[2:]``, ``env[[0, 2]]``, ``env[mask]``: live views that step and reset only those rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchrl.envs.common import EnvBase

from shoal.engine.protocol import Opcode
from shoal.envs.specs import batch_specs


def places_of(item: Any, count: int) -> list[int]:
    """The rows that an index picks, in its order.

    Args:
        item: an integer, a slice, a sequence or tensor of integers, or a boolean mask of length ``count``.
        count: number of rows.

    Raises:
        IndexError: an index is out of bounds, the mask has another length, or no row is picked.
    """
    if item is Ellipsis:
        return list(range(count))
    if isinstance(item, slice):
        places = list(range(count))[item]
    else:
        index = torch.as_tensor(item)
        if index.dtype == torch.bool:
            index = index.reshape(-1)
            if index.shape[0] != count:
                raise IndexError(f"the mask has {index.shape[0]} entries for {count} rows")
            places = index.nonzero().flatten().tolist()
        elif index.ndim > 1 or index.is_floating_point():
            raise IndexError(f"rows are picked by integers, slices, sequences of integers or a mask, not by {item!r}")
        else:
            places = [place + count if place < 0 else place for place in index.reshape(-1).tolist()]
    for place in places:
        if not 0 <= place < count:
            raise IndexError(f"row {place} is out of bounds for {count} rows")
    if len(set(places)) < len(places):
        raise IndexError(f"{item!r} picks a row twice: a row can take one action at a time")
    if not places:
        raise IndexError(f"{item!r} picks none of the {count} rows")
    return places


class Views:
    """Mixin: what indexing a batched environment gives."""

    def __getitem__(self, item: Any) -> Any:
        session, rows = self._started(), self.__dict__["_results"].rows  # type: ignore[attr-defined]
        places = places_of(item, len(rows))
        view: Any = type(self).__new__(type(self))
        view.__dict__.update(self.__dict__)
        picked = [rows[place] for place in places]
        specs = batch_specs([session.rows[row] for row in picked], alike=self.__dict__["_single_task"])
        device = self.__dict__["_device"]
        inputs, outputs = (spec if device is None else spec.to(device) for spec in specs)
        view.__dict__.update(
            _view_of=self.__dict__.get("_view_of") or self,
            _cache={},
            _seeds=None,
            num_workers=len(places),
            create_env_fn=[self.__dict__["create_env_fn"][place] for place in places],
            create_env_kwargs=[self.__dict__["create_env_kwargs"][place] for place in places],
            _batch_size=torch.Size([len(places), *self.batch_size[1:]]),  # type: ignore[attr-defined]
            _input_spec=inputs,
            _output_spec=outputs,
        )
        view.set_spec_lock_()
        view._make_results(session, picked)
        return view

    def __setitem__(self, item: Any, source: Any) -> None:
        session, rows = self._started(), self.__dict__["_results"].rows  # type: ignore[attr-defined]
        places = places_of(item, len(rows))
        sources = _sources(source)
        if len(sources) != len(places):
            raise ValueError(f"{len(sources)} snapshots for {len(places)} rows")
        given: dict[int, Any] = {
            rows[place]: (("__setitem__",), (slice(None), env), {}) for place, env in zip(places, sources, strict=True)
        }
        try:
            session.run(Opcode.CALL, list(given), given)
        except (TypeError, AttributeError, NotImplementedError) as error:
            raise NotImplementedError(
                f"environments like {session.rows[rows[places[0]]].text} take no snapshot: {error}"
            ) from error


def _sources(source: Any) -> list[Any]:
    own = source._envs if hasattr(type(source), "_envs") else None
    if own is not None:
        return list(own)
    sources = [source] if isinstance(source, EnvBase) else list(source) if isinstance(source, Sequence) else []
    if not sources or not all(isinstance(env, EnvBase) for env in sources):
        raise TypeError(f"a snapshot is an environment or a sequence of environments, not a {type(source).__name__}")
    return sources
