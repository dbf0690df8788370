"""Messages come back as they went, and garbage is an error of one kind."""

from __future__ import annotations

import msgspec
import pytest

from swarmcli.dht import messages
from swarmcli.dht.messages import FindReply, FindRequest, Outcome, Question, StoreReply, StoreRequest
from swarmcli.dht.records import Record
from swarmcli.dht.routing import Contact
from swarmcli.network import wire
from swarmcli.network.identity import PeerID

PEER = PeerID(bytes(32))
BEYOND = [
    messages.PingRequest(5),  # type: ignore[arg-type]
    Question(b"short"),
    FindRequest(False, (Question(bytes(32)),) * 2),  # type: ignore[arg-type]
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
