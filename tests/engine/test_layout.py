"""Where leaves lie in a block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.layout import ALIGNMENT, Layout
from shoal.engine.schema import ACTION, AREAS, DONE, INPUT, NEXT, OBSERVATION, REWARD, ROOT, STATE, Leaf, Schema

DTYPES = ["float32", "float64", "uint8", "bool", "int64", "bfloat16"]


def leaves() -> st.SearchStrategy[Leaf]:
    return st.builds(
        Leaf,
        key=st.tuples(st.sampled_from("abcdef")),
        role=st.sampled_from([ACTION, OBSERVATION, REWARD, DONE]),
        dtype=st.sampled_from(DTYPES),
        shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
        fixed=st.booleans(),
    )


def schemas() -> st.SearchStrategy[Schema]:
    return st.lists(leaves(), max_size=6, unique_by=lambda leaf: leaf.key).map(lambda found: Schema(tuple(found)))


def test_a_leaf_lies_in_the_areas_of_its_role() -> None:
    roles = (ACTION, STATE, OBSERVATION, REWARD, DONE)
    schema = Schema(tuple(Leaf((role,), role, "float32", (1,)) for role in roles))
    assert {area: [key[0] for key in found] for area, found in schema.by_area.items()} == {
        INPUT: [ACTION, STATE],
        NEXT: [OBSERVATION, REWARD, DONE],
        ROOT: [OBSERVATION, DONE],
    }


def test_a_reward_that_is_also_a_state_goes_on_to_the_next_step() -> None:
    schema = Schema((Leaf(("r",), STATE, "float32", (1,)), Leaf(("r",), REWARD, "float32", (1,))))
    assert ("r",) in schema.by_area[ROOT]


@given(st.lists(schemas(), min_size=1, max_size=4))
def test_no_two_arrays_overlap_and_each_starts_at_a_cache_line(batch: list[Schema]) -> None:
    layout = Layout.of(batch)
    slots = [slot for found in layout.shared.values() for slot in found.values()]
    slots += [slot for areas in layout.own.values() for found in areas.values() for slot in found.values()]
    buffer = bytearray(layout.size)
    end = 0
    for slot in sorted(slots, key=lambda slot: (slot.offset, slot.array(buffer).nbytes)):
        array = slot.array(buffer)
        assert slot.offset % ALIGNMENT == 0
        assert slot.offset >= end
        end = slot.offset + array.nbytes
    assert end <= layout.size


@given(st.lists(schemas(), min_size=1, max_size=4))
def test_each_row_has_an_array_of_its_own_for_each_buffered_leaf(batch: list[Schema]) -> None:
    layout = Layout.of(batch)
    buffer = bytearray(layout.size)
    rows = [layout.row(buffer, row) for row in range(len(batch))]
    for row, schema in enumerate(batch):
        for area in AREAS:
            wanted = {leaf.key: leaf.shape for leaf in schema.buffered(area)}
            assert {key: array.shape for key, array in rows[row][area].items()} == wanted
            for array in rows[row][area].values():
                array[...] = row + 1 if array.dtype != bool else row % 2
    for row, schema in enumerate(batch):
        for area in AREAS:
            for leaf in schema.buffered(area):
                array = rows[row][area][leaf.key]
                assert np.all(array == (row + 1 if array.dtype != bool else row % 2))


def test_a_leaf_that_all_rows_share_is_one_array_of_the_batch() -> None:
    same = Leaf(("a",), OBSERVATION, "float32", (2,))
    other = [Leaf(("b",), OBSERVATION, "float32", (n,)) for n in (3, 5)]
    layout = Layout.of([Schema((same, leaf)) for leaf in other])
    buffer = bytearray(layout.size)
    layout.row(buffer, 1)[NEXT][("a",)][:] = 7
    assert layout.batch(buffer)[NEXT][("a",)].tolist() == [[0, 0], [7, 7]]
    assert set(layout.batch(buffer)[NEXT]) == {("a",)}
    assert [layout.row(buffer, row)[NEXT][("b",)].shape for row in (0, 1)] == [(3,), (5,)]


@pytest.mark.parametrize(("dtype", "storage"), [("bfloat16", "uint16"), ("float32", "float32")])
def test_bits_that_numpy_does_not_know_are_stored_as_integers(dtype: str, storage: str) -> None:
    layout = Layout.of([Schema((Leaf(("a",), OBSERVATION, dtype, (2,)),))])
    assert layout.batch(bytearray(layout.size))[NEXT][("a",)].dtype == storage


@given(schemas(), st.integers(1, 3))
def test_an_area_is_one_stretch_and_next_begins_like_the_root(schema: Schema, n_rows: int) -> None:
    layout = Layout.of([schema] * n_rows)
    buffer = bytearray(layout.size)
    arrays, areas = layout.batch(buffer), layout.areas(buffer)
    for number, array in enumerate(array for found in arrays.values() for array in found.values()):
        array.view(np.uint8)[...] = 1 + number
    for name, area in areas.items():
        memory, record = area.blank()
        memory[:] = area.memory
        assert list(area.fields) == list(arrays[name])
        for key, field in area.fields.items():
            assert record[field].dtype == arrays[name][key].dtype
            assert record[field].shape == arrays[name][key].shape
            assert record[field].tobytes() == arrays[name][key].tobytes()
            assert not np.shares_memory(record[field], arrays[name][key])
    memory, _ = areas[NEXT].blank()
    memory[:] = areas[NEXT].memory
    root = areas[ROOT].over(memory[: len(areas[ROOT].memory)])
    for key, field in areas[ROOT].fields.items():
        assert root[field].tobytes() == arrays[NEXT][key].tobytes()


def test_rows_that_differ_have_no_stretches() -> None:
    first = Schema((Leaf(("a",), OBSERVATION, "float32", (2,)),))
    second = Schema((Leaf(("a",), OBSERVATION, "float32", (3,)),))
    layout = Layout.of([first, second])
    assert layout.areas(bytearray(layout.size)) == {}
