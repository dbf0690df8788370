"""What a peer tells people and newcomers about itself: the values under `{run_id}_peers`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic
from pydantic import ConfigDict, Field

from swarmcli.dht import OwnedSubkey
from swarmcli.optim.membership.ledger import MAX_RECENT, LastOutcome, Ledger
from swarmcli.optim.membership.lineage import Claim, Standing

if TYPE_CHECKING:
    from swarmcli.dht import DHTNode

MAX_ADDRESSES = 8
MAX_REASON = 200  # characters
Role = Literal["trainer", "auxiliary", "monitor"]
Phase = Literal[
    "joining",  # has not decided yet which lineage to train on
    "stranded",  # waits: nobody whom it can reach holds the state of the lineage that leads
    "training",
    "following",  # takes part in every round with weight zero
    "assisting",  # reduces for others, holds no state
    "lingering",  # is done, and serves its state to those who are not
    "left",  # says goodbye: its last report, by which it is no peer of the run any more
]
_UNSETTLED = ("joining", "stranded")
_Name = Annotated[str, Field(max_length=64)]
_Address = Annotated[str, Field(max_length=256)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, lt=1 << 48)]


def is_settled(phase: Phase) -> bool:
    """Whether a peer has decided on the lineage that it holds."""
    return phase not in _UNSETTLED


@dataclass(frozen=True, slots=True)
class PeerDescription:
    """Who a peer says it is. `name` is public; longer ones are cut to 64 characters."""

    role: Role = "trainer"
    name: str = ""
    device: str = "cpu"


class ReportedLoss(pydantic.BaseModel):
    """One epoch of a peer: the mean loss over its samples, and all its samples since it started."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    epoch: _Count
    loss: _Finite
    samples: _Count


class PeerReport(pydantic.BaseModel):
    """Signed by the peer it is about. Everything in it is a claim, and its texts are a stranger's."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

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
    client_mode: bool
    addresses: list[_Address] = Field(max_length=MAX_ADDRESSES)  # where it can be dialed, empty in client mode
    loss: _Finite | None  # mean over this peer's last epoch; None: it computes none, or the loss was not finite
    recent: list[ReportedLoss] = Field(
        default_factory=list, max_length=MAX_RECENT
    )  # of the latest epochs, oldest first
    drift: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None  # from the others' parameters, relative
    keeps: bool = False  # writes checkpoints as the run goes on, unless somebody does who comes before it
    leaving: bool = False  # others must not rely on it to keep what they hold
    last_outcome: LastOutcome
    last_reason: str = Field(max_length=MAX_REASON)
    time: float = Field(ge=0.0, allow_inf_nan=False)  # swarm time

    @property
    def claim(self) -> Claim:
        """The lineage that this peer holds. Auxiliaries hold none, they only repeat what they read."""
        standing = Standing(self.epoch, self.samples_seen, bytes.fromhex(self.lineage))
        return Claim(standing, settled=is_settled(self.phase))

    @property
    def holds_state(self) -> bool:
        """Whether others may ask this peer for the parameters of its lineage."""
        return self.phase != "assisting"


def describe(
    node: DHTNode,
    description: PeerDescription,
    terms: str,
    ledger: Ledger,
    phase: Phase,
    standing: Standing,
    samples_per_second: float = 0.0,
    drift: float | None = None,
    keeps: bool = False,
    leaving: bool = False,
) -> PeerReport:
    """The report of the peer that runs this node."""
    return PeerReport(
        terms=terms,
        role=description.role,
        name=description.name[:64],
        device=description.device[:64],
        phase=phase,
        epoch=standing.epoch,
        lineage=standing.lineage.hex(),
        samples_seen=standing.samples,
        samples=ledger.samples,
        samples_per_second=samples_per_second,
        client_mode=node.client_mode,
        addresses=[] if node.client_mode else list(node.endpoint.info.addresses)[:MAX_ADDRESSES],
        loss=ledger.last_loss,
        recent=[ReportedLoss(**each._asdict()) for each in ledger.recent],
        drift=drift,
        keeps=keeps,
        leaving=leaving,
        last_outcome=ledger.last_outcome,
        last_reason=ledger.last_reason[:MAX_REASON],
        time=node.endpoint.clock.now(),
    )


class PeerKeys(pydantic.BaseModel):
    """The schema of `{run_id}_peers` for the DHT's validators."""

    peers: dict[OwnedSubkey, PeerReport]
