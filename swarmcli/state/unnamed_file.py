"""Temporary files without a name: a process that is killed leaves none behind."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

import torch

from swarmcli.memory import unwritten

_WRITE = 8 << 20  # bytes in one call of the system
_LEAVE_FREE = 1 << 30  # bytes of the disk that stay free for other programs


class UnnamedFile:
    """A temporary file without a name; gone with its last user, or when it is closed."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError."""
        self._directory = directory
        self._file: Any = tempfile.TemporaryFile("w+b", 0, dir=directory)  # noqa: SIM115  # closed by `close`
        self._place = threading.Lock()  # held from a seek to its read or write
        self.close = weakref.finalize(self, self._file.close)

    def resize(self, nbytes: int) -> None:
        """Raises OSError if the disk is too full for that."""
        more = nbytes - os.fstat(self._file.fileno()).st_size
        if more > 0 and shutil.disk_usage(self._directory).free < more + _LEAVE_FREE:
            raise OSError(f"{self._directory} has no room for another {more >> 20} MiB")
        if more != 0:
            self._file.truncate(nbytes)

    def write(self, offset: int, content: memoryview) -> None:
        """Raises OSError."""
        while content:
            written = self.write_at(offset, content[:_WRITE])
            content, offset = content[written:], offset + written

    def write_at(self, offset: int, piece: memoryview) -> int:
        """Makes one system call. Returns how many bytes it wrote. Not `os.pwrite`, which Windows does not have."""
        with self._place:
            self._file.seek(offset)
            return int(self._file.write(piece))

    def read_at(self, offset: int, into: memoryview) -> int:
        """Makes one system call. Returns how many bytes it read."""
        with self._place:
            self._file.seek(offset)
            return int(self._file.readinto(into))

    def map(self, nbytes: int) -> torch.Tensor:
        """The content as a memory-mapped tensor of uint8. The file must not change while the tensor is alive."""
        # Private and writable only because torch warns of memory that is read-only; nobody writes there.
        mapping = mmap.mmap(self._file.fileno(), nbytes, access=mmap.ACCESS_COPY)
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def read(self, offset: int, count: int) -> memoryview:
        """A copy of what has been written there. Raises OSError. Thread-safe."""
        content = unwritten(count)
        filled = 0
        while filled < count:
            got = self.read_at(offset + filled, content[filled:])
            if not got:
                raise OSError(f"a temporary file in {self._directory} ends before byte {offset + count}")
            filled += got
        return content


def usual_directory() -> Path:
    """TMPDIR if that is set, or /var/tmp: /tmp is memory on many machines."""
    named = os.environ.get("TMPDIR")
    usual = Path("/var/tmp")
    if not named and usual.is_dir() and os.access(usual, os.W_OK):
        return usual
    return Path(tempfile.gettempdir())
