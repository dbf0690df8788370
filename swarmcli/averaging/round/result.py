"""The result of a committed round: one type from the exchange of parts to the event that tells of it."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from swarmcli.averaging.certificate import RoundCertificate
from swarmcli.averaging.group import Group
from swarmcli.averaging.round.buffers import Average
from swarmcli.errors import RoundFailed, RoundUndecided
from swarmcli.network.identity import PeerID


@dataclass(frozen=True, kw_only=True, repr=False)
class RoundResult(Mapping[PeerID, Any]):
    """A committed round: a mapping from each member's id to its `gather`, and what happened. All members have the same,
    except bytes, times and, at an auxiliary, averages.

    The mapping has None for a member that handed in nothing readable.

    round_id      the group's id, if there was one
    group         None: this peer averaged alone, or replays a round that it missed
    weights       contributor → its weight, in the group's order, times the share of its tensors that is in the average:
                  half of the weight for a member that is in the parts of half of all elements. The other half is lost:
                  nobody hands it in again
    samples       contributor → its samples, likewise, bounded as the weights are; equal to these if nobody named others
    left_out      peer → why its tensors are missing, from some part on or in all, and how much of them counts
    nothing       why there was nothing to average, and no exchange; "" otherwise
    late          this peer fetched averages that it lacked after the group had committed
    certificate   proves to anyone that the group has committed this; None without an exchange
    reduced       reducer → bytes of the senders' tensors that it has added up, before compression; in a round of
                  several phases those of the last one
    seconds       stage → seconds spent in it
    several       as its members say, other groups end this epoch as well: the lineage then only counts epochs
    apart         as they say, the members hold unlike states of one position

    For the averager alone, which drops them once it has applied them:

    averages      in the shapes of the inputs and beside them; read-only, for they may still be on their way to
                  others. Empty for an auxiliary, and when `total_weight` is zero: then there was nothing to average
    parts         the averages in order, with the senders of each
    shares        of the reducing, by which the averages were cut into `parts`; () for a round of several phases, whose
                  averages were computed from the signed ones
    failed        members by whose fault averages were missing somewhere
    digest        32 bytes over averages, senders and weights
    """

    round_id: bytes
    group: Group | None = None
    weights: Mapping[PeerID, float] = field(default_factory=dict)
    samples: Mapping[PeerID, float] = field(default_factory=dict)
    left_out: Mapping[PeerID, str] = field(default_factory=dict)
    gathered: Mapping[PeerID, Any] = field(default_factory=dict)
    nothing: str = ""
    late: bool = False
    certificate: RoundCertificate | None = None
    reduced: Mapping[PeerID, int] = field(default_factory=dict)
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    several: bool = False
    apart: bool = False
    averages: Sequence[torch.Tensor] = ()
    parts: Sequence[Average] = ()
    shares: tuple[float, ...] = ()
    failed: tuple[PeerID, ...] = ()
    digest: bytes = b""

    @property
    def contributors(self) -> tuple[PeerID, ...]:
        """The members whose tensors are in the average, in whole or in part."""
        return tuple(self.weights)

    @property
    def members(self) -> tuple[PeerID, ...]:
        """The members that have tensors of their own, with or without weight; no auxiliaries."""
        return tuple(each.peer_id for each in self.group.members if not each.auxiliary) if self.group else ()

    @property
    def helpers(self) -> tuple[PeerID, ...]:
        """The auxiliaries."""
        return tuple(each.peer_id for each in self.group.members if each.auxiliary) if self.group else ()

    @property
    def total_weight(self) -> float:
        """The sum of the weights. 0: there was nothing to average (`remark` says why), and nobody's tensors changed."""
        return math.fsum(self.weights.values())

    @property
    def total_samples(self) -> int:
        """The samples in the average, of all contributors."""
        return round(math.fsum(self.samples.values()))

    @property
    def remark(self) -> str:
        """Anything unusual about the round, for people; "" for nothing."""
        remarks = [] if self.weights else [self.nothing or "nobody had any weight"]
        if self.late:
            remarks.append("fetched here after the group had committed")
        return "; ".join(remarks)

    def __getitem__(self, peer: PeerID) -> Any:
        return self.gathered[peer]

    def __iter__(self) -> Iterator[PeerID]:
        return iter(self.gathered)

    def __len__(self) -> int:
        return len(self.gathered)

    def __repr__(self) -> str:
        gathered = reprlib.repr({peer.short: value for peer, value in self.gathered.items()})
        return f"<RoundResult of {len(self.contributors)} contributors, {len(self.left_out)} left out: {gathered}>"


# RoundResult: every member of the lineage steps with the average. RoundFailed: nobody does, and each member's samples
# wait for the next round of this lineage. RoundUndecided: the others may or may not have stepped.
Outcome: TypeAlias = RoundResult | RoundFailed | RoundUndecided
