"""Pipes for what has no fixed shape."""

from __future__ import annotations

import os
import socket
import threading

import numpy as np
import pytest

from shoal.engine.channel import Channel


@pytest.fixture
def ends() -> tuple[Channel, Channel]:
    one, two = socket.socketpair()
    return Channel(one), Channel(two)


@pytest.mark.parametrize("size", [0, 1, 16, 4095, 4096, 5_000_000])
def test_values_of_any_size_arrive_with_their_sequence_number(ends: tuple[Channel, Channel], size: int) -> None:
    value = {"data": os.urandom(size), "size": size}
    sender = threading.Thread(target=ends[0].send, args=(value, 7))
    sender.start()
    assert ends[1].receive() == (7, value)
    sender.join()


def test_values_arrive_in_order_and_whole(ends: tuple[Channel, Channel]) -> None:
    values = [np.random.default_rng(n).bytes(n * 37 % 9000) for n in range(200)]
    sender = threading.Thread(target=lambda: [ends[0].send(value, n) for n, value in enumerate(values)])
    sender.start()
    assert [ends[1].receive() for _ in values] == list(enumerate(values))
    sender.join()


def test_descriptors_come_with_their_value(ends: tuple[Channel, Channel]) -> None:
    read, write = os.pipe()
    ends[0].send("before")
    ends[0].send("with", 0, (write,))
    os.close(write)
    assert ends[1].receive() == (0, "before")
    assert ends[1].take_descriptor() is None
    assert ends[1].receive() == (0, "with")
    received = ends[1].take_descriptor()
    assert received is not None
    os.write(received, b"x")
    assert os.read(read, 1) == b"x"
    os.close(received)
    os.close(read)


def test_the_end_of_the_other_side_is_an_error_not_a_wait(ends: tuple[Channel, Channel]) -> None:
    ends[0].close()
    with pytest.raises(EOFError):
        ends[1].receive()
    with pytest.raises(BrokenPipeError):
        ends[1].send(bytes(5_000_000))


def test_patience_may_give_up(ends: tuple[Channel, Channel]) -> None:
    def give_up(sock: socket.socket, writing: bool) -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        ends[0].receive(give_up)
    with pytest.raises(TimeoutError):
        ends[0].send(bytes(5_000_000), 0, (), give_up)
