"""Identities: ids and signatures, and every way in which a key file can be unusable."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from swarmcli.errors import AddressError, IdentityError
from swarmcli.network import identity as module
from swarmcli.network.identity import Identity, PeerID, verify


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys" / "peer.key"


def test_a_peer_id_reads_what_it_writes() -> None:
    peer_id = Identity.from_seed(1).peer_id
    assert len(str(peer_id)) == 52 and PeerID.parse(str(peer_id)) == peer_id
    assert peer_id.short == str(peer_id)[:10] == f"{peer_id:.10}"


def test_nothing_else_is_a_peer_id() -> None:
    for length in (0, 31, 33):
        with pytest.raises(ValueError, match=f"32 bytes, got {length}"):
            PeerID(b"x" * length)
    # The last but one decodes, but is a second spelling: four bits of its last letter carry nothing.
    for text in ("", "a" * 51, "a" * 53, "A" * 52, "1" * 52, "ä" * 52, "a" * 51 + "b", "a" * 10_000):
        with pytest.raises(AddressError, match="52 characters") as caught:
            PeerID.parse(text)
        assert len(str(caught.value)) < 300


def test_a_signature_holds_for_its_purpose_its_fields_and_its_signer_only() -> None:
    alice, bob = Identity.from_seed(1), Identity.from_seed(2)
    signature = alice.sign("record", b"ab", b"c")
    assert len(signature) == 64 and verify(alice.peer_id, "record", signature, b"ab", b"c")
    assert not verify(alice.peer_id, "dial", signature, b"ab", b"c")
    assert not verify(alice.peer_id, "record", signature, b"a", b"bc")
    assert not verify(alice.peer_id, "record", signature, b"ab", b"c", b"")
    assert not verify(bob.peer_id, "record", signature, b"ab", b"c")
    assert not verify(alice.peer_id, "record", signature[:-1], b"ab", b"c")
    assert not verify(alice.peer_id, "record", b"", b"ab", b"c")


def test_nothing_secret_is_shown() -> None:
    identity = Identity.from_seed(3)
    secret = identity.private_key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    assert repr(identity) == f"Identity({identity.peer_id.short!r})"
    assert secret.hex() not in repr(vars(identity))


def test_a_new_file_is_private_and_gives_the_same_identity_again(path: Path) -> None:
    umask = os.umask(0)  # a careless one
    try:
        created = Identity.load_or_create(path)
    finally:
        os.umask(umask)
    created.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(each.name for each in path.parent.iterdir()) == ["peer.key", "peer.key.lock"], "the draft is gone"
    again = Identity.load_or_create(path)
    assert again.peer_id == created.peer_id
    again.close()
    again.close()


def test_a_file_in_use_by_another_process_is_refused(path: Path) -> None:
    holder_code = (
        "import sys, pathlib; from swarmcli.network.identity import Identity\n"
        "held = Identity.load_or_create(pathlib.Path(sys.argv[1]))\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder_code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(IdentityError, match="in use by another peer") as caught:
            Identity.load_or_create(path)
        assert str(path) in str(caught.value)
        holder.kill()
    Identity.load_or_create(path).close()  # a killed process holds nothing


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o000, 0o200])
def test_a_file_that_others_may_touch_or_nobody_can_read_is_refused(path: Path, mode: int) -> None:
    Identity.load_or_create(path).close()
    path.chmod(mode)
    words = f"mode {mode:04o}.*chmod 600 {path}" if mode & 0o077 else "readable"
    with pytest.raises(IdentityError, match=words) as caught:
        Identity.load_or_create(path)
    assert str(path) in str(caught.value)


def test_a_file_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Identity.load_or_create(path).close()
    monkeypatch.setattr(module.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(IdentityError, match=rf"{path} belongs to another user \(uid {os.getuid()}\)"):
        Identity.load_or_create(path)


def _other_key() -> bytes:
    return Ed448PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.mark.parametrize("content", [b"", b"-----BEGIN PRIVATE KEY-----\n", _other_key()])
def test_garbage_is_refused_and_left_as_it_is(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    path.chmod(0o600)
    for _ in range(2):  # the second time shows that the lock was released
        with pytest.raises(IdentityError, match=rf"{path} holds no Ed25519 private key.*a new one is made"):
            Identity.load_or_create(path)
    assert path.read_bytes() == content


def test_what_is_no_file_is_refused_without_waiting(path: Path, tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="no regular file"):
        Identity.load_or_create(tmp_path)
    path.parent.mkdir()
    os.mkfifo(path, 0o600)
    with pytest.raises(IdentityError, match="no regular file"):
        Identity.load_or_create(path)
