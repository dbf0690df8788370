"""Events as typed values that anyone may subscribe to.

The core packages emit events and know nobody who listens. Roles subscribe the journal and the terminal. The journal
keeps a value as it was emitted and gives the same type back, so a fact looks alike in the core, in the file, on the
terminal and on the dashboard.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from swarmcli.words import harmless, plural, roughly

logger = logging.getLogger(__name__)
notices = logging.getLogger("swarmcli.notices")

GOODBYE = "the peer has left"  # with these words a peer closes its connections when it leaves
RoundOutcome = Literal["committed", "failed", "undecided"]
Gone = Literal["", "left", "lost"]
ReasonKind = Literal[  # each has the name of its limit, or a comment that gives it
    "asked",  # by the user, no limit
    "hours",
    "busy",  # only_when_idle
    "battery",  # on_battery
    "metered",  # on_metered
    "heat",  # temperature
    "disk",
    "memory",
]


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events. Peers appear as the full text of their id.

    Who emits an event leaves `time` and `id` at 0: a listener knows which clock it shows, and a journal numbers its
    rows.
    """

    time: float = field(default=0.0, kw_only=True)  # seconds since 1970
    id: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class PeerConnected(Event):
    peer: str
    address: str


@dataclass(frozen=True, slots=True)
class WayChanged(Event):
    """A peer that stays connected is called over another kind of connection from now on: direct after one over a relay,
    or the other way round."""

    peer: str
    address: str
    relayed: bool


@dataclass(frozen=True, slots=True)
class PeerDisconnected(Event):
    peer: str
    reason: str

    @property
    def left(self) -> bool:
        """Whether it said goodbye to the network, and not to this connection alone."""
        return self.reason.endswith(GOODBYE)


@dataclass(frozen=True, slots=True)
class OwnAddressesChanged(Event):
    """Where this peer announces that it can be dialed, from now on."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReachabilityChanged(Event):
    """This peer has found out who can dial it. `sentence` says to people what that means."""

    dialable: bool | None  # from as far away as `scope`; None: not known yet
    scope: str  # "host", "lan" or "internet"
    addresses: tuple[str, ...]  # that are announced, those over relays last
    sentence: str


@dataclass(frozen=True, slots=True)
class PeerRefused(Event):
    """A peer was turned away, or something it sent was; `reason` is for people."""

    peer: str
    reason: str
    what: str = "connection"


@dataclass(frozen=True, slots=True)
class PeerBanned(Event):
    """Evidence that anyone can check shows that a peer lied: nobody averages with it in this run any more."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class MembershipEnded(Event):
    """The others do not take this peer any more, and have ended their connections with it: it is no member of its
    closed run, or another process has its key and was there first."""

    reason: str


@dataclass(frozen=True, slots=True)
class WokeUp(Event):
    """This process did nothing for so many seconds: the machine slept, or the process was stopped. Its connections
    are dead, and all that it knew about others is at least that old."""

    seconds: float


@dataclass(frozen=True, slots=True)
class PeerSeen(Event):
    """A peer of the run appeared or its record changed; `gone` when it said goodbye ("left"), or let its record expire
    ("lost"). `first_seen` is set like `time`, by who keeps the event."""

    peer: str
    name: str
    role: str
    epoch: int
    samples: int
    samples_per_second: float
    client_mode: bool
    gone: Gone = ""
    first_seen: float = field(default=0.0, kw_only=True)


@dataclass(frozen=True, slots=True)
class EpochReported(Event):
    """A trainer, perhaps this one, tells how an epoch went for it: the claim of a stranger."""

    peer: str
    epoch: int
    loss: float  # its mean over the epoch that ended there
    samples: int  # that it has computed since it started
    samples_per_second: float


@dataclass(frozen=True, slots=True)
class EpochLoss(Event):
    """The swarm's loss of an epoch, as this peer computes it from what others report. Emitted again when it changes."""

    epoch: int
    loss: float
    peers: int  # that have reported theirs


@dataclass(frozen=True, slots=True)
class PeerSilent(Event):
    """A peer of the run no longer answers, as far as can be told from here, or (`answers`) does so again."""

    peer: str
    name: str
    role: str
    answers: bool = False


