"""Messages between clients and relays, and the record by which a relay advertises itself in the hash table.

docs/protocol.md describes the order. Each relay writes one record under its own signed subkey of `RELAYS_KEY`. The hash
table stands above this package, so functions that read and write it are handed in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

import msgspec

from swarmcli.network import wire
from swarmcli.network.bounds import MAX_ADDRESS, MAX_ADDRESSES
from swarmcli.network.identity import PeerID
from swarmcli.network.transports.tcp.handshake import TOKEN_BYTES

OFFER = "relay.room"  # calls, by a client to a relay: what it would give …
RESERVE = "relay.reserve"  # … and to take it
JOIN = "relay.join"  # a call by whoever dials, to the relay …
COME = "relay.come"  # … and from there one to the client that is dialed
OLD_CONNECT = "relay.connect"  # a stream: peers before PROTOCOL 27 are told which version they need

RELAYS_KEY = "relays"
MAX_RECORDS = 64  # of relays that a reader gets: more would not help


Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class Reserve(msgspec.Struct, frozen=True):
    """Let others reach me through you, while our control connection stands and for the seconds that you grant.

    `wanted` is False of a client that gives its reservation back.
    """

    wanted: bool = True


class Reserved(msgspec.Struct, frozen=True):
    """Also the answer to a client that gives its reservation back; `seconds` is 0 then."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=86400)]


class JoinRequest(msgspec.Struct, frozen=True):
    """Join me with `target`."""

    target: PeerID


class Joining(msgspec.Struct, frozen=True):
    """The target is coming. Dial me, and say this token."""

    token: Token


class Come(msgspec.Struct, frozen=True):
    """Somebody wants to talk to you: dial me, and say this token. `source` is only what the relay says."""

    source: PeerID
    token: Token


class Coming(msgspec.Struct, frozen=True):
    """Yes: I dial you now."""


class OldConnect(msgspec.Struct, frozen=True):
    target: PeerID


class AskForOffer(msgspec.Struct, frozen=True):
    """Would you relay for me?"""


class RelayOffer(msgspec.Struct, frozen=True):
    room: bool  # whether a reservation would succeed now, and a circuit


class RelayRecord(msgspec.Struct, frozen=True):
    """A relay says this of itself."""

    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS)], ...],
        msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES),
    ]  # direct ones

    def value(self) -> dict[str, Any]:
        """As it is stored."""
        return {"addresses": list(self.addresses)}


Find = Callable[[], Awaitable[Mapping[PeerID, RelayRecord]]]
# Takes the record and the seconds that it lasts; returns whether anybody keeps it.
Publish = Callable[[RelayRecord, float], Awaitable[bool]]


def read_record(value: object) -> RelayRecord | None:
    """A stored value; None for one that is none of ours."""
    try:
        return wire.convert(RelayRecord, value)
    except msgspec.DecodeError:
        return None
