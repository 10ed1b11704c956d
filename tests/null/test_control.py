"""Messages over sockets: whole however they travel, and nobody is blocked by a peer that does not read."""

from __future__ import annotations

import socket
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefold.control import PING, STEP, Channel, Message, NodeHello, RankHello, decode, encode


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), Channel(theirs)


@given(
    bodies=st.lists(st.binary(max_size=300), min_size=1, max_size=8),
    cuts=st.lists(st.integers(1, 60), min_size=1, max_size=20),
)
def test_messages_arrive_whole_in_whatever_pieces(bodies: list[bytes], cuts: list[int]):
    ours, theirs = socket.socketpair()
    sender, raw = Channel(ours), theirs
    for body in bodies:
        sender.send(STEP, body)
    stream = raw.recv(1 << 20)
    ours, theirs = socket.socketpair()
    receiver, got = Channel(theirs), []
    while stream:
        for cut in cuts:
            ours.send(stream[:cut])
            stream = stream[cut:]
            got += receiver.receive()
            if not stream:
                break
    assert got == [Message(STEP, body) for body in bodies]
    for sock in (sender, raw, ours, receiver):
        sock.close()


def test_a_peer_that_does_not_read_blocks_nobody(pair: tuple[Channel, Channel]):
    ours, theirs = pair
    bodies = [bytes([i]) * (3 << 20) for i in range(3)]
    for body in bodies:
        ours.send(STEP, body)
    assert ours.has_unsent
    got: list[Message] = []
    while len(got) < 3:
        got += theirs.receive()
        ours.flush()
    assert [message.body for message in got] == bodies
    assert not ours.has_unsent


def test_a_short_message_takes_little_memory(pair: tuple[Channel, Channel]):
    """Also for a moment: memory for more, given back again, leaves holes in the heap."""
    ours, theirs = pair
    body = bytes(1000)
    ours.send(STEP, body)
    tracemalloc.start()
    try:
        assert theirs.receive() == [Message(STEP, body)]
        assert tracemalloc.get_traced_memory()[1] < 10 * len(body)
    finally:
        tracemalloc.stop()


def test_a_closed_connection_shows_after_its_last_message(pair: tuple[Channel, Channel]):
    ours, theirs = pair
    ours.send(PING)
    ours.close()
    assert theirs.receive() == [Message(PING, b"")]
    for _ in range(2):
        with pytest.raises(EOFError):
            theirs.receive()
    with pytest.raises(BrokenPipeError):
        theirs.send(PING)


@pytest.mark.parametrize("stream", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\0", (101).to_bytes(4, "big")])
def test_what_is_no_message_of_ours_is_refused(stream: bytes):
    ours, theirs = socket.socketpair()
    channel = Channel(theirs, limit=100)
    ours.send(stream)
    with pytest.raises(EOFError, match="no connection of ours"):
        channel.receive()
    ours.close()
    channel.close()


@pytest.mark.parametrize("body", [b"", b"\xff", encode({"token": 1, "rank": 0}), encode([1, 2])])
def test_a_body_is_checked(body: bytes):
    with pytest.raises(ValueError, match="RankHello"):
        decode(body, RankHello)
    with pytest.raises(ValueError, match="NodeHello"):
        decode(body, NodeHello)
