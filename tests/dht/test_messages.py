"""Messages come back as they went, and garbage is an error of one kind."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.dht import messages
from swarmcli.dht.limits import DHTLimits
from swarmcli.dht.messages import Answer, FindReply, FindRequest, Neighbour, Outcome, Question, StoreReply, StoreRequest
from swarmcli.dht.records import Record
from swarmcli.errors import ValidationError
from swarmcli.network import wire
from swarmcli.network.identity import PeerID

ids = st.binary(min_size=32, max_size=32)
addresses = st.lists(st.text(max_size=20), max_size=3).map(tuple)
numbers = st.integers(0, 2**63 - 1)
records = st.builds(
    Record, st.text(max_size=20), st.binary(), st.binary(), st.floats(allow_nan=False), numbers, st.binary(max_size=64)
)
neighbours = st.lists(st.builds(Neighbour, ids.map(PeerID), addresses), max_size=3).map(tuple)
several_records = st.lists(records, max_size=3).map(tuple)
answers = st.lists(st.builds(Answer, several_records, numbers, st.booleans()), max_size=3).map(tuple)
MESSAGES: dict[type, st.SearchStrategy[object]] = {
    messages.PingRequest: st.builds(messages.PingRequest, addresses),
    messages.PingReply: st.builds(messages.PingReply, addresses),
    FindRequest: st.builds(
        FindRequest,
        addresses,
        st.lists(st.builds(Question, ids, numbers, numbers), max_size=3).map(tuple),
        st.integers(0, 20),
        st.booleans(),
    ),
    FindReply: st.builds(FindReply, numbers, neighbours, answers),
    StoreRequest: st.builds(StoreRequest, addresses, several_records, st.integers(0, 20)),
    StoreReply: st.builds(
        StoreReply, st.lists(st.builds(Outcome, st.integers(0, 5), st.none() | records)).map(tuple), neighbours
    ),
    messages.SyncRequest: st.builds(
        messages.SyncRequest, addresses, st.lists(st.tuples(ids, st.integers(0, 2**64 - 1))).map(tuple)
    ),
    messages.SyncReply: st.builds(messages.SyncReply, st.lists(ids).map(tuple)),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_round_trip(kind: type) -> None:
    @given(MESSAGES[kind])
    def there_and_back(message: object) -> None:
        assert wire.decode(kind, wire.encode(message)) == message

    there_and_back()


@pytest.mark.parametrize("kind", MESSAGES)
def test_garbage_and_damaged_messages_have_one_kind_of_error(kind: type) -> None:
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


def test_bounds_on_what_others_say_of_peers() -> None:
    limits = DHTLimits()
    peer = PeerID(bytes(32))
    assert messages.contact_from(peer, (), limits).addresses == ()
    good = tuple("a" * limits.max_address for _ in range(limits.max_addresses))
    assert messages.contact_from(peer, good, limits).addresses == good
    for bad in ((*good, "a"), ("a" * (limits.max_address + 1),)):
        with pytest.raises(ValidationError, match="at most 8 addresses of 256 characters"):
            messages.contact_from(peer, bad, limits)
    with pytest.raises(ValidationError, match="more neighbours"):
        messages.contacts_in((Neighbour(peer, ("a",)),) * 3, 2, limits)


def test_ids_have_one_length_and_a_bound() -> None:
    messages.check_ids((bytes(32),) * 3, 3)
    with pytest.raises(ValidationError, match="at most 3 ids"):
        messages.check_ids((bytes(32),) * 4, 3)
    with pytest.raises(ValidationError, match="32 bytes"):
        messages.check_ids((bytes(31),), 3)
