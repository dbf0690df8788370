"""One round's averages on disk, in a file without a name: a process that is killed leaves nothing behind."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from swarmcli.averaging.state.kept_round import KeptRound, RoundRecord
from swarmcli.averaging.state.snapshot import ChunkLayout, Snapshot
from swarmcli.compression.base import tensor_memory
from swarmcli.network import wire
from swarmcli.network.thread import offload

_WRITE = 8 << 20  # bytes in one call of the system
_LEAVE_FREE = 1 << 30  # bytes of the disk that are not ours to take


class RoundFile:
    """A temporary file without a name."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError."""
        self._directory = directory
        self._file: IO[bytes] = tempfile.TemporaryFile("w+b", 0, dir=directory)  # noqa: SIM115  # closed by its owner
        self._mapping: weakref.ref[mmap.mmap] | None = None
        self._given_up = False

    @property
    def in_use(self) -> bool:
        """Whether somebody reads what is in it."""
        return self._mapping is not None and self._mapping() is not None

    def resize(self, nbytes: int) -> None:
        """Raises OSError if the disk is too full for that."""
        more = nbytes - os.fstat(self._file.fileno()).st_size
        if more > 0 and shutil.disk_usage(self._directory).free < more + _LEAVE_FREE:
            raise OSError(f"{self._directory} has no room for another {more >> 20} MiB")
        if more != 0:
            os.ftruncate(self._file.fileno(), nbytes)

    def write(self, offset: int, content: memoryview) -> None:
        """Raises OSError, also when it is given up in another thread."""
        while content:
            if self._given_up:
                raise OSError(f"{self._directory} is too slow: the next round is waiting")
            written = os.pwrite(self._file.fileno(), content[:_WRITE], offset)
            content, offset = content[written:], offset + written

    def give_up(self) -> None:
        """Ends the writing that is under way."""
        self._given_up = True

    def renew(self) -> bool:
        """Whether writing was given up, and may now begin anew."""
        given_up, self._given_up = self._given_up, False
        return given_up

    def map(self, nbytes: int) -> torch.Tensor:
        """What is in it, as bytes that nobody changes while the tensor is alive."""
        mapping = self._mapping() if self._mapping is not None else None
        if mapping is None:
            # Private and writable only because torch warns of memory that is read-only; nobody writes there.
            mapping = mmap.mmap(self._file.fileno(), nbytes, access=mmap.ACCESS_COPY)
            self._mapping = weakref.ref(mapping)
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class StoredRound:
    """A round in a file."""

    record: RoundRecord
    file: RoundFile
    _layout: ChunkLayout

    @classmethod
    async def write(cls, record: RoundRecord, averages: Sequence[torch.Tensor], file: RoundFile) -> StoredRound:
        """Writes into `file`, beside the loop. Raises OSError, for a full disk among other reasons."""
        return cls(record, file, await offload(_write, file, averages))

    def load(self) -> KeptRound:
        """The round as it was; its tensors are read from the file when they are used."""
        return KeptRound(self.record, list(self._tensors().values()))

    def snapshot(self, version: bytes) -> Snapshot:
        """What others download."""
        return Snapshot(version, wire.encode(self.record), self._tensors())

    def _tensors(self) -> dict[str, torch.Tensor]:
        nbytes = self._layout.nbytes
        return self._layout.tensors(self.file.map(nbytes) if nbytes else torch.empty(0, dtype=torch.uint8))


def _write(file: RoundFile, averages: Sequence[torch.Tensor]) -> ChunkLayout:
    layout = ChunkLayout.of({str(index): each for index, each in enumerate(averages)})
    file.resize(layout.nbytes)
    for offset, tensor in zip(layout.offsets, averages, strict=False):
        file.write(offset, tensor_memory(tensor))
    return layout


def usual_directory() -> Path:
    """TMPDIR if that is set, or /var/tmp: /tmp is memory on many machines."""
    named = os.environ.get("TMPDIR")
    usual = Path("/var/tmp")
    if not named and usual.is_dir() and os.access(usual, os.W_OK):
        return usual
    return Path(tempfile.gettempdir())
