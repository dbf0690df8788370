"""What the two sides of one exchange share at one member, and the faults of other members that they see there."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.round.buffers import Inputs, Results
from swarmcli.averaging.round.mates import GroupMates
from swarmcli.averaging.round.messages import MAX_WORDS
from swarmcli.averaging.round.pace import Tempo
from swarmcli.averaging.round.plan import Plan
from swarmcli.averaging.round.signed import SignedLists


@dataclass
class Faults:
    """Faults of members in one exchange, as this one saw them: index → reason; the first reason stays.

    left_out   members whose tensors are missing somewhere, as the reducers say
    refused    senders whose parts cannot be averaged here
    failed     reducers whose averages did not come here, or do not count
    suspects   members that kept this one waiting in vain, or did not show what they signed
    lost       suspects whose connections broke; a reducer whose connection broke is in `failed` alone
    untrue     reducers whose averages lack what this member had brought in time, or have what it has not
    refusing   reducers that answered, and refused
    broke      a connection with a reducer broke: the time of the round tells nothing of this member's line
    cut        senders that were lost with their streams, before they had brought all parts
    complaint  why averages are missing through no reducer's fault
    """

    left_out: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    suspects: dict[int, str] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    untrue: set[int] = field(default_factory=set)
    refusing: set[int] = field(default_factory=set)
    broke: bool = False
    cut: set[int] = field(default_factory=set)
    complaint: str = ""

    @property
    def reason(self) -> str:
        """Why averages are missing here, in at most MAX_WORDS characters; "": none is."""
        return "; ".join(filter(None, dict.fromkeys([self.complaint, *self.failed.values()])))[:MAX_WORDS]


@dataclass
class CommonMeans:
    """What both sides of one exchange work with at one member.

    senders        indices of all members whose tensors may be in an average
    mine, results  None for an auxiliary, which sends nothing and has no use for averages
    in_time        among strangers: this member has begun in time and has a seat, so a reducer that leaves it out lies
    """

    mates: GroupMates
    plan: Plan
    senders: frozenset[int]
    mine: Inputs | None
    results: Results | None
    options: AllreduceOptions
    signed: SignedLists
    tempo: Tempo
    faults: Faults
    in_time: bool
