"""Messages between clients and relays. docs/protocol.md describes the order."""

from __future__ import annotations

from typing import Annotated

import msgspec

from swarmcli.network.identity import PeerID

OFFER = "relay.offer"  # calls, by a client to a relay: what it would give …
RESERVE = "relay.reserve"  # … and to take it
CONNECT = "relay.connect"  # a stream, by whoever dials to the relay …
INCOMING = "relay.incoming"  # … and from there one to the client that is dialed

PIECE = 128 << 10  # bytes that travel in one message, at most: what others on this loop wait for
WINDOW = 256 << 10  # bytes of a circuit that wait at one place in one direction, besides one piece


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
