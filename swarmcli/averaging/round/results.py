"""What a committed round gives to a member."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from swarmcli.averaging.group import Group
from swarmcli.averaging.round.reducer import Average
from swarmcli.network import PeerID


@dataclass(frozen=True)
class AllreduceResult:
    """A committed round, as one member sees it; all but the bytes and, for an auxiliary, the averages are equal.

    averages      in the shapes of the inputs and beside them; read-only, for they may still be on their way to
                  others. Empty for an auxiliary, and when `total_weight` is zero: then nobody had anything to average
    contributors  whose tensors are in every part of the average, in the group's order
    weights       theirs
    left_out      peer → why its tensors are missing from some part on
    digest        32 bytes over averages, senders and weights
    tries         more than one if the group began again without reducers that were lost
    late          what was missing here was fetched after the group had committed
    nothing       why there was nothing to average, so that nobody exchanged anything; "" otherwise
    """

    averages: list[torch.Tensor]
    contributors: tuple[PeerID, ...]
    weights: Mapping[PeerID, float]
    left_out: Mapping[PeerID, str]
    digest: bytes
    bytes_sent: int
    bytes_received: int
    parts: tuple[Average, ...] = field(repr=False, default=())  # in order, with the senders of each
    tries: int = 1
    late: bool = False
    nothing: str = ""

    @classmethod
    def without_exchange(cls, reason: str) -> AllreduceResult:
        """Of a group that has nothing to average, as each of its members knows by itself."""
        return cls([], (), {}, {}, b"", bytes_sent=0, bytes_received=0, nothing=reason)

    @property
    def total_weight(self) -> float:
        return math.fsum(self.weights.values())

    @property
    def remark(self) -> str:
        """What was unusual, for people; "" for nothing."""
        remarks = [] if self.weights else [self.nothing or "nobody had any weight"]
        if self.tries > 1:
            remarks.append(f"in {self.tries} tries, since reducers were lost")
        if self.late:
            remarks.append("fetched here after the group had committed")
        return "; ".join(remarks)


def result_digest(averages: Sequence[Average]) -> bytes:
    """SHA-256 over the reducers' hashes of all parts, in order."""
    return digest_of_parts(b"".join(average.digest for average in averages))


def digest_of_parts(digests: bytes) -> bytes:
    """The same for hashes that lie one behind the other."""
    return hashlib.sha256(b"swarm result" + digests).digest()


def contributions(group: Group, averages: Sequence[Average]) -> tuple[dict[PeerID, float], dict[PeerID, str]]:
    """The weights of those who are in every part, and what is wrong with those who are only in some."""
    weights: dict[PeerID, float] = {}
    partly: dict[PeerID, str] = {}
    for index, member in enumerate(group.members):
        named = [average.weights[average.senders.index(index)] for average in averages if index in average.senders]
        if named and len(named) == len(averages) and len(set(named)) == 1:
            weights[member.peer_id] = named[0]
        elif named:
            equal = len(set(named)) == 1
            partly[member.peer_id] = "some of its parts did not arrive" if equal else "it named unlike weights"
    return weights, partly
