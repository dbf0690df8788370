"""Messages between endpoints, as types. docs/protocol.md describes their order.

The headers of frames on a control connection are `ControlMessage`s, those on a bulk connection `BulkMessage`s. The
message of a user is embedded in `body` as it is; the channel decodes it once it knows the type that the method takes.
"""

from __future__ import annotations

import logging
from typing import Annotated, Literal, TypeAlias

import msgspec

from swarmcli.errors import CallError, CallRefused, RemoteError, SwarmError, UnknownMethod
from swarmcli.network.identity import PeerID
from swarmcli.words import printable

logger = logging.getLogger(__name__)

MAX_METHOD = 128  # characters
MAX_TEXT = 1000  # characters of words for people

Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
# Bounds numbers that are added up or compared with others': far above what anybody counts or measures, and so small
# that no sum of what messages carry is infinite. NaN is refused as well.
MOST = 1e18
Amount = Annotated[float, msgspec.Meta(ge=0, le=MOST)]
Moment = Annotated[float, msgspec.Meta(ge=-MOST, le=MOST)]  # of swarm time
Method = Annotated[str, msgspec.Meta(max_length=MAX_METHOD)]
Words = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
BootID = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
# `addresses.readable` reads these, and leaves out what is no address, or one too many: a sloppy peer loses those, and
# not its connections. The bounds here are of what is decoded at all.
Addresses = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=4096)], ...], msgspec.Meta(max_length=64)]
FailureKind = Literal["unknown method", "refused", "error", "cancelled"]


class ControlHello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of either end. `boot_id` is drawn anew when an endpoint starts."""

    boot_id: BootID
    addresses: Addresses = ()


class Request(msgspec.Struct, frozen=True, tag="call"):
    id: Number  # counts up from 0 on each connection and in each direction
    method: Method
    body: msgspec.Raw  # here and below: as it came, or any message that is to be sent


class CallAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """`received` and `replied` are the answerer's raw clock, for NTP."""

    id: Number
    received: float
    replied: float
    body: msgspec.Raw


class HandlerFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A handler has failed or refused. On a bulk connection it is the stream's end, like `Done`."""

    kind: FailureKind
    code: Words = ""
    text: Words = ""


class CallFailure(msgspec.Struct, frozen=True, tag="failure"):
    """Instead of an answer. Each request gets exactly one of the two, even a cancelled one."""

    id: Number
    why: HandlerFailed


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The caller no longer wants the answer."""

    id: Number


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    number: Number  # drawn for each ping, kept when that is repeated; cannot be guessed


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Answers the ping of this number; one pong may do for several."""

    number: Number
    received: float
    replied: float


class AddressesChanged(msgspec.Struct, frozen=True, tag="addresses"):
    """Where this end can be dialed from now on, instead of what its `ControlHello` said."""

    addresses: Addresses


class BulkWanted(msgspec.Struct, frozen=True, tag="bulk wanted"):
    """Please dial me a bulk connection and name this token on it. The receiver knows by itself where: it dials only
    where it has seen the sender, and over the sender's relays."""

    token: Number


class BulkDenied(msgspec.Struct, frozen=True, tag="bulk denied"):
    """No bulk connection comes about. The reason is not told: what a dial met is nobody else's business."""

    token: Number


ControlMessage: TypeAlias = (
    ControlHello
    | Request
    | CallAnswer
    | CallFailure
    | Cancel
    | Ping
    | Pong
    | AddressesChanged
    | BulkWanted
    | BulkDenied
)


class BulkOffer(msgspec.Struct, frozen=True, tag="offer"):
    """The first message on a bulk connection that was dialed on request; the other end opens streams on it."""

    token: Number


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Begins a stream."""

    method: Method
    body: msgspec.Raw


class Piece(msgspec.Struct, frozen=True, tag="m"):
    """A message of a stream, before its payload."""

    body: msgspec.Raw


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """Nothing more comes from this end of the stream."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The handler has returned: a `Finish` after which nothing is read either."""


BulkMessage: TypeAlias = BulkOffer | Open | Piece | Finish | Done | HandlerFailed


def failed(error: Exception, method: str, peer: PeerID) -> HandlerFailed:
    """Answers the peer whose request failed here. Logs what is not a refusal."""
    if isinstance(error, CallRefused):
        return HandlerFailed("refused", error.code[:MAX_TEXT], str(error)[:MAX_TEXT])
    if isinstance(error, SwarmError):  # an ordinary misfortune, such as a third peer that is gone
        logger.info("the handler of %s failed on a request from %s: %s", method, peer.short, error)
    else:
        logger.error("the handler of %s failed on a request from %s", method, peer.short, exc_info=error)
    return HandlerFailed("error", "", f"{type(error).__name__}: {error}"[:MAX_TEXT])


def raised(failed: HandlerFailed, peer: PeerID) -> CallError:
    """The exception that the caller sees."""
    code, text = printable(failed.code, MAX_TEXT), printable(failed.text, MAX_TEXT)
    if failed.kind == "refused":
        return CallRefused(code, text)
    if failed.kind == "unknown method":
        return UnknownMethod(f"{peer.short} serves no method {text!r}")
    return RemoteError(f"{peer.short}: {text or failed.kind}")
