"""Certificates that carry a peer's key, and the engine between bytes and bytes."""

from __future__ import annotations

import os
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


def test_bytes_pass_in_records_and_end_in_order() -> None:
    dialer, listener = engines()
    memory = memoryview(bytearray(100_000))
    dialer.write(os.urandom(40_000))
    listener.feed(dialer.output())
    counts = []
    while count := listener.read(memory):
        counts.append(count)
    assert counts == [16384, 16384, 7232]
    dialer.close_notify()
    listener.feed(dialer.output())
    with pytest.raises(EOFError):
        listener.read(memory)


def test_memory_is_filled_over_records_and_no_further() -> None:
    dialer, listener = engines()
    data = os.urandom(60_000)
    dialer.write(data)
    encrypted = dialer.output()
    memory = memoryview(bytearray(50_000))
    listener.feed(encrypted[:20_000])
    assert listener.fill(memory) == 16384, "only one record is there as a whole"
    listener.feed(encrypted[20_000:])
    assert listener.fill(memory[16384:]) == 50_000 - 16384
    assert bytes(memory) == data[:50_000]
    assert listener.fill(memory) == 10_000 and bytes(memory[:10_000]) == data[50_000:]
    assert listener.fill(memory) == 0


def test_an_end_in_the_middle_of_what_is_to_be_filled_is_told() -> None:
    dialer, listener = engines()
    dialer.write(b"early")
    dialer.close_notify()
    listener.feed(dialer.output())
    with pytest.raises(EOFError):
        listener.fill(memoryview(bytearray(10)))


def test_making_a_context_leaves_neither_a_file_nor_a_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = open_descriptors()
    listener_context(LISTENER)
    assert open_descriptors() == before and list(tmp_path.iterdir()) == []


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
