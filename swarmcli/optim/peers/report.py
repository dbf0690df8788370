"""What a peer counts of itself, and the report in which others read that under `{run_id}_peers`."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, ConfigDict, Field, model_validator

from swarmcli.averaging.seats import MAX_SECONDS
from swarmcli.dht import OwnedSubkey
from swarmcli.dht.records import encode_value
from swarmcli.events import EpochAdvanced, EpochCredited, EpochReported, Events, Noticed
from swarmcli.network.bounds import MAX_ADDRESS, MAX_ADDRESSES
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.optim.config import PeerDescription, Role
from swarmcli.optim.state.drift import TOLD_BYTES
from swarmcli.optim.state.lineage import MAX_COUNT, Claim, LineagePosition
from swarmcli.optim.state.norms import UsualNorms
from swarmcli.words import harmless

if TYPE_CHECKING:
    from swarmcli.dht import DHTNode
    from swarmcli.optim.modes.base import Advanced

MAX_REASON = 200  # characters
MOST_LOSS = 1e30  # a larger loss is as good as infinite; of smaller ones all means and differences are finite
MAX_RECENT = 16  # epochs: a peer that reads reports now and then still learns of each
MAX_METRICS = 8
MAX_UNKNOWN = 2048  # bytes of fields that this version does not know, for which readers have room
METRIC_NAME = re.compile(r"^[a-z][a-z0-9_]{0,23}\Z")
LastOutcome = Literal["", "committed", "alone", "failed", "undecided"]
Phase = Literal[
    "joining",  # has not decided yet which lineage to train on
    "stranded",  # waits: nobody that it can reach holds the state of the lineage that leads
    "training",
    "following",  # takes part in every round with weight zero
    "assisting",  # reduces for others, holds no state
    "lingering",  # is done, and hands out its state to those who are not
    "left",  # its last report: it is no peer of the run any more
]
_UNSETTLED = ("joining", "stranded")
Pause = Literal[
    "",  # it does what its phase says
    "pausing",  # computes nothing, and stays in its group until a round has taken what it computed before
    "paused",  # takes part in no round: nobody waits for it, and newcomers ask others first for a state
    "returning",  # finds out where the run is by now
]


def is_away(pause: Pause) -> bool:
    """Whether a peer takes part in no round, and has no say in where the run has gone meanwhile."""
    return pause in ("paused", "returning")


_Name = Annotated[str, Field(max_length=64), AfterValidator(harmless)]
_Address = Annotated[str, Field(max_length=MAX_ADDRESS)]
_Loss = Annotated[float, Field(gt=-MOST_LOSS, lt=MOST_LOSS)]
_MetricName = Annotated[str, Field(pattern=METRIC_NAME)]
_Count = Annotated[int, Field(ge=0, lt=1 << 48)]


def is_settled(phase: Phase) -> bool:
    """Whether a peer has decided on the lineage that it holds."""
    return phase not in _UNSETTLED


class ReportedLoss(pydantic.BaseModel):
    """One epoch of a peer: the mean loss over its samples, and all its samples since it started."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    epoch: _Count
    loss: _Loss
    samples: _Count


class ReportedEvaluation(ReportedLoss):
    """A peer's last evaluation: the loss of the model of `epoch` on `samples` that nobody trains on, and the metrics of
    the run's task."""

    metrics: dict[_MetricName, _Loss] = Field(default_factory=dict, max_length=MAX_METRICS)


