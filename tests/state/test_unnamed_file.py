"""Files without names: what is written is read, mapped and gone."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from swarmcli.state.unnamed_file import UnnamedFile


def test_what_is_written_is_read_and_mapped(tmp_path: Path) -> None:
    file = UnnamedFile(tmp_path)
    file.resize(1000)
    file.write(300, memoryview(b"x" * 400))
    assert bytes(file.read(299, 402)) == b"\0" + b"x" * 400 + b"\0"
    mapped = file.map(1000)
    assert file.in_use and bytes(mapped[300:700].numpy()) == b"x" * 400
    del mapped
    assert not file.in_use and not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="ends before byte 1001"):
        file.read(990, 11)


def test_it_is_closed_with_its_last_user(tmp_path: Path) -> None:
    file = UnnamedFile(tmp_path)
    descriptor = file._file.fileno()
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    file = UnnamedFile(tmp_path)
    descriptor = file._file.fileno()
    del file
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
