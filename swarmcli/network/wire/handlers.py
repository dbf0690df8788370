"""Who answers which method: the handlers of one endpoint, and their failures as words on the wire."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from swarmcli.errors import CallError, CallRefused, ProtocolViolation, RemoteError, SwarmError, UnknownMethod
from swarmcli.network import wire
from swarmcli.network.identity import PeerID
from swarmcli.network.limits import Limits
from swarmcli.network.wire.messages import MAX_METHOD, MAX_TEXT, FailureKind

if TYPE_CHECKING:
    from swarmcli.network.streams.stream import Stream

logger = logging.getLogger(__name__)

_ENVELOPE = 256  # bytes that a message's own header may take

UnaryHandler = Callable[[PeerID, Any], Awaitable[Any]]
StreamHandler = Callable[[PeerID, Any, "Stream"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class UnaryMethod:
    request_type: type[Any]
    handler: UnaryHandler


@dataclass(frozen=True, slots=True)
class StreamMethod:
    request_type: type[Any]
    handler: StreamHandler


class Methods:
    """The two tables. A name belongs to one handler at a time."""

    def __init__(self) -> None:
        self.unary: dict[str, UnaryMethod] = {}
        self.streams: dict[str, StreamMethod] = {}

    def serve(self, name: str, request_type: type[Any], handler: UnaryHandler) -> None:
        self._check(name)
        self.unary[name] = UnaryMethod(request_type, handler)

    def serve_stream(self, name: str, request_type: type[Any], handler: StreamHandler) -> None:
        self._check(name)
        self.streams[name] = StreamMethod(request_type, handler)

    def withdraw(self, *names: str) -> None:
        for name in names:
            self.unary.pop(name, None)
            self.streams.pop(name, None)

    def _check(self, name: str) -> None:
        if not 0 < len(name) <= MAX_METHOD:
            raise ValueError(f"a method's name has 1 to {MAX_METHOD} characters, got {name[:200]!r}")
        if name in self.unary or name in self.streams:
            raise ValueError(f"method {name!r} is served already; withdraw it first")


@dataclass(frozen=True, slots=True)
class FailureWords:
    """What a failed handler's caller is told."""

    kind: FailureKind
    code: str = ""
    text: str = ""

    @classmethod
    def of(cls, error: Exception, method: str, peer: PeerID) -> FailureWords:
        """Logs what is not a refusal."""
        if isinstance(error, CallRefused):
            return cls("refused", error.code[:MAX_TEXT], str(error)[:MAX_TEXT])
        if isinstance(error, SwarmError):  # an ordinary misfortune, such as a third peer that is gone
            logger.info("the handler of %s failed on a request from %s: %s", method, peer.short, error)
        else:
            logger.error("the handler of %s failed on a request from %s", method, peer.short, exc_info=error)
        return cls("error", "", f"{type(error).__name__}: {error}"[:MAX_TEXT])

    @classmethod
    def unknown(cls, method: str) -> FailureWords:
        return cls("unknown method", "", method)

    def error(self, peer: PeerID) -> CallError:
        """The exception that the caller sees."""
        if self.kind == "refused":
            return CallRefused(self.code, self.text)
        if self.kind == "unknown method":
            return UnknownMethod(f"{peer.short} serves no method {self.text!r}")
        return RemoteError(f"{peer.short}: {self.text or self.kind}")


def decode_body(expected: type[Any], body: msgspec.Raw, method: str) -> Any:
    """A user's message. Raises ProtocolViolation if it is not exactly of the expected type."""
    try:
        return wire.decode(expected, body)
    except msgspec.DecodeError as error:
        raise ProtocolViolation(f"unreadable message: {method}: {error}") from None


def encode_body(message: Any, limits: Limits) -> msgspec.Raw:
    """A user's message for a control connection. Raises ValueError for one that is too large, TypeError."""
    body = wire.encode(message)
    room = limits.max_message - _ENVELOPE
    if len(body) > room:
        raise ValueError(f"a message of {len(body)} bytes is too large: at most {room}; use a stream")
    return msgspec.Raw(body)
