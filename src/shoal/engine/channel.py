"""A pipe between the parent and one worker, for what has no fixed shape.

The hot path does not come here: commands and answers are words in shared memory. A channel carries pickled values of
any size, each with the sequence number of the command it belongs to, and descriptors of shared blocks.
"""

from __future__ import annotations

import array
import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

from shoal.engine import pickling

_HEADER = struct.Struct("<QQ")
MOST_DESCRIPTORS = 250

Patience = Callable[[socket.socket, bool], None]
"""Called while a transfer stalls, with the socket and whether we write: waits a bounded time; raises to give up."""


def wait_forever(sock: socket.socket, writing: bool) -> None:
    """Waits until the socket can go on, however long that takes."""
    wait_for(sock, writing, None)


def wait_for(sock: socket.socket, writing: bool, seconds: float | None) -> None:
    """Waits until the socket can go on, or so many seconds have passed."""
    sockets = [sock]
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLOUT if writing else select.POLLIN)
        poll.poll(None if seconds is None else seconds * 1000)
    else:
        select.select([] if writing else sockets, sockets if writing else [], [], seconds)


class UnreadableMessage(Exception):
    """A value arrived whole, but does not unpickle here."""


class Channel:
    """One end of a pipe.

    Args:
        sock: a connected stream socket; the channel owns it.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._descriptors: list[int] = []

    def send(
        self, value: Any, sequence: int = 0, descriptors: Sequence[int] = (), patience: Patience = wait_forever
    ) -> None:
        """Sends a value.

        Args:
            value: anything that cloudpickle takes.
            sequence: number of the command that it belongs to.
            descriptors: open file descriptors to hand over with it.
            patience: what to do while the other side does not read.

        Raises:
            OSError: the other side is gone.
        """
        self.send_packed(pickling.dumps(value), sequence, descriptors, patience)

    def send_packed(
        self, data: bytes, sequence: int = 0, descriptors: Sequence[int] = (), patience: Patience = wait_forever
    ) -> None:
        """Sends a value that is pickled already; see `send`."""
        header = _HEADER.pack(len(data), sequence)
        if descriptors:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            self._each(lambda: self.sock.sendmsg([header], ancillary), True, patience)
        elif len(data) < 4096:
            data = header + data
        else:
            self._write(header, patience)
        self._write(data, patience)

    def receive(self, patience: Patience = wait_forever) -> tuple[int, Any]:
        """The next value, with the sequence number of the command that it belongs to.

        Raises:
            EOFError: the other side is gone.
            UnreadableMessage: the value does not unpickle; the channel is fine.
        """
        size, sequence = _HEADER.unpack(self._read(_HEADER.size, patience))
        data = self._read(size, patience)
        try:
            return sequence, pickling.loads(data)
        except (Exception, SystemExit) as error:
            raise UnreadableMessage(f"{type(error).__name__}: {error}") from error

    def take_descriptor(self) -> int | None:
        """The next descriptor that came with a value, or None."""
        return self._descriptors.pop(0) if self._descriptors else None

    @property
    def closed(self) -> bool:
        """Whether this end is closed."""
        return self.sock.fileno() < 0

    def close(self) -> None:
        """Closes this end."""
        self.sock.close()

    def _write(self, data: bytes, patience: Patience) -> None:
        view = memoryview(data)
        while view:
            view = view[self._each(lambda view=view: self.sock.send(view), True, patience) :]  # type: ignore[misc]

    def _read(self, size: int, patience: Patience) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count: int = self._each(lambda view=view: self._receive_into(view), False, patience)  # type: ignore[misc]
            if count == 0:
                raise EOFError("the other end of the channel is closed")
            view = view[count:]
        return data

    def _receive_into(self, view: memoryview) -> int:
        if len(view) != _HEADER.size or not hasattr(socket, "SCM_RIGHTS"):
            return self.sock.recv_into(view)
        # Only headers carry descriptors, and a header is always read in one piece of its own length.
        room = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
        count, ancillary, _, _ = self.sock.recvmsg_into([view], room)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
                self._descriptors.extend(descriptors)
        return count

    def _each(self, attempt: Callable[[], int], writing: bool, patience: Patience) -> int:
        while True:
            try:
                return attempt()
            except BlockingIOError:
                pass
            except ConnectionResetError as error:
                if writing:
                    raise
                raise EOFError("the other end of the channel is closed") from error
            patience(self.sock, writing)  # outside of the handler: what it raises has nothing to do with the stall
