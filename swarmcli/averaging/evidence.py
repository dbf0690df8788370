"""Proofs that a peer has lied. Anyone can check one, without having been there, and nobody can make one of an honest
peer. Each kind has a `culprit`, `verify` (whether it proves what it says, with bounded work) and `words`."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from swarmcli.averaging.config import MAX_PREFIX
from swarmcli.averaging.consensus.certificate import DoubleVote
from swarmcli.averaging.consensus.messages import GroupID, Signature, SignedAverages
from swarmcli.averaging.group import MAX_SEARCH_BYTES, is_listed
from swarmcli.network.identity import PeerID

__all__ = ["DoubleVote", "Evidence", "TwoGroups", "UnlikeAverages"]

_Prefix = Annotated[str, msgspec.Meta(max_length=MAX_PREFIX)]


class UnlikeAverages(msgspec.Struct, frozen=True, tag=True):
    """A reducer signed two unlike sets of averages in one try at a round. Honest ones form each average once."""

    culprit: PeerID
    prefix: _Prefix
    group_id: GroupID
    first: SignedAverages
    second: SignedAverages

    def verify(self) -> bool:
        """Whether it proves what it says; two signatures are checked."""
        both = self.first, self.second
        unlike = self.first.root != self.second.root
        return unlike and all(each.is_by(self.culprit, self.prefix, self.group_id) for each in both)

    def words(self) -> str:
        return f"it gave members of round {self.group_id.hex()[:8]} unlike averages, and signed both"


class TwoGroups(msgspec.Struct, frozen=True, tag=True):
    """A leader signed two groups in one `search` of its own. Honest ones begin one in each."""

    culprit: PeerID
    search: Annotated[bytes, msgspec.Meta(max_length=MAX_SEARCH_BYTES)]
    groups: tuple[GroupID, GroupID]
    listed: tuple[Signature, Signature]

    def verify(self) -> bool:
        """Whether it proves what it says; two signatures are checked."""
        both = zip(self.groups, self.listed, strict=True)
        return self.groups[0] != self.groups[1] and all(
            is_listed(self.culprit, self.search, group_id, signature) for group_id, signature in both
        )

    def words(self) -> str:
        return f"it began two groups at once, {self.groups[0].hex()[:8]} and {self.groups[1].hex()[:8]}"


Evidence: TypeAlias = DoubleVote | TwoGroups | UnlikeAverages  # a tagged union: further kinds join it with |
