"""Files that are there whole, or not at all, also after a power cut."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def write_file(
    file: Path, content: bytes | Callable[[BinaryIO], object], *, digest: Any = None, private: bool = False
) -> None:
    """Writes `content`, or lets it write to a stream, into a file beside `file`, flushes that to the disk, and renames
    it. Raises OSError if that fails; `file` is then as it was, unless only the directory could not be flushed.

    Processes on several machines may do this to the same file of a shared directory: the last one's stays. `digest`: a
    hash of hashlib, updated with all bytes before the disk has them. `private`: readable by this user alone from the
    first byte on.
    """
    if isinstance(content, bytes) and (file.is_fifo() or file.is_char_device()):  # /dev/stdout: no file may replace it
        file.write_bytes(content)
        return
    partial = file.with_name(f".{file.name}.{platform.node()}-{os.getpid()}")
    try:
        partial.unlink(missing_ok=True)  # a killed process had this number
        with open(partial, "wb", opener=_private if private else None) as stream:
            target: Any = stream if digest is None else _Hashed(stream, digest)
            if isinstance(content, bytes):
                target.write(content)
            else:
                content(target)
            stream.flush()
            os.fsync(stream.fileno())  # before the rename: else the new name could stand for an empty file
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    flush(file.parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class _Hashed:
    """A stream that is only written to."""

    def __init__(self, stream: BinaryIO, digest: Any) -> None:
        self._stream = stream
        self._digest = digest

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return self._stream.write(data)


def foreign(path: Path, tree: Path | None = None) -> str:
    """Says that what is there is another user's, and that `tree` (None: only this) has to change hands; "": it is this
    user's, or nothing is there."""
    if not hasattr(os, "geteuid") or not os.path.lexists(path) or (owner := path.lstat().st_uid) == os.geteuid():
        return ""
    return f"{path} belongs to another user (id {owner}); run: sudo chown -R {os.geteuid()} {tree or path}"


def forget(file: Path) -> None:
    """Drops a flushed file from the page cache, so that its next reader gets what the disk has. Does nothing on systems
    that cannot be told."""
    if hasattr(os, "posix_fadvise"):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def discard(directory: Path) -> None:
    """Removes a directory. Renames it first: a process that is killed meanwhile leaves `.<name>-<process id>`, and
    never half a directory under its name. What cannot be removed stays."""
    hidden = directory.with_name(f".{directory.name}-{os.getpid()}")
    try:
        shutil.rmtree(hidden, ignore_errors=True)
        directory.rename(hidden)
    except OSError:
        return
    shutil.rmtree(hidden, ignore_errors=True)


def flush(path: Path) -> None:
    """A file's content, or a directory's entries, are on the disk when it returns.

    Windows flushes only files that are open for writing, and directories by itself.
    """
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
