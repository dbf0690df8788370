"""`summary.json` in a home tells scripts and the terminal what one process did, and where it stands."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from swarmcli.events import EpochAdvanced, Event, RoundFinished, RoundsReplayed, StateDownloaded
from swarmcli.files.durable import write_file


@dataclass(slots=True)
class Summary:
    """Counts of one process's life; its journal has all else."""

    run_id: str
    role: str
    name: str = ""
    peer: str = ""  # its id, once it has one
    epoch: int = 0
    digest: str = ""  # of the parameters at `epoch`; equal on all peers that are in step
    epochs: int = 0  # stepped by this process
    samples: int = 0  # computed by this process and counted in an epoch
    lost: int = 0  # computed for an epoch that had not ended when this process left
    why_lost: str = "their epoch had not ended"
    downloads: int = 0  # of the run's state
    bytes_received: int = 0  # in rounds and with states

    @property
    def has_trained(self) -> bool:
        """Whether this process has come into the run and done something that its home should keep."""
        return bool(self.samples or self.epoch)

    def note(self, event: Event) -> None:
        """Listens to the peer's events."""
        match event:
            case EpochAdvanced():
                self.epoch = event.epoch
                self.epochs += 1
                self.samples += event.own_samples
            case RoundFinished():
                self.bytes_received += event.bytes_received
            case RoundsReplayed():
                self.epoch = event.epoch
            case StateDownloaded():
                self.downloads += 1
                self.bytes_received += event.bytes
                self.epoch = event.epoch

    def write(self, path: Path) -> None:
        """Writes the file whole or not at all."""
        write_file(path, f"{json.dumps(asdict(self), indent=2)}\n".encode())
