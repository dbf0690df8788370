"""Certificates that carry a peer's key, and the engine between bytes and bytes."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from swarmcli.errors import HandshakeError
from swarmcli.network.identity import Identity
from swarmcli.network.transports.tcp.handshake import certified_peer, dialer_context, listener_context
from swarmcli.network.transports.tcp.tls import TLSEngine

from .tcp_helpers import open_descriptors

LISTENER = Identity.from_seed(1)


def engines() -> tuple[TLSEngine, TLSEngine]:
    """A dialer and a listener after their handshake."""
    dialer = TLSEngine(dialer_context(), server_side=False)
    listener = TLSEngine(listener_context(LISTENER), server_side=True)
    for _ in range(3):
        dialer_done = dialer.handshake()
        listener.feed(dialer.output())
        listener_done = listener.handshake()
        dialer.feed(listener.output())
    assert dialer_done and listener_done
    return dialer, listener


def test_the_certificate_proves_the_listeners_key() -> None:
    dialer, listener = engines()
    assert certified_peer(dialer.peer_certificate) == LISTENER.peer_id
    assert dialer.protocol == listener.protocol == "swarm"
    assert dialer._ssl.version() == "TLSv1.3" and "AES_256_GCM" in dialer._ssl.cipher()[0]


def test_no_session_can_be_resumed_without_a_certificate() -> None:
    dialer, listener = engines()
    listener.write(b"data")
    dialer.feed(listener.output())
    dialer.read(memoryview(bytearray(10)))
    assert dialer._ssl.session is None or not dialer._ssl.session.has_ticket


def test_making_a_context_leaves_neither_a_file_nor_a_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = open_descriptors()
    listener_context(LISTENER)
    assert open_descriptors() <= before and list(tmp_path.iterdir()) == []


def _certificate_of_another_program() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "www.example.org")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    dated = builder.serial_number(1).not_valid_before(datetime(2020, 1, 1, tzinfo=UTC))
    signed = dated.not_valid_after(datetime(2040, 1, 1, tzinfo=UTC)).sign(key, hashes.SHA256())
    return signed.public_bytes(Encoding.DER)


@pytest.mark.parametrize("certificate", [None, b"", b"garbage", _certificate_of_another_program()])
def test_other_certificates_name_no_peer(certificate: bytes | None) -> None:
    with pytest.raises(HandshakeError, match="its certificate"):
        certified_peer(certificate)
