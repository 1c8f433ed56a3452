"""Blocks of memory that the parent and its workers share.

On POSIX systems a block is a file without a name (a ``memfd`` on Linux, elsewhere or with ``memmap=True`` a temporary
file that is unlinked as soon as it is open), handed over by descriptor: when the last process that holds it ends, in
whatever way, the memory is gone. Windows, where descriptors do not travel, uses named shared memory.
"""

from __future__ import annotations

import itertools
import mmap
import os
import sys
import tempfile
from multiprocessing import shared_memory
from typing import Any

DESCRIPTORS = sys.platform != "win32"
"""Whether blocks are handed over by file descriptor on this system."""


_numbers = itertools.count()


class Block:
    """A block over a file descriptor.

    Args:
        size: bytes; a fresh block is zero.
        memmap: whether the memory is a file on disk rather than anonymous memory.
        descriptor: an open descriptor to map; a fresh one if None. The block owns it.
    """

    def __init__(self, size: int, *, memmap: bool = False, descriptor: int | None = None) -> None:
        self.size = size
        fresh = descriptor is None
        if descriptor is None:
            descriptor = _anonymous_file(memmap)
        self.descriptor = descriptor
        try:
            if fresh:
                os.ftruncate(descriptor, size)
            self.buffer = mmap.mmap(descriptor, size)
        except BaseException:
            self.close()
            raise

    def handle(self) -> tuple[str, int]:
        """What another process needs, besides the descriptor, to open the block."""
        return "", self.size

    def close(self) -> None:
        """Gives the descriptor back; the mapping goes with the last array over it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class NamedBlock:
    """A block that other processes open by name, for systems on which descriptors do not travel."""

    descriptor = -1

    def __init__(self, size: int, *, name: str | None = None) -> None:
        self._owner = name is None
        name = name or f"shoal-{os.getpid()}-{next(_numbers)}"
        self._memory = shared_memory.SharedMemory(name=name, create=self._owner, size=size)
        self.size = size
        self.buffer: Any = self._memory.buf

    def handle(self) -> tuple[str, int]:
        """What another process needs to open the block: its name and size."""
        return self._memory.name, self.size

    def close(self) -> None:
        """Removes the name; the memory itself goes with the last process that maps it."""
        if self._owner:
            self._owner = False
            self._memory.unlink()
        memory: Any = self._memory
        self.buffer = None
        try:
            memory.close()
        except BufferError:
            # Arrays over the mapping are still in somebody's hands: it goes with the last of them.
            memory._buf = memory._mmap = None
            memory.close()


def create_block(size: int, *, memmap: bool = False, named: bool = not DESCRIPTORS) -> Block | NamedBlock:
    """A fresh block of zeros."""
    return NamedBlock(size) if named else Block(size, memmap=memmap)


def open_block(handle: tuple[str, int], descriptor: int | None) -> Block | NamedBlock:
    """The block that another process created."""
    name, size = handle
    if name:
        return NamedBlock(size, name=name)
    return Block(size, descriptor=descriptor)


def _anonymous_file(memmap: bool) -> int:
    if not memmap and hasattr(os, "memfd_create"):
        return os.memfd_create("shoal", os.MFD_CLOEXEC)
    descriptor, path = tempfile.mkstemp(prefix=f"shoal-{os.getpid()}-")
    os.unlink(path)
    return descriptor
