"""How two peers prove to each other who they are: in TLS, and by a greeting inside the fresh TLS channel.

The listener proves itself in TLS 1.3, by a certificate that it signed itself. Nobody signs the certificates of others
here, so chains are not verified (`CERT_NONE`). That is safe because the chain is not what proves an identity: the
listener signs the transcript of the handshake with the key in its certificate, OpenSSL refuses a wrong signature in
every mode, and the dialer compares the key with the peer id. The dialer proves itself by the greeting, which is without
I/O:

    dialer                              listener
      HELLO  purpose, peer id  ──────▶
             ◀──────────────────────    CHALLENGE  32 random bytes
      PROOF  signature, pass   ──────▶
             ◀──────────────────────    WELCOME  pass, the dialer's address as seen here; or at any time REFUSAL

In an open run the passes are empty. In a closed one (`network.membership`) the listener refuses a dialer without a good
pass before it has told more of itself than its certificate; the dialer refuses such a listener before any call.

The dialer signs the challenge together with the id of the listener whose certificate it sees. So a recorded proof is
worthless on another connection, and a proof given to a man in the middle names the man in the middle: passed on to the
real listener, it proves nothing.

Every message is `magic, version, kind, length` and a body. This layout is the same in all versions, so that two
versions can name each other before they part.
"""

from __future__ import annotations

import os
import ssl
import struct
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from pathlib import Path
from typing import TypeAlias

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from swarmcli.errors import AddressError, HandshakeError, NotAMember, OwnAddressError, WrongPeerError
from swarmcli.network.addresses import parse_address, scope_of
from swarmcli.network.identity import PEER_ID_BYTES, SIGNATURE_BYTES, Identity, PeerID, verify
from swarmcli.network.membership import MAX_PROOF, Membership
from swarmcli.network.transports.base import Purpose
from swarmcli.words import printable

PROTOCOL_VERSION = 6
ALPN = "swarm"  # tells this protocol from other programs that speak TLS; the greeting carries the version

_PREFIX = struct.Struct("!4sHBH")  # magic, version, kind, length of the body
MAGIC = b"SWRM"
MAX_BODY = 1024
_CHALLENGE_BYTES = 32
TOKEN_BYTES = 16
_SIGNED_PURPOSE = "dial"
_WELCOME = struct.Struct("!HB")  # lengths of the listener's pass, and of the binding of the dialer's invitation
_MAX_ADDRESS = 512


