"""Keeps the averages of the last committed rounds for peers that missed them, on disk and out of memory.

Each round lies in a temporary file that has no name any more, so a process that is killed leaves nothing. The executor
writes files once the round has ended, and later rounds use them again; a round that a peer asks for is mapped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from swarmcli.averaging.archive.kept_round import (
    KeptRound,
    RoundRecord,
    fetch_round,
    replay_prefix,
    version_of_group,
    version_of_tag,
)
from swarmcli.averaging.group import Group
from swarmcli.averaging.round.allreduce import AllreduceResult
from swarmcli.averaging.round.buffers import Average
from swarmcli.averaging.round.plan import Plan
from swarmcli.compression.base import tensor_memory
from swarmcli.errors import StateDownloadError
from swarmcli.events import Noticed
from swarmcli.network import Endpoint, wire
from swarmcli.network.loop_thread import offload
from swarmcli.network.task_owner import TaskOwner
from swarmcli.state.donor import StateDonor
from swarmcli.state.snapshot import ChunkLayout, Snapshot
from swarmcli.state.unnamed_file import UnnamedFile, usual_directory
from swarmcli.tasks import forget


@dataclass(frozen=True, slots=True)
class ArchiveOptions:
    """Which rounds are kept, and how long members wait for them. Times in seconds."""

    keep: int = 2  # the last rounds
    most_fetches: int = 8  # at a time: they are small beside downloads of a state
    patience: float = 2.0  # for which a round waits until the one before has been written
    late_tries: int = 5  # of a member that was late: others write their file some moments after the commit
    late_pause: float = 1.0  # between two of these
    late_download: float = 60.0  # in which nothing of it comes, in one of these


@dataclass(frozen=True)
class StoredRound:
    """A round in a file."""

    record: RoundRecord
    file: UnnamedFile
    _layout: ChunkLayout

    @classmethod
    async def write(cls, record: RoundRecord, averages: Sequence[torch.Tensor], file: UnnamedFile) -> StoredRound:
        """Writes into `file`, beside the loop. Raises OSError, if the disk is full among other reasons."""

        def write() -> ChunkLayout:
            layout = ChunkLayout.of({str(index): each for index, each in enumerate(averages)})
            file.resize(layout.nbytes)
            for offset, tensor in zip(layout.offsets, averages, strict=False):
                file.write(offset, tensor_memory(tensor))
            return layout

        return cls(record, file, await offload(write))

    def load(self) -> KeptRound:
        """The round; its tensors are read from the file when they are used."""
        return KeptRound(self.record, list(self._tensors().values()))

    def snapshot(self, version: bytes) -> Snapshot:
        """The round as others download it."""
        return Snapshot(version, wire.encode(self.record), self._tensors())

    def _tensors(self) -> dict[str, torch.Tensor]:
        nbytes = self._layout.nbytes
        return self._layout.tensors(self.file.map(nbytes) if nbytes else torch.empty(0, dtype=torch.uint8))


class RoundArchive:
    """The last rounds that one averager committed."""

    def __init__(
        self,
        endpoint: Endpoint,
        prefix: str,
        options: ArchiveOptions = ArchiveOptions(),
        directory: Path | None = None,
    ) -> None:
        """`directory` is for the files; None: the usual one."""
        self.options = options
        self._endpoint, self._prefix = endpoint, prefix
        self.fetch = partial(fetch_round, endpoint, prefix)  # from other peers, a round that this one has missed
        self._directory = directory or usual_directory()
        self._donor = StateDonor(endpoint, replay_prefix(prefix), self._provide, max_downloads=options.most_fetches)
        self._tasks = TaskOwner()
        self._rounds: deque[StoredRound] = deque()  # oldest first
        self._spare: list[UnnamedFile] = []
        self._writing: UnnamedFile | None = None
        self._told = False  # that rounds are not kept

    def start(self) -> None:
        """Begins to serve. Raises ValueError if the endpoint has an archive of this prefix already."""
        self._donor.start()

    async def close(self) -> None:
        """Serves no more, and lets go of the files. Idempotent; leaves no task."""
        self._donor.close()
        if self._writing is not None:
            self._writing.give_up()  # or the end would wait for a slow disk
        await self._tasks.close()
        for file in [*(stored.file for stored in self._rounds), *self._spare]:
            file.close()
        self._rounds.clear()
        self._spare.clear()

    def keep(self, group_id: bytes, tag: bytes, result: AllreduceResult) -> None:
        """Keeps a committed round that has averages, in the background: the result's memory is used until `written`.

        A round that cannot be written, mostly for want of space, is not kept; the first time an event tells that.
        """
        try:
            record = RoundRecord.of(group_id, tag, result)
        except ValueError as error:
            self._tell(str(error))
        else:
            self._tasks.spawn(self._store(record, result.averages))

    async def keep_alone(
        self, round_id: bytes, tag: bytes, averages: Sequence[torch.Tensor], weight: float, samples: float
    ) -> None:
        """The same for a round that this peer made by itself; returns when the tensors may change again."""
        await self._store(RoundRecord.alone(round_id, tag, self._endpoint.peer_id, weight, samples), averages)

    async def fetch_committed(
        self, group: Group, plan: Plan, digest: bytes
    ) -> tuple[list[torch.Tensor], tuple[Average, ...]] | None:
        """The result of a round for a member that was late: averages and parts. None: no other member gives it."""
        others = [member.peer_id for member in group.members if member.peer_id != self._endpoint.peer_id]
        donors = [peer for peer in others if not group.members[group.index_of(peer)].auxiliary]
        for _ in range(self.options.late_tries):
            try:
                kept = await self.fetch(
                    donors,
                    plan.layout,
                    group_id=group.group_id,
                    plan=plan,
                    digest=digest,
                    timeout=self.options.late_download,
                )
                return kept.averages, tuple(kept.parts(plan))
            except StateDownloadError:
                await asyncio.sleep(self.options.late_pause)
        return None

    async def written(self) -> None:
        """Returns once nothing is being written, and so no memory of a result is held here.

        A disk that takes much longer than a round holds up nobody: the archive gives up the file that it writes.
        """
        try:
            async with asyncio.timeout(self.options.patience):
                await self._tasks.join()
        except TimeoutError:
            if self._writing is not None:
                self._writing.give_up()
            await self._tasks.join()

    async def _store(self, record: RoundRecord, averages: Sequence[torch.Tensor]) -> None:
        file: UnnamedFile | None = None
        try:
            file = self._writing = self._spare.pop() if self._spare else UnnamedFile(self._directory)
            self._rounds.append(await StoredRound.write(record, averages, file))
            file = None
        except OSError as error:
            self._tell(str(error))
            forget(error)  # or it would keep the averages in memory
            if file is not None and file.renew():
                self._spare.append(file)  # a file that was written once is written faster the next time
                file = None
        finally:
            self._writing = None
            if file is not None:
                file.close()
        while len(self._rounds) > self.options.keep:
            oldest = self._rounds.popleft().file
            if oldest.in_use:
                oldest.close()  # the mapping for peers that still download outlives that
            else:
                self._spare.append(oldest)

    def _tell(self, reason: str) -> None:
        if not self._told:
            self._told = True
            text = f"the averages of {self._prefix!r} are not kept for those who miss a round: {reason}"
            self._endpoint.events.emit(Noticed("warning", text))

    async def kept(self, tag: bytes) -> KeptRound | None:
        """The newest round of this tag, if it is kept here. Its tensors are valid until two more rounds are kept."""
        await self.written()
        return next((stored.load() for stored in reversed(self._rounds) if stored.record.tag == tag), None)

    async def _provide(self, version: bytes) -> Snapshot | None:
        await self.written()  # peers ask for a round as soon as it is committed
        for stored in reversed(self._rounds):
            if version in (version_of_group(stored.record.group_id), version_of_tag(stored.record.tag)):
                return stored.snapshot(version)
        return None
