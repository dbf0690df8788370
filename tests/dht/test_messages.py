"""Messages come back as they went, and garbage is an error of one kind."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmcli.dht import messages
from swarmcli.dht.messages import FindAnswer, FindReply, FindRequest, Outcome, Question, StoreReply, StoreRequest
from swarmcli.dht.records import Record
from swarmcli.dht.routing import Contact
from swarmcli.network import wire
from swarmcli.network.identity import PeerID

ids = st.binary(min_size=32, max_size=32)
addresses = st.lists(st.text(max_size=20), max_size=3).map(tuple)
numbers = st.integers(0, 2**63 - 1)
records = st.builds(
    Record, st.text(max_size=20), st.binary(), st.binary(), st.floats(allow_nan=False), numbers, st.binary(max_size=64)
)
neighbours = st.lists(st.builds(Contact, ids.map(PeerID), addresses), max_size=3).map(tuple)
several_records = st.lists(records, max_size=3).map(tuple)
answers = st.lists(st.builds(FindAnswer, several_records, numbers, st.booleans()), max_size=3).map(tuple)
MESSAGES: dict[type, st.SearchStrategy[object]] = {
    messages.PingRequest: st.builds(messages.PingRequest, st.booleans()),
    messages.PingReply: st.builds(messages.PingReply, st.booleans()),
    FindRequest: st.builds(
        FindRequest,
        st.booleans(),
        st.lists(st.builds(Question, ids, numbers, numbers), max_size=3).map(tuple),
        st.integers(0, 20),
        st.booleans(),
    ),
    FindReply: st.builds(FindReply, numbers, neighbours, answers),
    StoreRequest: st.builds(StoreRequest, st.booleans(), several_records, st.integers(0, 20)),
    StoreReply: st.builds(
        StoreReply, st.lists(st.builds(Outcome, st.integers(0, 5), st.none() | records)).map(tuple), neighbours
    ),
    messages.SyncRequest: st.builds(
        messages.SyncRequest, st.booleans(), st.lists(st.tuples(ids, st.integers(0, 2**64 - 1))).map(tuple)
    ),
    messages.SyncReply: st.builds(messages.SyncReply, st.lists(ids).map(tuple)),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_garbage_and_damaged_messages_have_one_kind_of_error(kind: type) -> None:
    @settings(max_examples=12)
    @given(st.binary(max_size=60), MESSAGES[kind], st.data())
    def damage(garbage: bytes, message: object, data: st.DataObject) -> None:
        encoded = bytearray(wire.encode(message))
        position = data.draw(st.integers(0, len(encoded) - 1))
        encoded[position] ^= data.draw(st.integers(1, 255))
        for received in (garbage, bytes(encoded)):
            try:
                wire.decode(kind, received)
            except msgspec.DecodeError:
                continue

    damage()


PEER = PeerID(bytes(32))
BEYOND = [
    messages.PingRequest(5),  # type: ignore[arg-type]
    Question(b"short"),
    FindRequest(False, (Question(bytes(32)),) * 1000),
    FindReply(1, (Contact(PEER, ("a",)),) * 1000, ()),
    FindReply(1, (Contact(PEER, ("a",) * 65),), ()),
    StoreRequest(False, (Record("key", b"", b"", 0.0),) * 5000),
    StoreReply((Outcome(0),) * 5000),
    messages.SyncRequest(False, ((b"short", 1),)),
    messages.SyncReply((bytes(32),) * 5000),
]


@pytest.mark.parametrize("message", BEYOND, ids=lambda message: type(message).__name__)
def test_what_is_beyond_its_bounds_is_not_decoded(message: msgspec.Struct) -> None:
    with pytest.raises(msgspec.ValidationError):
        wire.decode(type(message), wire.encode(message))
