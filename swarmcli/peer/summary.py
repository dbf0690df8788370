"""`summary.json` in a home tells scripts and the terminal what one process did, and where it stands."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from swarmcli.events import (
    DriftMeasured,
    EpochAdvanced,
    Event,
    RoundFinished,
    RoundsReplayed,
    StateDonated,
    StateDownloaded,
)
from swarmcli.files.durable import write_file


@dataclass(slots=True)
class Summary:
    """Counts of one process's life; bytes are those of rounds and states, not of small messages."""

    run_id: str
    role: str
    name: str = ""
    peer: str = ""  # its id, once it has one
    epoch: int = 0
    digest: str = ""  # of the parameters at `epoch`; equal on all peers that are in step
    lineage: str = ""
    epochs: int = 0  # stepped by this process
    samples: int = 0  # computed by this process and counted in an epoch; of a site, in its lives before as well
    lost: int = 0  # computed for an epoch that had not ended when this process left
    first_loss: float | None = None
    last_loss: float | None = None
    rounds: dict[str, int] = field(default_factory=lambda: {"committed": 0, "failed": 0, "undecided": 0})
    failures: list[str] = field(default_factory=list)  # the latest reasons
    replays: int = 0  # rounds that this peer missed and made up for
    drift: float | None = None  # of the parameters from the others', as last measured
    downloads: int = 0
    donations: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    @property
    def has_trained(self) -> bool:
        """Whether this process has come into the run and done something that its home should keep."""
        return bool(self.samples or self.epoch)

    def note(self, event: Event) -> None:
        """Listens to the peer's events."""
        match event:
            case EpochAdvanced():
                self.epoch, self.lineage = event.epoch, event.lineage
                self.epochs += 1
                self.samples += event.own_samples
                if event.loss is not None:
                    self.last_loss = event.loss
                    self.first_loss = event.loss if self.first_loss is None else self.first_loss
            case RoundFinished():
                self.rounds[event.outcome] += 1
                self.bytes_sent += event.bytes_sent
                self.bytes_received += event.bytes_received
                if event.reason:
                    self.failures = [*self.failures, event.reason][-20:]
            case RoundsReplayed():
                self.replays += event.rounds
                self.epoch, self.lineage = event.epoch, event.lineage
            case DriftMeasured():
                self.drift = event.distance
            case StateDownloaded():
                self.downloads += 1
                self.bytes_received += event.bytes
                self.epoch, self.lineage = event.epoch, event.lineage
            case StateDonated():
                self.donations += 1
                self.bytes_sent += event.bytes

    def write(self, path: Path) -> None:
        """Writes the file whole or not at all."""
        write_file(path, f"{json.dumps(asdict(self), indent=2)}\n".encode())
