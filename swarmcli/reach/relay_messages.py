"""Messages between clients and relays, and the record by which a relay advertises itself in the hash table.

docs/protocol.md describes the order. Each relay writes one record under its own signed subkey of `RELAYS_KEY`. The hash
table stands above this package, so what reads and writes it is handed in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

import msgspec

from swarmcli.network import wire
from swarmcli.network.identity import PeerID
from swarmcli.network.limits import MAX_ADDRESS, MAX_ADDRESSES

OFFER = "relay.offer"  # calls, by a client to a relay: what it would give …
RESERVE = "relay.reserve"  # … and to take it
CONNECT = "relay.connect"  # a stream, by whoever dials to the relay …
INCOMING = "relay.incoming"  # … and from there one to the client that is dialed

PIECE = 128 << 10  # bytes that travel in one message, at most: what others on this loop wait for
WINDOW = 256 << 10  # bytes of a circuit that wait at one place in one direction, besides one piece

RELAYS_KEY = "relays"
MAX_RECORDS = 64  # of relays that a reader is given: more of them would help nobody


class Reserve(msgspec.Struct, frozen=True):
    """Let others reach me through you, for as long as our control connection stands, until I ask again or this ends.

    `wanted` is False of a client that gives its reservation back.
    """

    wanted: bool = True


class Reserved(msgspec.Struct, frozen=True):
    """Also the answer to who gives back; then `seconds` is 0."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=86400)]


class Connect(msgspec.Struct, frozen=True):
    """Join this stream with one to `target`."""

    target: PeerID


class Incoming(msgspec.Struct, frozen=True):
    """Somebody wants to talk to you, and proves who it is; `source` is only what the relay says."""

    source: PeerID


class CircuitData(msgspec.Struct, frozen=True):
    """In front of each piece of what the two ends say to each other."""


class AskForOffer(msgspec.Struct, frozen=True):
    """Would you relay for me? Its answer takes a round trip, which tells how near the relay is."""


class RelayOffer(msgspec.Struct, frozen=True):
    room: bool  # whether a reservation would succeed now
    load: Annotated[float, msgspec.Meta(ge=0, le=1)]  # the share of the relay's budgets that is in use


class RelayRecord(msgspec.Struct, frozen=True):
    """A relay says this of itself."""

    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS)], ...],
        msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES),
    ]  # direct ones
    load: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0  # the share of its budgets that is in use

    def value(self) -> dict[str, Any]:
        """As it is stored."""
        return {"addresses": list(self.addresses), "load": self.load}


Find = Callable[[], Awaitable[Mapping[PeerID, RelayRecord]]]
# The record, and the seconds that it lasts; whether it is kept.
Publish = Callable[[RelayRecord, float], Awaitable[bool]]


def read_record(value: object) -> RelayRecord | None:
    """A stored value; None for one that is none of ours."""
    try:
        return wire.convert(RelayRecord, value)
    except msgspec.DecodeError:
        return None
