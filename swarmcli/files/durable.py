"""Files that are there whole, or not at all, also after a power cut."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_file(file: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Writes beside the place, flushes to the disk, and renames. OSError, and no such file is new, if that fails.

    Processes on several machines may do this to the same file of a shared directory: the last one's stays.
    """
    partial = file.with_name(f".{file.name}.{platform.node()}-{os.getpid()}")
    try:
        with partial.open("wb") as stream:
            fill(stream)
            stream.flush()
            os.fsync(stream.fileno())  # before the rename: else the new name could stand for an empty file
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    flush(file.parent)


def flush(path: Path) -> None:
    """A file's content, or a directory's entries, are on the disk when it returns.

    Windows flushes what is open for writing, and directories by itself.
    """
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