@dataclass(frozen=True, slots=True)
class RoundFinished(Event):
    """One round of averaging ended for this peer."""

    round_id: str  # hex of the group id; "" when no group came about
    purpose: str  # the prefix: what was averaged
    outcome: RoundOutcome
    reason: str  # why it failed; of a committed one what was unusual, usually ""
    epoch: int  # -1 when the averager has no epochs
    leader: str
    members: tuple[str, ...]  # everyone in the group
    contributors: tuple[str, ...]  # those whose tensors are in the average
    left_out: Mapping[str, str]  # peer → why its tensors are not, or not all, in the average
    bytes_sent: int
    bytes_received: int
    seconds: Mapping[str, float] = field(default_factory=dict)  # stage → seconds spent in it

    @property
    def duration(self) -> float:
        """Seconds since the group was complete, because its members may have computed while it formed. For a round
        that found no group, the seconds of looking for one."""
        return math.fsum(self.seconds.values()) - (self.seconds.get("looking for group", 0.0) if self.round_id else 0.0)


@dataclass(frozen=True, slots=True)
class EpochCredited(Event):
    """A round brought this peer to `epoch`, and counted this much of each peer's work. Follows EpochAdvanced."""

    epoch: int
    run_samples: int  # of all epochs so far, by everyone
    samples: Mapping[str, float]  # contributor → the samples that it claimed, as far as the group let them count
    reduced: Mapping[str, int]  # reducer → bytes of tensors that it added up; empty for a round that was replayed
    seconds: float  # that the epoch took


@dataclass(frozen=True, slots=True)
class Contribution(Event):
    """One identity's contribution to a run, over all its starts and homes, as one peer that keeps count has seen it. An
    event carries an addition to it; the journal sums them up.

    Samples and hours are *claimed*: nobody can see how many samples another computer has computed, only how many its
    rounds let it count. Rounds, bytes and presence were *seen*. Name and team are what the peer calls itself.
    """

    peer: str
    name: str = ""  # "": it has chosen none
    team: str = ""
    samples: float = 0.0  # claimed; accepted by the rounds that ended epochs
    hours: float = 0.0  # claimed; of epochs that its samples are part of, or whose gradients it helped to add up
    rounds: int = 0  # seen: epochs in whose round it took part
    reduced_bytes: int = 0  # seen: of others' tensors and its own, which it added up for a group
    uptime: float = 0.0  # seen: seconds for which it answered as a peer of the run
    first: float = 0.0  # seconds since 1970 when it was seen first
    last: float = 0.0
    run_id: str = ""


@dataclass(frozen=True, slots=True)
class ContributionsCounted(Event):
    """From which epoch on, and up to which one, contributions to a run have been counted here."""

    run_id: str
    epoch: int
    run_samples: int  # of all epochs up to that one, by everyone
    since: int = 0  # the first epoch that was counted; 0: an earlier version began, and did not note it


@dataclass(frozen=True, slots=True)
class EpochAdvanced(Event):
    """This peer stepped its optimizer (or loaded a state) and is now at `epoch`."""

    epoch: int
    lineage: str
    samples: int  # samples of the whole swarm in the epoch that ended
    own_samples: int  # of which this peer's
    peers: int  # whose tensors were in the average
    loss: float | None  # this peer's mean loss over the epoch that ended
    seconds: float  # since the epoch before, without waiting for the run to begin or for a state
    averaging_seconds: float  # of which averaging and stepping
    # Both belong to the step that this peer made with a round's averaged gradient; None: it made no such step, used
    # local updates, or the norm is not finite.
    gradient_norm: float | None = None  # of the average, before the optimizer clips it
    update_norm: float | None = None  # of the change of the parameters; an estimate above a million values


@dataclass(frozen=True, slots=True)
class RunObserved(Event):
    """How the run looked to this peer at one moment; told every few seconds."""

    epoch: int
    alive: int  # peers
    trainers: int
    samples_per_second: float  # of all who compute
    loss: float | None  # the swarm's, of the last epoch


@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    """How good the model of `epoch` is on data that nobody trains on: as this peer measured, or as another claims."""

    epoch: int
    loss: float  # mean over the samples, in the unit of the task's loss
    samples: int  # that it was measured on
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the task, for example accuracy
    peer: str = ""  # who says so; "": this peer itself
    name: str = ""  # of that peer, for people

    @property
    def sentence(self) -> str:
        """The outcome, for people: "loss 0.3100, accuracy 0.9100"."""
        return ", ".join(f"{name} {value:.4f}" for name, value in {"loss": self.loss, **self.metrics}.items())

    @property
    def by(self) -> str:
        """Who says so, for people; "": this peer itself."""
        return f"by {self.name}" if self.peer else ""


@dataclass(frozen=True, slots=True)
class StateDownloaded(Event):
    epoch: int
    lineage: str
    donors: tuple[str, ...]
    bytes: int
    seconds: float
    reason: str  # why it was needed


@dataclass(frozen=True, slots=True)
class StateDonated(Event):
    peer: str
    epoch: int
    bytes: int


