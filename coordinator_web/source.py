"""What a dashboard shows, as typed values, and the protocol of whoever supplies them.

Texts in these values (names, reasons) may come from other peers: they are data, never markup. Moments are wall-clock
seconds since 1970, durations seconds, sizes bytes. Numbers are finite or None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

State = Literal[
    "waiting",  # nobody computes yet
    "training",
    "averaging",  # a round is under way
    "synchronizing",  # this peer downloads the state
    "stranded",  # it waits, since nobody whom it can reach holds the state of the run
    "finished",  # the run reached its last epoch
    "stopping",
]
Health = Literal[
    "in step",
    "behind",
    "not answering",  # no longer, but it said no goodbye either
    "waiting",  # for the state of the run, which it cannot reach
    "another model",  # is what it trains
    "left",  # with a goodbye
    "lost",  # without one
]

SHORT_ID = 10  # characters of a peer id that people are shown
MOST_MEMBERS = 12  # of a round's group, that are named on the page


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePeer:
    """What is known of one peer at this moment, itself included."""

    peer_id: str
    role: str
    epoch: int
    name: str = ""
    samples: int = 0  # in the epoch that it is in
    samples_per_second: float = 0.0
    loss: float | None = None
    lineage: str = ""
    device: str = ""
    client_mode: bool = False
    seen_seconds_ago: float = 0.0
    answers: bool = True
    apart: Literal["", "waiting", "another model"] = ""  # where it does not train what the peer that shows it does
    drift: float | None = None  # of its parameters from the others', relative to their length; None: unknown
    round_outcome: str = ""  # of its last round, by its own account
    round_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStatus:
    """The run at this moment as one peer sees it; `samples` of `target` are computed in `epoch`, by all together."""

    run_id: str
    state: State
    peer_id: str  # of the peer that shows it
    role: str
    epoch: int
    samples: int
    target: int
    name: str = ""
    eta_seconds: float | None = None  # to the end of the epoch; None: unknown
    run_eta_seconds: float | None = None  # to the end of the last epoch
    alarm: str = ""  # what a person has to mend, with the remedy
    max_epochs: int | None = None
    lineage: str = ""
    mode: str = ""  # how the run averages, in words
    join_line: str = ""  # the command with which others join
    result: str = ""  # of a run that has finished: what became of its model at this peer, in words
    peers: tuple[LivePeer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What the peer that shows the dashboard did for the run. `share` is its part of the last epochs' samples."""

    samples: int  # in the current epoch
    total_samples: int
    epochs: int
    share: float | None
    samples_per_second: float
    loss: float | None
    rounds_committed: int
    rounds_failed: int
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The head of the page."""

    run_id: str
    state: State
    peer_id: str
    role: str
    name: str
    epoch: int
    max_epochs: int | None
    samples: int
    target: int
    eta_seconds: float | None
    run_eta_seconds: float | None
    alarm: str
    samples_per_second: float
    loss: float | None
    trainers: int
    auxiliaries: int
    monitors: int
    started: float | None  # when this peer began
    now: float  # the moment of this status, by the clock of the peer that shows it
    join_line: str
    mode: str = ""  # how the run averages, in words
    result: str = ""  # of a run that has finished: what became of its model at this peer, in words
    own: Contribution | None = None  # None where the peer computes and reduces nothing
    notice: str = ""  # why the histories may be incomplete


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    peer_id: str
    short_id: str
    name: str
    role: str
    device: str
    client_mode: bool
    me: bool
    epoch: int
    samples: int
    samples_per_second: float
    share: float | None  # of the samples of the last epochs, 0 to 1; None: unknown
    loss: float | None
    last_seen: float
    health: Health
    trouble: str  # why its last round did not succeed; "" when it did
    drift: float | None = None  # of its parameters from the others', relative to their length; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRow:
    """One finished epoch. `loss` is the swarm's mean where peers reported theirs, this peer's own otherwise; the
    durations are None where only others' reports tell of the epoch."""

    epoch: int
    time: float
    loss: float | None
    own_loss: float | None
    samples: int
    peers: int
    seconds: float | None
    averaging_seconds: float | None
    samples_per_second: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    peer_id: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """Somebody in a round's group, by name or short id."""

    name: str
    contributed: bool  # its tensors are in the average


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow:
    """One round of averaging. `id` grows with time.

    group    those of its members who fit on a page, the leader first; `members` counts all
    seconds  from when there was a group
    stages   what this peer did, in order → seconds
    what     "states" where parameters were averaged to keep peers together; "" for the round that ends an epoch
    """

    id: int
    time: float
    purpose: str
    epoch: int
    outcome: str
    reason: str
    leader: str  # a name or short id
    members: int
    contributors: int
    left_out: tuple[LeftOut, ...]
    seconds: float
    group: tuple[GroupMember, ...] = ()
    stages: Mapping[str, float] = field(default_factory=dict)
    what: str = ""
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """A line for people. `id` grows with time."""

    id: int
    time: float
    level: Literal["detail", "info", "warning", "error"]
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything at once: what a page needs that was just opened, or that lost its connection."""

    status: RunStatus
    peers: tuple[PeerRow, ...] = ()
    epochs: tuple[EpochRow, ...] = ()
    rounds: tuple[RoundRow, ...] = ()
    events: tuple[EventRow, ...] = field(default=())


class DashboardSource(Protocol):
    """Whoever knows a run. Methods are called from worker threads, several at once, about twice a second while a page
    is open, and answer with what they have: they do not raise and do not wait for the network."""

    def status(self) -> RunStatus: ...

    def peers(self) -> Sequence[PeerRow]:
        """The peers of the run, this one first, then by role and name: an order that stays while they train."""
        ...

    def epochs(self, *, after: int = -1, limit: int = 600) -> Sequence[EpochRow]:
        """Finished epochs above `after`, by number; thinned out evenly to `limit` rows, the last one kept. The last
        few may still change, as reports arrive."""
        ...

    def rounds(self, *, after: int = 0, limit: int = 100) -> Sequence[RoundRow]:
        """Rounds with an id above `after`, oldest first; the newest `limit` of them."""
        ...

    def events(self, *, after: int = 0, limit: int = 200) -> Sequence[EventRow]:
        """Events with an id above `after`, oldest first; the newest `limit` of them."""
        ...
