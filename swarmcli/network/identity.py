"""A peer is an Ed25519 key pair. The public key is the peer's id, so an id proves itself.

Every signature begins with a tag of what it is for, and every signed field with its length, so that no signature
can pass for another one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from filelock import BaseFileLock, FileLock, Timeout

from swarmcli.errors import AddressError, IdentityError
from swarmcli.network.key_file import create_key_file, open_key_file, read_key

PEER_ID_BYTES = 32
SIGNATURE_BYTES = 64
_REMEMBERED_BYTES = 2048  # of a message; a longer one is checked each time
_TEXT_LENGTH = 52  # 32 bytes in base32 without padding
_SHORT_LENGTH = 10


class PeerID(bytes):
    """The 32 bytes of a peer's Ed25519 public key. Raises ValueError for any other length."""

    __slots__ = ()

    def __new__(cls, value: bytes | bytearray | memoryview) -> PeerID:
        peer_id = super().__new__(cls, value)
        if len(peer_id) != PEER_ID_BYTES:
            raise ValueError(f"a peer id has {PEER_ID_BYTES} bytes, got {len(peer_id)}")
        return peer_id

    @classmethod
    def parse(cls, text: str) -> PeerID:
        """Reads the form that `text` writes. Raises AddressError."""
        try:
            peer_id = cls(base64.b32decode(text.upper() + "===="))
        except (ValueError, binascii.Error):
            peer_id = None
        # Four bits of the last character carry nothing; comparing refuses a second spelling of the same id.
        if peer_id is None or peer_id.text != text:
            raise AddressError(f"{text[:80]!r} is no peer id: expected {_TEXT_LENGTH} characters of a–z and 2–7")
        return peer_id

    @property
    def text(self) -> str:
        """The whole id in base32: 52 lower-case characters."""
        return _text_of(self)

    @property
    def short(self) -> str:
        """The first ten characters of `text`, for people."""
        return self.text[:_SHORT_LENGTH]

    def __str__(self) -> str:
        return self.text

    def __format__(self, spec: str) -> str:
        return format(self.text, spec)

    def __repr__(self) -> str:
        return f"PeerID({self.text!r})"


@lru_cache(maxsize=4096)
def _text_of(peer_id: bytes) -> str:
    """Cached, since Python's base32 is slow: a page that shows a thousand peers would spend most of its time here."""
    return base64.b32encode(peer_id).decode().rstrip("=").lower()


class Identity:
    """A key pair, and the lock on its file if it has one. `repr` shows the peer id only."""

    def __init__(self, private_key: Ed25519PrivateKey, *, lock: BaseFileLock | None = None) -> None:
        """`lock` is held, and released by `close`."""
        self.private_key = private_key
        self.peer_id = PeerID(private_key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))
        self._lock = lock

    @classmethod
    def generate(cls) -> Identity:
        """A new identity that lives in memory only."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes | int) -> Identity:
        """The same seed gives the same identity. For simulation and tests: such a key is no secret."""
        material = seed if isinstance(seed, bytes) else str(seed).encode()
        return cls(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"swarm seed:" + material).digest()))

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Reads the key in `path`, or writes a new one there (mode 0600), and locks the file until `close`.

        Raises IdentityError, naming the file and the fix, if the file cannot be read or written, belongs to
        another user, can be read by others, holds no Ed25519 key, or is in use.
        """
        try:
            if not path.exists():
                create_key_file(path)
            return cls._load(path)
        except OSError as error:
            raise IdentityError(
                f"the identity file {path} cannot be used: {error.strerror or error}; "
                "make it readable and writable for this user, or name another file"
            ) from error

    @classmethod
    def _load(cls, path: Path) -> Identity:
        descriptor = open_key_file(path, "identity file")
        try:
            lock = _lock_file(path)
            try:
                fix = "restore it from a backup, or move it away and a new one is made"
                return cls(read_key(path, descriptor, "identity file", fix), lock=lock)
            except Exception:
                lock.release()
                raise
        finally:
            os.close(descriptor)

    def sign(self, purpose: str, *fields: bytes) -> bytes:
        """64 bytes over the purpose tag and the fields, each with its length."""
        return self.private_key.sign(_signed_bytes(purpose, fields))

    def close(self) -> None:
        """Releases the lock on the file. The key stays usable; idempotent."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __repr__(self) -> str:
        return f"Identity({self.peer_id.short!r})"


def verify(peer_id: PeerID, purpose: str, signature: bytes, *fields: bytes) -> bool:
    """Whether `signature` was made by `peer_id` for exactly this purpose and these fields."""
    if len(signature) != SIGNATURE_BYTES:  # the cache below must not keep a stranger's, which may be a message long
        return False
    message = _signed_bytes(purpose, fields)
    check = _signed_lately if len(message) <= _REMEMBERED_BYTES else _signed
    return check(peer_id, signature, message)


def _signed(peer_id: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(peer_id).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


# The same certificates and records come from several peers in a row, and all peers of one process see the same ones.
# Strangers may fill this cache: it takes 2 MiB at most, and what falls out of it is verified again.
_signed_lately = lru_cache(maxsize=1024)(_signed)


def _signed_bytes(purpose: str, fields: tuple[bytes, ...]) -> bytes:
    parts = (b"swarm", purpose.encode(), *fields)
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def _lock_file(path: Path) -> BaseFileLock:
    """Locks a file beside the key: on Windows nobody could read the key if it were locked itself."""
    place = path.resolve()  # two names of one file are one lock
    lock = FileLock(place.with_name(f"{place.name}.lock"), timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise IdentityError(
            f"the identity file {path} is in use by another peer on this machine; "
            "stop that one, or name another file for this one"
        ) from None
    return lock
