"""Files that hold a private key and nothing else: this user's own, readable by nobody else (mode 0600), in PEM form."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from swarmcli.errors import IdentityError
from swarmcli.files.durable import flush

_MAX_FILE_BYTES = 4096  # a PEM file of such a key has about 120


def open_key_file(path: Path, what: str) -> int:
    """A descriptor of the file, for `read_key`. `what`: the file's name in errors. Raises IdentityError, OSError."""
    # Without O_NONBLOCK a named pipe in the file's place would hang the process here; Windows has neither.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        _check_file(path, os.fstat(descriptor), what)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_key_file(path: Path, what: str, fix: str) -> Ed25519PrivateKey:
    """The key in a file. Raises what `open_key_file` and `read_key` do."""
    descriptor = open_key_file(path, what)
    try:
        return read_key(path, descriptor, what, fix)
    finally:
        os.close(descriptor)


def create_key_file(path: Path) -> None:
    """Writes a new key beside `path` and links it into place: no reader ever sees half a file or replaces one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
        # Another process may have been faster; then its key is the one that gets loaded.
        with contextlib.suppress(FileExistsError):
            if os.name == "nt":
                draft.rename(path)  # never replaces there, and works where the file system has no links
            else:
                os.link(draft, path)
        flush(path.parent)  # a key that a power cut takes away would be another peer's next time
    finally:
        draft.unlink(missing_ok=True)


def _check_file(path: Path, status: os.stat_result, what: str) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise IdentityError(f"the {what} {path} is no regular file; name another one")
    if not hasattr(os, "geteuid"):
        return  # Windows: the directory says who may read it; modes and owners mean nothing
    if status.st_uid != os.geteuid():
        raise IdentityError(
            f"the {what} {path} belongs to another user (uid {status.st_uid}); "
            "name a file of your own, or change its owner"
        )
    if mode & 0o077:
        raise IdentityError(
            f"the {what} {path} may be read or written by other users (mode {mode:04o}); run: chmod 600 {path}"
        )
    # The superuser could read it all the same; it is refused so that all users see the same behaviour.
    if not mode & 0o400:
        raise IdentityError(f"the {what} {path} is not readable (mode {mode:04o}); run: chmod 600 {path}")


def read_key(path: Path, descriptor: int, what: str, fix: str) -> Ed25519PrivateKey:
    """The key in an open file. Raises IdentityError, which ends with `fix`, if the file holds something else."""
    data = os.read(descriptor, _MAX_FILE_BYTES)
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise IdentityError(f"the {what} {path} holds no Ed25519 private key in PEM form; {fix}")
    return key
