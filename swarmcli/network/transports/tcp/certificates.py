"""The certificates of peers: self-signed, each with its peer's key.

Nobody signs anybody's certificate here, so chains are not verified (`CERT_NONE`). That is safe because the chain is
not what proves an identity: in TLS 1.3 the listener signs the transcript of the handshake with the key in its
certificate, OpenSSL refuses a wrong signature in every mode, and the dialer compares the key with the peer id.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

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
