"""Frames are cut from any chunking of the stream, within bounds, and messages in them are decoded strictly."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.network import Identity, PeerID, wire
from swarmcli.network.bounds import NetworkLimits
from swarmcli.network.transports.frames import FrameReader, PeerSaidGoodbye, frame_start, goodbye_frame

LIMITS = NetworkLimits(max_message=50, max_payload=200)


class Collector:
    def __init__(self) -> None:
        self.frames: list[tuple[bytes, bytes]] = []
        self.memory: list[bytearray] = []

    def payload_buffer(self, header: bytes, size: int) -> memoryview:
        self.memory.append(bytearray(size))
        return memoryview(self.memory[-1])

    def frame_received(self, header: bytes, payload: memoryview) -> None:
        self.frames.append((header, bytes(payload)))

    def connection_lost(self, error: Exception) -> None: ...


def read(reader: FrameReader, collector: Collector, stream: bytes, chunks: list[int]) -> None:
    """What the connection does: chunks go to where the reader wants them."""
    position = 0
    for chunk in [*chunks, len(stream)]:
        end = min(position + chunk, len(stream))
        while position < end:
            if reader.rest:
                count = min(len(reader.rest), end - position)
                reader.rest[:count] = stream[position : position + count]
                reader.filled(count)
            else:
                count = min(16, end - position)
                reader.feed(memoryview(stream)[position : position + count])
            position += count
            while reader.deliver_next(collector):
                pass


@given(
    st.lists(st.tuples(st.binary(max_size=50), st.binary(max_size=200)), max_size=6),
    st.lists(st.integers(1, 90), max_size=30),
)
def test_any_chunking_gives_the_same_frames(frames: list[tuple[bytes, bytes]], chunks: list[int]) -> None:
    stream = b"".join(frame_start(header, len(payload), LIMITS) + payload for header, payload in frames)
    reader, collector = FrameReader(LIMITS), Collector()
    read(reader, collector, stream, chunks)
    assert collector.frames == frames
    assert len(collector.memory) == sum(bool(payload) for _, payload in frames)
    assert not reader.in_frame and not reader.in_payload


def test_a_goodbye_comes_whole_and_bounded() -> None:
    reader, collector = FrameReader(LIMITS), Collector()
    goodbye = goodbye_frame("ö\x1b[2J" + "ö" * 600)
    assert len(goodbye) < 530
    reader.feed(memoryview(goodbye[:-1]))
    assert not reader.deliver_next(collector)
    reader.feed(memoryview(goodbye[-1:]))
    with pytest.raises(PeerSaidGoodbye, match="closed by peer: ö") as said:
        reader.deliver_next(collector)
    assert str(said.value).isprintable() and len(str(said.value)) < 300


class Letter(msgspec.Struct, frozen=True):
    sender: PeerID
    copies: tuple[PeerID, ...] = ()
    text: str = ""
    extra: Any = None


PEER = Identity.from_seed(1).peer_id


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x81\xa6sender\xc4\x04abcd",  # an id of four bytes
        b"\x81\xa6sender\x05",
        wire.encode({"sender": bytes(PEER), "copies": 3}),
        wire.encode({"text": "no sender"}),
        wire.encode(Letter(PEER)) + b"\x00",
        b"\x82\xa6sender\xc4\x20" + bytes(32) + b"\xa4text\xa2\xff\xff",  # no UTF-8
        b"\x82\xa6sender\xc4\x20" + bytes(32) + b"\xa5extra" + b"\x91" * 100_000 + b"\xc0",  # very deep
        b"\x82\xa6sender\xc4\x20" + bytes(32) + b"\xa7unknown" + b"\x91" * 100_000 + b"\xc0",
    ],
)
def test_anything_else_is_a_decode_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode(Letter, data)
