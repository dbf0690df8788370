"""One round's averages on disk, in a file without a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarmcli.averaging.archive.kept_round import KeptRound, RoundRecord
from swarmcli.compression.base import tensor_memory
from swarmcli.network import wire
from swarmcli.network.loop_thread import offload
from swarmcli.state.snapshot import ChunkLayout, Snapshot
from swarmcli.state.unnamed_file import UnnamedFile


@dataclass(frozen=True)
class StoredRound:
    """A round in a file."""

    record: RoundRecord
    file: UnnamedFile
    _layout: ChunkLayout

    @classmethod
    async def write(cls, record: RoundRecord, averages: Sequence[torch.Tensor], file: UnnamedFile) -> StoredRound:
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


def _write(file: UnnamedFile, averages: Sequence[torch.Tensor]) -> ChunkLayout:
    layout = ChunkLayout.of({str(index): each for index, each in enumerate(averages)})
    file.resize(layout.nbytes)
    for offset, tensor in zip(layout.offsets, averages, strict=False):
        file.write(offset, tensor_memory(tensor))
    return layout