class GreetingKind(IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSAL = 5
    NO_MEMBER = 6  # a refusal as well: the run is closed
    JOIN = 7  # without TLS, at a relay: a token that it gave …
    JOINED = 8  # … and its answer, after which the bytes of the circuit's other end follow


@dataclass(frozen=True, slots=True)
class Message:
    kind: int
    body: bytes
    version: int = PROTOCOL_VERSION

    def encode(self) -> bytes:
        return _PREFIX.pack(MAGIC, self.version, self.kind, len(self.body)) + self.body


@dataclass(frozen=True, slots=True)
class Greeted:
    """The other end has proved who it is. `last_words`: bytes that must still be sent to it."""

    peer_id: PeerID
    purpose: Purpose
    last_words: bytes = b""
    observed_address: str | None = None  # at the dialer: where the listener sees it


class Refused(HandshakeError):
    """This end says no. `rule` is a short name to count by; `last_words` are sent before the connection closes."""

    def __init__(self, rule: str, message: str, kind: GreetingKind = GreetingKind.REFUSAL) -> None:
        super().__init__(message)
        self.rule = rule
        self.last_words = Message(kind, message.encode()[:MAX_BODY]).encode()


Greeting: TypeAlias = Generator[bytes, Message, Greeted]
"""Yields bytes to send, is sent each message that arrives, and returns the outcome or raises HandshakeError."""


def take_message(received: bytearray) -> Message | None:
    """Removes the first message from `received`; None while it is incomplete. Raises Refused for anything else."""
    if received[: len(MAGIC)] != MAGIC[: len(received)]:
        raise Refused("no hello", "the other end is another program: it does not greet as a swarm peer does")
    if len(received) < _PREFIX.size:
        return None
    _, version, kind, length = _PREFIX.unpack_from(received)
    if length > MAX_BODY:
        raise Refused("oversized hello", f"a greeting of {length} bytes was announced, at most {MAX_BODY} are allowed")
    end = _PREFIX.size + length
    if len(received) < end:
        return None
    message = Message(kind, bytes(received[_PREFIX.size : end]), version)
    del received[:end]
    return message


def bytes_missing(received: bytearray) -> int:
    """How many more bytes the message that has begun needs at least."""
    if len(received) < _PREFIX.size:
        return _PREFIX.size - len(received)
    return _PREFIX.size + int(_PREFIX.unpack_from(received)[3]) - len(received)


def greet_listener(
    identity: Identity, listener: PeerID, purpose: Purpose, membership: Membership | None = None
) -> Greeting:
    """The dialer's side. `listener`: the peer whose certificate the TLS handshake proved. `membership`: of a closed
    run."""
    hello = Message(GreetingKind.HELLO, bytes([purpose]) + identity.peer_id).encode()
    challenge = expect(GreetingKind.CHALLENGE, (yield hello), _CHALLENGE_BYTES)
    shown = membership.proof(listener) if membership is not None else b""
    proof = identity.sign(_SIGNED_PURPOSE, challenge, listener, bytes([purpose]), shown)
    welcome = expect(GreetingKind.WELCOME, (yield Message(GreetingKind.PROOF, proof + shown).encode()))
    theirs, binding, seen = _read_welcome(welcome)
    if membership is not None:  # if it fails, nothing is sent: for the listener the greeting is over
        membership.welcomed(listener, theirs, binding)
    return Greeted(listener, purpose, observed_address=_observed(seen))


def greet_dialer(identity: Identity, dialer: str, membership: Membership | None = None) -> Greeting:
    """The listener's side. `dialer` is the address from which the other end has come."""
    hello = expect(GreetingKind.HELLO, (yield b""), 1 + PEER_ID_BYTES)
    if hello[0] not in tuple(Purpose):
        raise Refused("unknown purpose", f"connections for purpose {hello[0]} are not known here")
    purpose, peer_id = Purpose(hello[0]), PeerID(hello[1:])
    challenge = os.urandom(_CHALLENGE_BYTES)
    proof = expect(GreetingKind.PROOF, (yield Message(GreetingKind.CHALLENGE, challenge).encode()))
    signature, shown = proof[:SIGNATURE_BYTES], proof[SIGNATURE_BYTES:]
    if len(signature) < SIGNATURE_BYTES or len(shown) > MAX_PROOF:
        raise Refused("malformed hello", f"a proof has {SIGNATURE_BYTES} bytes, and {MAX_PROOF} more at most")
    if not verify(peer_id, _SIGNED_PURPOSE, signature, challenge, identity.peer_id, bytes([purpose]), shown):
        raise Refused("false proof", "the proof does not belong to this peer id, this listener and this connection")
    own, binding = b"", b""
    if membership is not None:
        try:
            binding = membership.check(peer_id, shown)
        except NotAMember as error:
            raise Refused("no member", str(error), GreetingKind.NO_MEMBER) from None
        own = membership.proof(peer_id)
    seen = dialer.encode()[:_MAX_ADDRESS]
    welcome = _WELCOME.pack(len(own), len(binding)) + own + binding + seen
    return Greeted(peer_id, purpose, Message(GreetingKind.WELCOME, welcome).encode())


def _read_welcome(body: bytes) -> tuple[bytes, bytes, bytes]:
    """The listener's pass, the binding of this peer's invitation, and where the listener sees this peer."""
    if len(body) < _WELCOME.size:
        raise Refused("malformed hello", "a WELCOME without its lengths")
    pass_bytes, binding_bytes = _WELCOME.unpack_from(body)
    end = _WELCOME.size + pass_bytes
    if end + binding_bytes > len(body):
        raise Refused("malformed hello", "a WELCOME that ends before what it announces")
    return body[_WELCOME.size : end], body[end : end + binding_bytes], body[end + binding_bytes :]


def check_listener(found: PeerID, expected: PeerID | None, own: PeerID) -> None:
    """Raises WrongPeerError if another peer than `expected` answered, OwnAddressError if it is this peer itself."""
    if expected is not None and found != expected:
        raise WrongPeerError(f"peer {found.short}… answers there, not {expected.short}…; ask for a new link")
    if found == own:
        raise OwnAddressError("this peer itself answers there")


def at(address: str, error: Exception) -> HandshakeError:
    """The same failure for a dialer, with the address that was dialed."""
    kind = type(error) if isinstance(error, WrongPeerError | OwnAddressError | NotAMember) else HandshakeError
    return kind(f"{address}: {error}", address=address)


def _observed(welcome: bytes) -> str | None:
    """Where the listener claims to see this peer, which may be a lie; None for what is no address, and over a relay,
    which hides it."""
    try:
        address = parse_address(welcome.decode())
    except (AddressError, UnicodeDecodeError):
        return None
    return str(address) if address.scheme == "tcp" and scope_of(address.host) is not None else None


def expect(kind: GreetingKind, message: Message, length: int | None = None) -> bytes:
    if message.version != PROTOCOL_VERSION:
        raise Refused(
            "another version",
            f"protocol versions differ: this end speaks {PROTOCOL_VERSION}, the other {message.version}; "
            "update the older one",
        )
    if message.kind in (GreetingKind.REFUSAL, GreetingKind.NO_MEMBER):
        error = NotAMember if message.kind == GreetingKind.NO_MEMBER else HandshakeError
        raise error(f"refused by the other end: {printable(message.body.decode(errors='replace'), 200)}")
    if message.kind != kind or (length is not None and len(message.body) != length):
        what = kind.name if length is None else f"{kind.name} of {length} bytes"
        raise Refused("malformed hello", f"expected {what}, got kind {message.kind}")
    return message.body


def tls_failure(error: ssl.SSLError) -> HandshakeError:
    """A failed TLS handshake, as an error that says what the other end is."""
    if error.reason in ("HTTP_REQUEST", "WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_MESSAGE"):
        return Refused("no TLS", "the other end is another program: it does not speak TLS")
    return Refused("no swarm TLS", f"the other end is another program: its TLS is not a swarm peer's ({error.reason})")


# Certificates


def listener_context(identity: Identity) -> ssl.SSLContext:
    """A context whose certificate is self-signed by the identity's key."""
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # a resumed session would show no certificate
    key = identity.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with _as_path(_certificate(identity)) as certificate_path, _as_path(key) as key_path:
        context.load_cert_chain(certificate_path, key_path)
    return context


def dialer_context() -> ssl.SSLContext:
    """A context without a certificate: the dialer proves itself inside the channel."""
    return _context(ssl.PROTOCOL_TLS_CLIENT)


def certified_peer(certificate: bytes | None) -> PeerID:
    """The peer whose key is in a DER certificate. Raises HandshakeError."""
    try:
        key = x509.load_der_x509_certificate(certificate or b"").public_key()
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise HandshakeError("the other end is another program: its certificate cannot be read") from error
    if not isinstance(key, Ed25519PublicKey):
        raise HandshakeError("the other end is another program: its certificate carries no Ed25519 key")
    return PeerID(key.public_bytes(Encoding.Raw, PublicFormat.Raw))


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # see the top of this module
    context.minimum_version = ssl.TLSVersion.TLSv1_3  # OpenSSL's first choice there is AES-256-GCM
    context.set_alpn_protocols([ALPN])
    return context


def _certificate(identity: Identity) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.peer_id.text)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(identity.private_key.public_key())
        .serial_number(1)
        # Peers' clocks may be far off, and the key never expires: the dates say nothing.
        .not_valid_before(datetime(1970, 1, 1))
        .not_valid_after(datetime(9999, 12, 31))
    )
    return builder.sign(identity.private_key, None).public_bytes(Encoding.PEM)


@contextmanager
def _as_path(data: bytes) -> Iterator[str]:
    """A path from which OpenSSL can read `data` once. A pipe: the key never lies on a disk, not even for a moment.

    Windows has no names for pipes like these: there it is a file in the user's own temporary directory, for a moment.
    """
    if not Path("/dev/fd").exists():
        with _brief_file(data) as path:
            yield path
        return
    reading, writing = os.pipe()
    try:
        os.write(writing, data)  # about 500 bytes; a pipe holds at least 4096
    finally:
        os.close(writing)
    try:
        yield f"/dev/fd/{reading}"
    finally:
        os.close(reading)


@contextmanager
def _brief_file(data: bytes) -> Iterator[str]:
    descriptor, path = tempfile.mkstemp()  # readable by this user alone
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        yield path
    finally:
        Path(path).unlink()
