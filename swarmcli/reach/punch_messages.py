"""What two peers say to each other before they dial each other at once. docs/protocol.md describes the order."""

from __future__ import annotations

from typing import Annotated

import msgspec

from swarmcli.network.transports.base import Purpose

ASK = "reach.punch"  # calls: open ports for a connection with me …
GO = "reach.punch.go"  # … and dial me now

MAX_SEEN = 2  # one address for each family
MAX_NAMED = 4

AddressText = Annotated[str, msgspec.Meta(max_length=128)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Ask(msgspec.Struct, frozen=True):
    """Let us make a direct connection for this purpose. `number` is the asker's, of this attempt."""

    number: Number
    purpose: Purpose


class Ready(msgspec.Struct, frozen=True):
    """The asked end has opened ports. They are `seen` so from outside, one for each family; at those in `dependent` it
    is dialed in vain, since everyone sees another one. In its own network it listens at `near`."""

    seen: Annotated[tuple[AddressText, ...], msgspec.Meta(max_length=MAX_SEEN)]
    dependent: Annotated[tuple[AddressText, ...], msgspec.Meta(max_length=MAX_SEEN)] = ()
    near: Annotated[tuple[AddressText, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()


class Go(msgspec.Struct, frozen=True):
    """Dial me there now, from the port that you have opened: half a round trip after this I do the same. With `near`
    instead: I am in your network and listen there; dial as usual."""

    number: Number
    seen: AddressText
    near: Annotated[tuple[AddressText, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()


class Went(msgspec.Struct, frozen=True):
    """Whether the asked end has a connection now."""

    connected: bool