@dataclass(frozen=True, slots=True)
class RoundsReplayed(Event):
    """This peer stepped with averages of rounds that it had missed, and is now at `epoch`."""

    epoch: int
    lineage: str
    rounds: int
    reason: str  # why it was needed


@dataclass(frozen=True, slots=True)
class DriftMeasured(Event):
    """This peer has compared its parameters with those of its mates. Distances are relative to their length."""

    epoch: int
    distance: float  # of this peer, from the median of the sketches
    distances: Mapping[str, float]  # of everyone who told a sketch; 1e9: further, or not finite
    strays: tuple[str, ...]  # who has to download the state, and had not at the last comparison


@dataclass(frozen=True, slots=True)
class CheckpointWritten(Event):
    epoch: int
    path: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a peer does not compute. There is at most one of each kind."""

    kind: ReasonKind
    text: str  # completes "paused: …", for example "on battery"
    until: float | None = None  # when it ends by itself; None: when it is released


@dataclass(frozen=True, slots=True)
class ActivityStatus(Event):
    """Whether a peer works at this moment, and why not: somebody asked for it, or one of its limits. As an event it
    tells that this has changed."""

    state: Literal["running", "pausing", "paused", "stopping"] = "running"
    reasons: tuple[Reason, ...] = ()
    since: float = 0.0  # wall-clock seconds since 1970
    keeps: int = 0  # samples computed that no round has taken yet: they wait here for the run to go on, or for the
    # round in which a peer that leaves hands them in
    stays: float = math.inf  # seconds at most that it stays for them when it stops; 0: it leaves after its present step
    seconds_left: float | None = field(default=None, compare=False)  # until the round is expected that takes them, at
    # the moment of this status; None: that is not known
    sentence: str = field(init=False, default="", compare=False)  # for people, for example "paused: on battery"

    def __post_init__(self) -> None:
        object.__setattr__(self, "sentence", self._in_words())

    def _in_words(self) -> str:
        left = self.seconds_left
        why = f"{self.state}: {'; '.join(each.text for each in self.reasons)}".removesuffix(": ")
        match self.state:
            case "pausing":
                when = f", in about {roughly(left)}" if left else ", or keeps it if nobody else computes"
                return f"{why}; first it hands in what it has computed{when}"
            case "paused":
                return f"{why} ({plural(self.keeps, 'sample')} kept, to count later)" if self.keeps else why
            case "stopping" if self.keeps:
                soon = f"about {roughly(left)} left" if left else "now"
                when = f"{roughly(self.stays)} at most" if left is None else soon
                return f"leaving: handing in, {when} ({plural(self.keeps, 'sample')})"
            case "stopping":
                return "leaving"
        return "running"


@dataclass(frozen=True, slots=True)
class Noticed(Event):
    """Something a person should read that is none of the above. It is logged too: not every program subscribes."""

    level: Literal["info", "warning", "error"]
    text: str


class Events:
    """A list of listeners. A listener that raises is logged and does not disturb the others or the emitter.

    `emit` may be called from any thread; listeners run in the emitter's thread and must not block.
    """

    def __init__(self) -> None:
        self._listeners: list[Callable[[Event], object]] = []

    def subscribe(self, listener: Callable[[Event], object]) -> Callable[[], None]:
        """Adds a listener; the returned function removes it again."""
        self._listeners = [*self._listeners, listener]

        def unsubscribe() -> None:
            self._listeners = [other for other in self._listeners if other is not listener]

        return unsubscribe

    def emit(self, event: Event) -> None:
        """Calls every listener. Others may have written texts in the event: what could steer a terminal is removed
        here, for all who show them."""
        event = _harmless(event)
        if isinstance(event, Noticed):
            notices.log(logging.getLevelNamesMapping()[event.level.upper()], "%s", event.text)
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener failed on %r", event)


def _harmless(event: Event) -> Event:
    found = {each.name: getattr(event, each.name) for each in fields(event) if each.init}
    kept = {name: _cleaned(value) for name, value in found.items()}
    changed = {name: value for name, value in kept.items() if value is not found[name]}
    return replace(event, **changed) if changed else event


def _cleaned(value: Any) -> Any:
    """The value without what could steer a terminal; the very same object if nothing has to go."""
    if isinstance(value, str):
        text = harmless(value)
        return value if text == value else text
    if isinstance(value, tuple) and type(value) is tuple:
        parts = tuple(map(_cleaned, value))
        return value if all(new is old for new, old in zip(parts, value, strict=True)) else parts
    if isinstance(value, dict):
        pairs = {_cleaned(key): _cleaned(each) for key, each in value.items()}
        return value if pairs == value else pairs
    return value
