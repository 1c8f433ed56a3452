"""Blocks that two processes share."""

from __future__ import annotations

import os

import pytest

from shoal.engine.memory import Block, create_block, open_block
from tests import support


@pytest.mark.parametrize("kind", [{}, {"memmap": True}, {"named": True}])
def test_what_one_side_writes_the_other_reads(kind: dict[str, bool]) -> None:
    block = create_block(4096, **kind)
    other = open_block(block.handle(), os.dup(block.descriptor) if block.descriptor >= 0 else None)
    block.buffer[10:13] = b"abc"
    assert bytes(other.buffer[10:13]) == b"abc"
    assert bytes(block.buffer[:10]) == bytes(10)
    other.close()
    block.close()


@pytest.mark.parametrize("memmap", [False, True])
def test_a_block_has_no_name_and_one_descriptor(memmap: bool) -> None:
    names, count = support.shared_names(), support.descriptors()
    block = Block(4096, memmap=memmap)
    assert support.shared_names() == names
    assert len(support.descriptors()) <= len(count) + 2  # the block's own, and the duplicate that mmap keeps
    block.close()


def test_a_named_block_loses_its_name_when_it_is_closed() -> None:
    names = support.shared_names()
    block = create_block(4096, named=True)
    assert support.shared_names() != names
    block.close()
    assert support.shared_names() == names
