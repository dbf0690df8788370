"""A directory as a tar, piece by piece: checkpoints are larger than memory.

It contains only regular files in the directory itself or below it: a link could lead to anything else.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    path: Path
    info: tarfile.TarInfo
    inode: tuple[int, int]


class TarOfDirectory:
    """One iteration yields exactly `length` bytes. If a file changes its length or goes away meanwhile, it raises
    OSError, and the download shows that it is cut short."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError if the directory cannot be read."""
        self._entries = list(_entries(directory))
        contents = sum(len(_header(entry.info)) + _padded(entry.info.size) for entry in self._entries)
        self.length = contents + 2 * tarfile.BLOCKSIZE

    def __iter__(self) -> Iterator[bytes]:
        for entry in self._entries:
            yield _header(entry.info)
            yield from _content(entry)
        yield bytes(2 * tarfile.BLOCKSIZE)


def _entries(directory: Path) -> Iterator[ArchiveEntry]:
    count = 0
    for parent, below, names in os.walk(directory, followlinks=False):
        below.sort()
        for name in sorted(names):
            path = Path(parent, name)
            found = path.lstat()
            count += 1
            if count > 10_000:
                raise OSError(f"{directory} holds more than 10,000 files")
            if not stat.S_ISREG(found.st_mode):
                continue
            info = tarfile.TarInfo(Path(directory.name, path.relative_to(directory)).as_posix())
            info.size, info.mtime, info.mode = found.st_size, int(found.st_mtime), 0o644
            yield ArchiveEntry(path, info, (found.st_dev, found.st_ino))


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT)


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _content(entry: ArchiveEntry) -> Iterator[bytes]:
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(entry.path, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if (found.st_dev, found.st_ino) != entry.inode:  # a link, or another file, has replaced it
            raise OSError(f"{entry.path} has changed")
        left = entry.info.size
        while left:
            piece = file.read(min(1 << 20, left))
            if not piece:
                raise OSError(f"{entry.path} has become shorter")
            left -= len(piece)
            yield piece
    yield bytes(_padded(entry.info.size) - entry.info.size)
