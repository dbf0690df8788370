"""Messages are decoded strictly: the right type or one kind of error, whatever the bytes."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.network import Identity, PeerID, wire
from swarmcli.network.wire.messages import BulkMessage, ControlMessage


class Letter(msgspec.Struct, frozen=True):
    sender: PeerID
    copies: tuple[PeerID, ...] = ()
    text: str = ""
    extra: Any = None


PEER = Identity.from_seed(1).peer_id


def test_peer_ids_travel_as_their_bytes() -> None:
    letter = Letter(PEER, (PEER, PEER), "ä")
    decoded = wire.decode(Letter, wire.encode(letter))
    assert decoded == letter and type(decoded.sender) is PeerID and type(decoded.copies[0]) is PeerID


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


@pytest.mark.parametrize("expected", [Letter, ControlMessage, BulkMessage])
@given(data=st.binary(max_size=200))
def test_random_bytes_are_a_message_or_a_decode_error(expected: Any, data: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        wire.decode(expected, data)