class PeerMetrics:
    """Counts one peer's samples, losses and outcomes, and emits the events of its epochs."""

    def __init__(self, peer_id: PeerID, events: Events, *, follows: bool = False) -> None:
        """`follows`: of a monitor, which tells the run's owner what helps."""
        self.samples = 0  # by this peer since it started
        self.last_loss: float | None = None  # mean of the last epoch that had one
        self.recent: deque[ReportedLoss] = deque(maxlen=MAX_RECENT)  # of the latest epochs that had one, oldest first
        self.evaluation: ReportedEvaluation | None = None
        self.ends: int | None = None  # see PeerReport.ends
        self.last_outcome: LastOutcome = ""
        self.last_reason = ""
        self._peer_id = peer_id
        self._events = events
        self._follows = follows
        self._usual = UsualNorms(advises=follows)
        self._loss_sum = 0.0
        self._loss_weight = 0.0
        self._epoch_began: float | None = None  # loop time, plus the seconds that do not count

    def begin(self) -> None:
        """The present epoch begins for this peer now: before, it only waited."""
        self._epoch_began = loop_time()

    def leave_out(self, seconds: float) -> None:
        """This peer waited for others: these seconds do not count in the length of the present epoch."""
        if self._epoch_began is not None:
            self._epoch_began += seconds

    def note_loss(self, loss: float, weight: float) -> None:
        """`loss` is a mean in the present epoch over `weight`: samples, or the weight of its steps if that is
        another. A loss beyond MOST_LOSS, or that is no number, does not count."""
        if abs(loss) < MOST_LOSS and weight > 0:
            self._loss_sum += loss * weight
            self._loss_weight += weight

    def note_evaluation(self, epoch: int, loss: float, samples: int, metrics: Mapping[str, float]) -> None:
        """Reports an evaluation, without what reports cannot hold: a loss or metric beyond MOST_LOSS or that is no
        number, metrics with other names, and too many of them. From any thread."""
        if abs(loss) < MOST_LOSS:
            told = [(n, value) for n, value in metrics.items() if METRIC_NAME.match(n) and abs(value) < MOST_LOSS]
            told = told[:MAX_METRICS]
            self.evaluation = ReportedEvaluation(epoch=epoch, loss=loss, samples=samples, metrics=dict(told))

    def note_outcome(self, outcome: LastOutcome, reason: str = "") -> None:
        """How the last round ended."""
        self.last_outcome, self.last_reason = outcome, reason

    def forget_losses(self) -> None:
        """Drops the losses of the present epoch: they are of parameters that have been replaced."""
        self._loss_sum, self._loss_weight = 0.0, 0.0

    def end_epoch(
        self,
        position: LineagePosition,
        step: Advanced | None = None,
        rate: float = 0.0,
    ) -> EpochAdvanced:
        """Ends the epoch that led this peer to `position`, by a round's `step` or (None) by another peer's state. Emits
        its event and returns it, and tells of a norm far beyond the usual; a monitor warns. `rate`: samples per second
        of this peer."""
        loss = self._loss_sum / self._loss_weight if self._loss_weight else None
        if loss is not None:
            self.last_loss = loss
            self.recent.append(ReportedLoss(epoch=position.epoch, loss=loss, samples=self.samples))
            self._events.emit(EpochReported(self._peer_id.text, position.epoch, loss, self.samples, rate))
        self.forget_losses()
        began, norms = self._epoch_began, step.norms if step else None
        self.begin()
        advanced = EpochAdvanced(
            epoch=position.epoch,
            lineage=position.lineage.hex(),
            samples=min(step.committed.total_samples, MAX_COUNT) if step else 0,
            own_samples=step.own_samples if step else 0,
            peers=len(step.committed.contributors) if step else 0,
            loss=loss,
            seconds=max(0.0, loop_time() - began) if began is not None else 0.0,
            averaging_seconds=step.seconds if step else 0.0,
            gradient_norm=norms.gradient if norms else None,
            update_norm=norms.update if norms else None,
        )
        self._events.emit(advanced)
        if norms is not None and (text := self._usual.look(position.epoch, norms)):
            self._events.emit(Noticed("warning" if self._follows else "info", text))
        return advanced


def credited(
    position: LineagePosition,
    weights: Mapping[PeerID, float],
    reduced: Mapping[PeerID, int] | None = None,
    seconds: float = 0.0,
) -> EpochCredited:
    """Makes the event that says what the round that led to `position` has counted of each peer's work."""
    return EpochCredited(
        position.epoch,
        position.samples,
        {peer.text: weight for peer, weight in weights.items()},
        {peer.text: size for peer, size in (reduced or {}).items()},
        seconds,
    )


