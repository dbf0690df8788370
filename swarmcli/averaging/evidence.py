"""Proofs that a peer has lied. Anyone can check one, without having been there, and nobody can make one of an honest
peer."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from swarmcli.averaging.consensus.certificate import is_vote
from swarmcli.averaging.consensus.messages import Ballot, GroupID, Hash, Kind, Signature
from swarmcli.network.identity import PeerID


class DoubleVote(msgspec.Struct, frozen=True, tag=True):
    """A peer has signed two unlike values in one ballot of one group: `values` are their hashes."""

    culprit: PeerID
    group_id: GroupID
    ballot: Ballot
    kind: Kind
    values: tuple[Hash, Hash]
    signatures: tuple[Signature, Signature]

    def verify(self) -> bool:
        """Whether it proves what it says; two signatures are checked."""
        return self.values[0] != self.values[1] and all(
            is_vote(signature, self.culprit, self.group_id, self.ballot, self.kind, value)
            for value, signature in zip(self.values, self.signatures, strict=True)
        )

    def words(self) -> str:
        return f"it voted twice in ballot {self.ballot} of round {self.group_id.hex()[:8]}"


Evidence: TypeAlias = DoubleVote  # a tagged union: further kinds join it with |
