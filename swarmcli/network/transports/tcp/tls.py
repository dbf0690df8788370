"""TLS 1.3 as the TCP transport uses it: certificates that carry a peer's key, and an engine without I/O.

Python's own TLS for asyncio reads once more than it delivers when the other end closes, and decides by itself when
to pause; the engine here leaves both to its caller, and decrypts straight into memory that the caller names.

Nobody signs anybody's certificate here, so chains are not verified (`CERT_NONE`). That is safe because the chain is
not what proves an identity: in TLS 1.3 the listener signs the transcript of the handshake with the key in its
certificate, OpenSSL refuses a wrong signature in every mode, and the dialer compares the key with the peer id.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import cast

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from swarmcli.network.identity import Identity, PeerID

ALPN = "swarm"  # tells this protocol from other programs that speak TLS; the version is agreed on later


class NotASwarmCertificate(ValueError):
    """The certificate carries no Ed25519 key, so whoever answered is no peer."""


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
    """The peer whose key is in a DER certificate. Raises NotASwarmCertificate."""
    try:
        key = x509.load_der_x509_certificate(certificate or b"").public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise NotASwarmCertificate("its certificate cannot be read") from error
    if not isinstance(key, Ed25519PublicKey):
        raise NotASwarmCertificate("its certificate carries no Ed25519 key")
    return PeerID(key.public_bytes(Encoding.Raw, PublicFormat.Raw))


class TLSEngine:
    """One end of a TLS connection as bytes in and bytes out. Errors are ssl.SSLError; EOFError is an orderly end."""

    def __init__(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._read = cast(Callable[[int, memoryview], int], self._ssl.read)  # the count, for it is given a buffer
        self.feed = self._incoming.write  # takes encrypted bytes from the network
        self.output = self._outgoing.read  # gives encrypted bytes for the network

    def handshake(self) -> bool:
        """Goes on with the handshake; True when it is complete."""
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    @property
    def bytes_fed(self) -> int:
        """Encrypted bytes that are here and no whole record yet, or not asked for."""
        return self._incoming.pending

    @property
    def peer_certificate(self) -> bytes | None:
        return self._ssl.getpeercert(binary_form=True)

    @property
    def protocol(self) -> str | None:
        """The application protocol that both ends agreed on."""
        return self._ssl.selected_alpn_protocol()

    def read(self, into: memoryview) -> int:
        """Decrypts at most one record (16 KiB) into `into`; 0 when nothing is there. EOFError after a close_notify."""
        try:
            count = self._read(len(into), into)
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLZeroReturnError as error:
            raise EOFError from error
        if not count:
            raise EOFError
        return count

    def fill(self, memory: memoryview) -> int:
        """Decrypts records until `memory` is full or nothing more is there; EOFError when it ends before that.

        This is the loop that runs once for every 16 KiB received, so it does nothing else.
        """
        read, size, filled = self._read, memory.nbytes, 0
        try:
            while filled < size:
                count = read(size - filled, memory[filled:])
                if not count:
                    raise EOFError
                filled += count
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError as error:
            raise EOFError from error
        return filled

    def write(self, data: memoryview | bytes) -> None:
        """Encrypts all of `data`, which may be reused afterwards."""
        count = self._ssl.write(data)
        while count < len(data):
            data = data[count:]
            count = self._ssl.write(data)

    def close_notify(self) -> None:
        """Says that nothing more comes from here."""
        with suppress(ssl.SSLError):  # it waits for the other end's answer, which nobody needs
            self._ssl.unwrap()


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
    """A path from which OpenSSL can read `data` once. A pipe: the key never lies on a disk, not even for a moment."""
    reading, writing = os.pipe()
    try:
        os.write(writing, data)  # about 500 bytes; a pipe holds at least 4096
    finally:
        os.close(writing)
    try:
        yield f"/dev/fd/{reading}"
    finally:
        os.close(reading)