class PeerReport(pydantic.BaseModel):
    """A peer's report about itself, which it signs. Everything in it is a claim, and its texts are a stranger's.
    Readers leave out fields of a later version: if that adds one, with a default, peers of this version still read the
    report.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    terms: str = Field(max_length=64)  # a digest of the fingerprint: peers with another one are of another run
    role: Role
    name: _Name
    device: _Name
    phase: Phase
    epoch: _Count
    lineage: str = Field(pattern=re.compile(r"^[0-9a-f]{64}\Z"))
    samples_seen: _Count  # in the lineage so far, by everyone
    samples: _Count  # by this peer since it started
    samples_per_second: float = Field(ge=0.0, lt=1e12, allow_inf_nan=False)
    # Seconds that a round takes to send on its line; 0: it sends none, or nothing has shown that yet.
    sending: float = Field(default=0.0, ge=0.0, le=MAX_SECONDS, allow_inf_nan=False)
    limited: bool = False  # its user's limit explains why sending takes so long
    client_mode: bool  # nobody can dial it directly
    addresses: list[_Address] = Field(max_length=MAX_ADDRESSES)  # in client mode those at relays
    loss: _Loss | None  # mean over this peer's last epoch; None: it computes none, or tells nobody
    # The latest epochs, oldest first.
    recent: list[ReportedLoss] = Field(default_factory=list, max_length=MAX_RECENT)
    evaluation: ReportedEvaluation | None = None
    # The epoch after which the run ends, as its evaluator has decided: others take that from no other peer.
    ends: _Count | None = None
    drift: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None  # from the others' parameters, relative
    # Sketch of its parameters at one of its last positions, and the lineage of that; see DriftMonitor.
    sketch: Annotated[bytes, Field(max_length=TOLD_BYTES)] = b""
    keeps: bool = False  # writes checkpoints as the run goes on, unless a peer that comes before it does
    version: _Name = ""  # of its swarm; "": older than 0.2
    team: _Name = ""  # for which its contribution counts; "": none
    leaving: bool = False  # others must not rely on it to keep what they hold
    pause: Pause = ""
    # The owner's word that this position is the run's: SHA-256 of its parameters, and the signature, in hexadecimal.
    owners_word: str = Field("", pattern=re.compile(r"^([0-9a-f]{192})?\Z"))
    # Digest of its frozen weights, or of its base if nobody has said which weights are frozen; "": it has none.
    frozen: str = Field("", pattern=re.compile(r"^([0-9a-f]{64})?\Z"))
    last_outcome: LastOutcome
    last_reason: Annotated[str, Field(max_length=MAX_REASON), AfterValidator(harmless)]
    time: float = Field(ge=0.0, allow_inf_nan=False)  # swarm time

    @model_validator(mode="before")
    @classmethod
    def _check_unknown(cls, fields: Any) -> Any:
        unknown = {name: fields[name] for name in fields.keys() - cls.model_fields} if isinstance(fields, dict) else {}
        if unknown and len(encode_value(unknown)) > MAX_UNKNOWN:
            raise ValueError(f"fields of a later version take at most {MAX_UNKNOWN} bytes")
        return fields

    @property
    def claim(self) -> Claim:
        """The position that this peer reports. While it is away it does not count as settled. Auxiliaries hold no
        state; they repeat what they have read."""
        position = LineagePosition(self.epoch, self.samples_seen, bytes.fromhex(self.lineage))
        return Claim(position, settled=is_settled(self.phase) and not is_away(self.pause))

    @property
    def holds_state(self) -> bool:
        """Whether others may ask this peer for the parameters of its lineage."""
        return self.phase != "assisting"


def describe(
    node: DHTNode,
    description: PeerDescription,
    terms: str,
    metrics: PeerMetrics,
    phase: Phase,
    position: LineagePosition,
    samples_per_second: float = 0.0,
    **more: Any,
) -> PeerReport:
    """Makes the report of the peer that runs this node. `more`: further fields of PeerReport, from
    `Participant.report`; those that auxiliaries lack, from `OptimizerCore.report`."""
    return PeerReport(
        terms=terms,
        role=description.role,
        name=description.name[:64],
        device=description.device[:64],
        phase=phase,
        epoch=position.epoch,
        lineage=position.lineage.hex(),
        samples_seen=position.samples,
        samples=metrics.samples,
        samples_per_second=samples_per_second,
        client_mode=node.client_mode,
        addresses=list(node.endpoint.addresses)[:MAX_ADDRESSES],
        loss=metrics.last_loss,
        recent=list(metrics.recent),
        evaluation=metrics.evaluation,
        ends=metrics.ends,
        team=description.team[:64],
        version=description.version[:64],
        last_outcome=metrics.last_outcome,
        last_reason=metrics.last_reason[:MAX_REASON],
        time=node.endpoint.clock.now(),
        **more,
    )


class PeerKeys(pydantic.BaseModel):
    """The schema of `{run_id}_peers` for the DHT's validators."""

    peers: dict[OwnedSubkey, PeerReport]
