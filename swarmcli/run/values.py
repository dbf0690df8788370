"""The values that the dashboard shows: each is a JSON object below /api/v1, its fields the object's keys.

Texts in these values (names, reasons) may come from other peers: they are data, never markup. Moments are wall-clock
seconds since 1970, durations seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from swarmcli.events import ActivityStatus, Contribution, EpochAdvanced, EpochReported, Evaluated, RoundFinished
from swarmcli.journal import Moment, Totals
from swarmcli.words import roughly

T = TypeVar("T")
State = Literal[
    "waiting",  # nobody computes yet
    "training",
    "averaging",  # a round is under way
    "synchronizing",  # this peer downloads the state
    "stranded",  # it waits, since nobody whom it can reach holds the state of the run
    "following",  # this trainer computes nothing, since its samples cannot count
    "standing",  # the epoch should have ended, and does not
    "finished",  # the run reached its last epoch
]
Health = Literal[
    "in step",
    "behind",
    "catching up",  # with the run: it does not know yet where the run is, or downloads the state
    "line too slow",  # for this trainer's samples to count: it follows the run
    "not answering",  # any more, and it said no goodbye
    "waiting",  # for the state of the run, which it cannot reach
    "another model",  # is what it trains
    "paused",  # by its user, or by a limit that its user has set
    "leaving",  # computes no more: it hands in what it has computed, and ends
    "left",  # with a goodbye
    "lost",  # without one
]
AlertKind = Literal[
    "stalled",  # no epoch ends any more, though somebody should compute
    "no donor",  # nobody holds the state, so nobody can join and a crash loses the run
    "diverged",  # the loss has risen far and stays there, or is no number
]
Way = Literal["direct", "relayed", "punched"]  # punched: direct, opened by both ends together


@dataclass(frozen=True, slots=True)
class StateInWords:
    """How every view of a run says what the run does. `tone`: "good", "calm", "warn" or "bad"."""

    words: str
    tone: str
    rests: bool = False  # then no rate is shown
    instead: str = ""  # shown in place of the time that the epoch still takes


STATES: Mapping[State, StateInWords] = {
    "waiting": StateInWords("waiting for trainers", "calm", True, "nobody computes"),
    "training": StateInWords("training", "good"),
    "averaging": StateInWords("averaging", "good", False, "averaging with the others…"),
    "synchronizing": StateInWords("joining the run", "warn", True, "looking for it"),
    "stranded": StateInWords("waiting: out of reach of the others", "bad", True, "nobody in reach holds the model"),
    "following": StateInWords("computing nothing", "warn"),
    "standing": StateInWords("waiting: the run stands still", "warn", True, "it does not end"),
    "finished": StateInWords("finished", "good", True, "the run is complete"),
}
HOW: Mapping[Health, str] = {  # follows a peer's name
    "not answering": "does not answer",
    "catching up": "is catching up",
    "behind": "is behind",
    "waiting": "cannot reach the model",
    "another model": "trains another model",
    "line too slow": "follows, since its line is too slow",
    "paused": "pauses",
    "leaving": "leaves",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """What the peer that shows it knows of one peer at this moment."""

    peer_id: str
    role: str
    epoch: int
    name: str = ""
    device: str = ""
    version: str = ""  # of swarm; "": it does not say, or only the journal knows the peer
    client_mode: bool = False  # nobody can dial it
    way: Way | None = None  # how the peer that shows this is connected to it; None: not at all
    me: bool = False
    samples: int = 0  # in its present epoch
    samples_per_second: float = 0.0
    share: float | None = None  # of the samples of the last epochs, 0 to 1; None: unknown
    loss: float | None = None
    last_seen: float = 0.0
    told: float | None = None  # when the report with all this was made; None: at the moment of the status
    health: Health = "in step"
    trouble: str = ""  # why its last round did not succeed, as it says itself; "": it did
    drift: float | None = None  # of its parameters from the others', relative to their length; None: unknown

    @property
    def counts(self) -> bool:
        """Whether what it computes goes into the epoch. A peer that is gone, or trains another model, adds nothing; one
        that pauses hands in what it has computed."""
        return self.health in ("in step", "behind", "paused", "leaving")

    @property
    def computes(self) -> bool:
        """Whether an epoch may wait for what this peer computes."""
        return self.role == "trainer" and self.health in ("in step", "behind")

    @property
    def called(self) -> str:
        return self.name or self.peer_id[:10]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The run at this moment as one peer sees it; `samples` of `target` are computed in `epoch`, by all together."""

    run_id: str
    state: State
    peer_id: str  # of the peer that shows it
    role: str
    epoch: int
    samples: int
    target: int
    now: float = 0.0  # the moment of this status, by the clock of the peer that shows it
    started: float | None = None  # when this peer began
    name: str = ""
    max_epochs: int | None = None
    samples_per_second: float = 0.0  # of all peers that compute
    eta_seconds: float | None = None  # to the end of the epoch; None: unknown
    run_eta_seconds: float | None = None  # to the end of the last epoch
    losses: tuple[float, ...] = ()  # of the last epochs, the swarm's, the oldest first
    last_epoch: EpochAdvanced | None = None  # the last one that was stepped here
    evaluation: Evaluated | None = None  # the last one, by this peer or another: most peers never evaluate
    evaluated: str = ""  # the same in words, with the best
    best: Evaluated | None = None  # the one with the lowest loss among those that count for the run
    alarm: str = ""  # what a person has to mend, with the remedy
    overdue: float = 0.0  # seconds for which the epoch should be over, or nobody has computed in it; 0: it goes on
    waits: str = ""  # if the run does not go on: for whom it waits, and what helps
    seat: str = ""  # why this trainer's samples cannot count, in figures, and what helps; "": they can
    download: str = ""  # of a peer that downloads the state: how much, how far, and how long it takes
    round_bytes: int = 0  # bytes that a trainer sends in each round, and as many that it receives; 0: unknown
    join_line: str = ""  # the command with which others join
    link: str = ""  # the link in it; "": others need the recipe file
    install: str = "swarmcli"  # the package that somebody without swarm installs first, perhaps with an extra
    link_reach: str = ""  # for whom the link is no use, or why there is none
    reach: str = ""  # who can dial the peer that shows it, and what that means for taking part, in a sentence
    moved: str = ""  # bytes that the peer that shows it has sent and received since it started, and for what
    result: str = ""  # after the run has finished: what became of its model at this peer, in words
    peers: tuple[PeerStatus, ...] = ()
    notice: str = ""  # why the histories may be incomplete
    # These follow from the fields above: the state, as StateInWords has it, and what is left of the epoch.
    state_in_words: str = field(init=False, default="")
    tone: str = field(init=False, default="")
    rests: bool = field(init=False, default=False)
    left: str = field(init=False, default="")

    def __post_init__(self) -> None:
        shown = STATES[self.state]
        estimate = "" if self.eta_seconds is None else f"about {roughly(self.eta_seconds)} left"
        left = (self.download if self.state == "synchronizing" else "") or shown.instead or estimate
        words = "catching up with the run" if self.state == "synchronizing" and self.download else shown.words
        told = {"state_in_words": words, "tone": shown.tone, "rests": shown.rests, "left": left}
        for name, value in told.items():
            object.__setattr__(self, name, value)

    @property
    def where(self) -> str:
        """For example "epoch 12 of 200"."""
        return f"epoch {self.epoch:,}" + ("" if self.max_epochs is None else f" of {self.max_epochs:,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Me:
    """The shown peer as it concerns its user; `run` says which peer it is."""

    sentence: str  # what it does at this moment
    activity: ActivityStatus = field(default_factory=ActivityStatus)
    samples_per_second: float = 0.0  # as in the sentence
    share: float | None = None  # of the samples of the last epochs, 0 to 1
    samples: int = 0  # accepted by rounds, over all its starts
    hours: float = 0.0  # length of the epochs to which it gave something, over all its starts
    rank: int | None = None  # by samples, from 1; None: not among those that contributed
    ranked: int = 0  # how many are
    told_by: str = ""  # whose word `samples`, `hours` and `rank` are; "": its own totals
    rests_on: str = ""  # whose count the list of contributions is, and what part of the run it covers, in a sentence
    totals: Totals = field(default_factory=Totals)
    limits: Mapping[str, object] = field(default_factory=dict)  # as `GET limits` gives them


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Peers that are there, by role and by health."""

    alive: int = 0
    trainers: int = 0
    auxiliaries: int = 0
    monitors: int = 0
    paused: int = 0
    following: int = 0  # trainers whose samples cannot count


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something that the owner of a run has to look at; it stands until it is over."""

    id: str  # a new one each time that it begins
    kind: AlertKind
    text: str
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """`state`: everything that a page shows at first, except the lists."""

    run: RunStatus  # its `peers` are empty here
    me: Me
    counts: Counts = field(default_factory=Counts)
    alerts: tuple[Alert, ...] = ()
    can_control: bool = False  # whether the caller may pause, resume and change limits


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPage:
    """`peers`: `total` peers match; `rows` are the ones asked for."""

    total: int
    rows: tuple[PeerStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDetails:
    """`peers/{id}`."""

    peer: PeerStatus
    first_seen: float | None
    history: tuple[EpochReported, ...]  # the oldest first
    rounds: tuple[RoundFinished, ...]  # the newest first
    contribution: Contribution | None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """`history`, the oldest first; spans in which this peer did not run have no points."""

    points: tuple[Moment, ...] = ()
    evaluations: tuple[Evaluated, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """`rounds`, the oldest first."""

    rows: tuple[RoundFinished, ...]
    names: Mapping[str, str]  # peer → name, for peers in `rows` that have one


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointShown:
    """A checkpoint in the home of the shown peer; `checkpoints/{name}.tar` is the whole directory."""

    name: str
    epoch: int
    time: float
    bytes: int
    latest: bool
    loss: float | None = None  # of its evaluation
    best: bool = False
    problem: str = ""  # why it cannot be used


def shown_as(kind: type[T], record: object, **further: Any) -> T:
    """Makes a value of this kind from the record's attributes of its fields' names, and from `further` ones."""
    names = {each.name for each in fields(kind)} - further.keys()  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: getattr(record, name) for name in names if hasattr(record, name)}, **further)
