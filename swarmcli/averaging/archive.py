"""Keeps the averages of the last committed rounds for those who missed them, on disk and out of memory.

Each round lies in a temporary file that has no name any more, so a process that is killed leaves nothing. Files are
written by the executor, once the round has ended, and used again for later rounds; what is asked for is mapped.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from swarmcli.averaging.donor import StateDonor
from swarmcli.averaging.kept_round import (
    KeptRound,
    RoundRecord,
    fetch_round,
    replay_prefix,
    version_of_group,
    version_of_tag,
)
from swarmcli.averaging.layout import Layout, Plan
from swarmcli.averaging.results import AllreduceResult
from swarmcli.averaging.snapshot import ChunkLayout, Snapshot
from swarmcli.compression import TensorDescriptor
from swarmcli.compression.base import tensor_memory
from swarmcli.events import Noticed
from swarmcli.network import Endpoint, PeerID, wire
from swarmcli.network.tasks import TaskOwner
from swarmcli.network.thread import offload

_ANY_CHUNK = 1 << 20  # chunks do not matter for where tensors lie
_WRITE = 8 << 20  # bytes in one call of the system
_LEAVE_FREE = 1 << 30  # bytes of the disk that are not ours to take

logger = logging.getLogger(__name__)


class RoundArchive:
    """The last `keep` rounds that one averager committed."""

    def __init__(self, endpoint: Endpoint, prefix: str, keep: int = 2, directory: Path | None = None) -> None:
        """`directory` is for the files; None: TMPDIR, or /var/tmp, since /tmp is memory on many machines."""
        self._endpoint, self._prefix, self._keep = endpoint, prefix, keep
        self._directory = directory or _default_directory()
        self._donor = StateDonor(endpoint, replay_prefix(prefix), self._provide)
        self._tasks = TaskOwner()
        self._rounds: deque[_StoredRound] = deque()  # oldest first
        self._spare: list[_File] = []
        self._said = False  # that rounds are not kept

    def start(self) -> None:
        """Begins to serve. Raises ValueError if the endpoint has an archive of this prefix already."""
        self._donor.start()

    async def close(self) -> None:
        """Serves no more, and lets go of the files. Idempotent; leaves no task."""
        self._donor.close()
        await self._tasks.close()
        for file in [*(stored.file for stored in self._rounds), *self._spare]:
            file.close()
        self._rounds.clear()
        self._spare.clear()

    def keep(self, group_id: bytes, tag: bytes, result: AllreduceResult) -> None:
        """Keeps a committed round that has averages, in the background: the result's memory is used until `written`.

        A round that cannot be written, for want of space above all, is not kept; the first time that is told.
        """
        self._tasks.spawn(self._store(group_id, tag, result))

    async def written(self) -> None:
        """Returns once nothing is being written, and so no memory of a result is held here."""
        await self._tasks.join()

    @property
    def group_ids(self) -> tuple[bytes, ...]:
        """Of the rounds that are kept, oldest first."""
        return tuple(stored.record.group_id for stored in self._rounds)

    async def fetch(
        self,
        donors: Sequence[PeerID],
        layout: Layout,
        *,
        group_id: bytes = b"",
        tag: bytes = b"",
        plan: Plan | None = None,
        digest: bytes | None = None,
        timeout: float,
    ) -> KeptRound:
        """See `fetch_round`."""
        return await fetch_round(
            self._endpoint,
            self._prefix,
            donors,
            layout,
            group_id=group_id,
            tag=tag,
            plan=plan,
            digest=digest,
            timeout=timeout,
        )

    async def _store(self, group_id: bytes, tag: bytes, result: AllreduceResult) -> None:
        file: _File | None = None
        try:
            file = self._spare.pop() if self._spare else _File(self._directory)
            record = RoundRecord.of(group_id, tag, result)
            layout = await offload(_write, file, result.averages)
            self._rounds.append(_StoredRound(record, layout, file))
            file = None
        except (OSError, ValueError) as error:
            self._tell(str(error))
        finally:
            if file is not None:
                file.close()
        while len(self._rounds) > self._keep:
            self._recycle(self._rounds.popleft().file)

    def _recycle(self, file: _File) -> None:
        if file.in_use:
            file.close()  # the mapping of whoever is still being served outlives that
        else:
            self._spare.append(file)

    def _tell(self, reason: str) -> None:
        if not self._said:
            self._said = True
            text = f"the averages of {self._prefix!r} are not kept for those who miss a round: {reason}"
            logger.warning("%s", text)
            self._endpoint.events.emit(Noticed("warning", text))

    async def _provide(self, version: bytes) -> Snapshot | None:
        for stored in reversed(self._rounds):
            if version in (version_of_group(stored.record.group_id), version_of_tag(stored.record.tag)):
                return stored.snapshot(version)
        return None


class _File:
    """A temporary file without a name."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError."""
        self._directory = directory
        self._file: IO[bytes] = tempfile.TemporaryFile("w+b", 0, dir=directory)  # noqa: SIM115  # closed by its owner
        self._mapping: weakref.ref[mmap.mmap] | None = None

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
        """Raises OSError."""
        while content:
            written = os.pwrite(self._file.fileno(), content[:_WRITE], offset)
            content, offset = content[written:], offset + written

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
class _StoredRound:
    record: RoundRecord
    layout: ChunkLayout
    file: _File

    def snapshot(self, version: bytes) -> Snapshot:
        memory = self.file.map(self.layout.nbytes) if self.layout.nbytes else torch.empty(0, dtype=torch.uint8)
        return Snapshot(version, wire.encode(self.record), self.layout.tensors(memory))


def _write(file: _File, averages: Sequence[torch.Tensor]) -> ChunkLayout:
    layout = ChunkLayout({str(index): TensorDescriptor.of(each) for index, each in enumerate(averages)}, _ANY_CHUNK)
    file.resize(layout.nbytes)
    for offset, tensor in zip(layout.offsets, averages, strict=False):
        file.write(offset, tensor_memory(tensor))
    return layout


def _default_directory() -> Path:
    named = os.environ.get("TMPDIR")
    usual = Path("/var/tmp")
    if not named and usual.is_dir() and os.access(usual, os.W_OK):
        return usual
    return Path(tempfile.gettempdir())
