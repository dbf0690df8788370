"""The greeting inside a fresh TLS channel, without I/O: who dials, what for, and the proof.

    dialer                              listener
      HELLO  purpose, peer id  ──────▶
             ◀──────────────────────    CHALLENGE  32 random bytes
      PROOF  signature         ──────▶
             ◀──────────────────────    WELCOME, or at any time REFUSAL with words

The dialer signs the challenge together with the id of the listener whose certificate it sees. So a recorded proof
is worthless on another connection, and one that a man in the middle asked for names the man in the middle: to the
listener it was relayed to, it proves nothing.

Every message is `magic, version, kind, length` and a body. This layout is the same in all versions, so that two
versions can name each other before they part.
"""

from __future__ import annotations

import os
import ssl
import struct
from collections.abc import Generator
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from swarmcli.errors import HandshakeError, OwnAddressError, WrongPeerError
from swarmcli.network.identity import PEER_ID_BYTES, SIGNATURE_BYTES, Identity, PeerID, verify
from swarmcli.network.transports.base import Purpose
from swarmcli.network.transports.frames import printable

PROTOCOL_VERSION = 1

_PREFIX = struct.Struct("!4sHBH")  # magic, version, kind, length of the body
_MAGIC = b"SWRM"
_MAX_BODY = 512
_CHALLENGE_BYTES = 32
_SIGNED_PURPOSE = "dial"


class Kind(IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSAL = 5


@dataclass(frozen=True, slots=True)
class Message:
    kind: int
    body: bytes
    version: int = PROTOCOL_VERSION

    def encode(self) -> bytes:
        return _PREFIX.pack(_MAGIC, self.version, self.kind, len(self.body)) + self.body


@dataclass(frozen=True, slots=True)
class Greeted:
    """The other end has proved who it is. `last_words` are still to be sent to it."""

    peer_id: PeerID
    purpose: Purpose
    last_words: bytes = b""


class Refused(HandshakeError):
    """This end says no. `rule` is a short name to count by; `last_words` are sent before the connection closes."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule
        self.last_words = Message(Kind.REFUSAL, message.encode()[:_MAX_BODY]).encode()


Greeting: TypeAlias = Generator[bytes, Message, Greeted]
"""Yields bytes to send, is sent each message that arrives, and returns the outcome or raises HandshakeError."""


def take_message(received: bytearray) -> Message | None:
    """Removes the first message from `received`; None while it is incomplete. Raises Refused for anything else."""
    if received[: len(_MAGIC)] != _MAGIC[: len(received)]:
        raise Refused("no hello", "the other end is another program: it does not greet as a swarm peer does")
    if len(received) < _PREFIX.size:
        return None
    _, version, kind, length = _PREFIX.unpack_from(received)
    if length > _MAX_BODY:
        raise Refused("oversized hello", f"a greeting of {length} bytes was announced, at most {_MAX_BODY} are allowed")
    end = _PREFIX.size + length
    if len(received) < end:
        return None
    message = Message(kind, bytes(received[_PREFIX.size : end]), version)
    del received[:end]
    return message


def greet_listener(identity: Identity, listener: PeerID, purpose: Purpose) -> Greeting:
    """The dialer's side. `listener` is whose certificate the TLS handshake proved."""
    hello = Message(Kind.HELLO, bytes([purpose]) + identity.peer_id).encode()
    challenge = _expect(Kind.CHALLENGE, (yield hello), _CHALLENGE_BYTES)
    proof = identity.sign(_SIGNED_PURPOSE, challenge, listener, bytes([purpose]))
    _expect(Kind.WELCOME, (yield Message(Kind.PROOF, proof).encode()), 0)
    return Greeted(listener, purpose)


def greet_dialer(identity: Identity) -> Greeting:
    """The listener's side."""
    hello = _expect(Kind.HELLO, (yield b""), 1 + PEER_ID_BYTES)
    if hello[0] not in tuple(Purpose):
        raise Refused("unknown purpose", f"connections for purpose {hello[0]} are not known here")
    purpose, peer_id = Purpose(hello[0]), PeerID(hello[1:])
    challenge = os.urandom(_CHALLENGE_BYTES)
    reply = yield Message(Kind.CHALLENGE, challenge).encode()
    signature = _expect(Kind.PROOF, reply, SIGNATURE_BYTES)
    if not verify(peer_id, _SIGNED_PURPOSE, signature, challenge, identity.peer_id, bytes([purpose])):
        raise Refused("false proof", "the proof does not belong to this peer id, this listener and this connection")
    return Greeted(peer_id, purpose, Message(Kind.WELCOME, b"").encode())


def check_listener(found: PeerID, expected: PeerID | None, own: PeerID) -> None:
    """Raises WrongPeerError if another peer than `expected` answered, OwnAddressError if it is this peer itself."""
    if expected is not None and found != expected:
        raise WrongPeerError(
            f"peer {found.short}… answers there, not {expected.short}…; ask for the line with which one joins now"
        )
    if found == own:
        raise OwnAddressError("this peer itself answers there")


def _expect(kind: Kind, message: Message, length: int) -> bytes:
    if message.version != PROTOCOL_VERSION:
        raise Refused(
            "another version",
            f"protocol versions differ: this end speaks {PROTOCOL_VERSION}, the other {message.version}; "
            "update the older one",
        )
    if message.kind == Kind.REFUSAL:
        raise HandshakeError(f"refused by the other end: {printable(message.body)}")
    if message.kind != kind or len(message.body) != length:
        raise Refused("malformed hello", f"expected {kind.name} of {length} bytes, got kind {message.kind}")
    return message.body


def tls_failure(error: ssl.SSLError) -> HandshakeError:
    """What a failed TLS handshake says about the other end."""
    if error.reason in ("HTTP_REQUEST", "WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_MESSAGE"):
        return Refused("no TLS", "the other end is another program: it does not speak TLS")
    return Refused("no swarm TLS", f"the other end is another program: its TLS is not a swarm peer's ({error.reason})")
