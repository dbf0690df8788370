"""What the journal keeps, as typed values: one class per table, one field per column.

`time` and every other moment is wall-clock seconds since 1970 as this peer's clock showed them. `run` and `id` are
given by the database; they are 0 in a record that was not written yet. Peers appear as the full text of their id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from swarmcli.events import Gone

Level = Literal["detail", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One start of one peer. `finished` stays None when the process died without closing its journal."""

    run_id: str
    role: str
    peer: str
    name: str
    version: str
    pid: int
    started: float
    last_seen: float  # the journal's last sign of life
    finished: float | None = None
    outcome: str = ""  # how the process says it ended
    id: int = 0


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """This peer came to `epoch`; the fields are those of `events.EpochAdvanced`."""

    time: float
    epoch: int
    lineage: str
    samples: int
    own_samples: int
    peers: int
    loss: float | None
    seconds: float
    averaging_seconds: float
    run: int = 0
    id: int = 0


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A round of averaging ended for this peer; the fields are those of `events.RoundFinished`."""

    time: float
    round_id: str
    purpose: str
    epoch: int
    outcome: str
    reason: str
    leader: str
    members: tuple[str, ...]
    contributors: tuple[str, ...]
    left_out: Mapping[str, str]
    bytes_sent: int
    bytes_received: int
    seconds: float  # of all stages together
    stages: Mapping[str, float] = field(default_factory=dict)
    run: int = 0
    id: int = 0

    @property
    def took(self) -> float:
        """Seconds from when the group was there: while it formed, its members may well have computed. Of a round
        that found no group, the seconds of looking for one."""
        return self.seconds - (self.stages.get("looking for group", 0.0) if self.round_id else 0.0)


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """The last that was known of a peer of the run. `epoch` is the highest it was seen at: who starts anew or leaves
    reports 0, and that says nothing about how far it came."""

    peer: str
    name: str
    role: str
    client_mode: bool
    epoch: int
    samples: int
    samples_per_second: float
    first_seen: float
    last_seen: float
    gone: Gone
    run: int = 0


@dataclass(frozen=True, slots=True)
class EventRecord:
    """A line for people; `kind` is for programs."""

    time: float
    level: Level
    kind: str
    peer: str
    text: str
    run: int = 0
    id: int = 0


@dataclass(frozen=True, slots=True)
class ReportRecord:
    """What a peer told the swarm about itself at one epoch: claims of a stranger. `loss` is its mean over the epoch
    that ended there, `samples` counts those that it computed since it started."""

    time: float
    peer: str
    epoch: int
    loss: float
    samples: int
    samples_per_second: float
    run: int = 0


@dataclass(frozen=True, slots=True)
class SwarmLoss:
    """The mean of the losses that peers reported for one epoch, weighted by their rates. `time`: the first report."""

    time: float
    epoch: int
    loss: float
    reporters: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over everything that the journal holds of one run."""

    epochs: int = 0
    own_samples: int = 0
    rounds_committed: int = 0
    rounds_failed: int = 0
    rounds_undecided: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


Record = RunRecord | EpochRecord | RoundRecord | PeerRecord | EventRecord | ReportRecord
