"""Frames come out whole, once and in order, however the socket cuts them."""

from __future__ import annotations

import socket

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.frames import FrameBuffer, frame, read_frames

messages = st.lists(st.binary(max_size=300), max_size=8)


@given(messages, st.lists(st.integers(1, 50), min_size=1))
def test_frames_are_the_same_however_the_bytes_arrive(data: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(map(frame, data))
    buffer = FrameBuffer()
    found: list[bytes] = []
    while stream:
        for size in sizes:
            found += buffer.feed(stream[:size])
            stream = stream[size:]
    assert found == data


def test_a_frame_is_given_out_as_soon_as_it_is_whole() -> None:
    buffer, data = FrameBuffer(), frame(b"abc")
    assert list(buffer.feed(data[:-1])) == []
    assert list(buffer.feed(data[-1:] + frame(b"d")[:2])) == [b"abc"]


def test_the_length_comes_first_in_four_little_endian_bytes() -> None:
    assert frame(b"x" * 258) == b"\x02\x01\x00\x00" + b"x" * 258


def test_reading_ends_with_the_socket_and_drops_a_cut_frame() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(frame(b"one") + frame(b"") + frame(b"two")[:-1])
        theirs.shutdown(socket.SHUT_WR)
        assert list(read_frames(ours)) == [b"one", b""]


def test_a_reset_connection_is_an_end_too() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(b"never read")
        theirs.close()
        assert list(read_frames(ours)) == []
