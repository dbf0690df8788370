"""The reducers' signatures of one try: they show a reducer that gives members unlike averages."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from swarmcli.averaging.consensus.messages import AVERAGES, MAX_SIGNED, SignedAverages
from swarmcli.averaging.group import Group
from swarmcli.averaging.trust import PeerTrust, UnlikeAverages
from swarmcli.network.identity import Identity


class SignedLists:
    """The signatures that this member has, one for each reducer, all verified. Each reducer signs once in a try."""

    def __init__(self, group: Group, prefix: str, trust: PeerTrust) -> None:
        """`trust` gets the proofs."""
        self._group, self._prefix, self._trust = group, prefix, trust
        self._lists: dict[int, SignedAverages] = {}

    @property
    def told(self) -> dict[int, SignedAverages]:
        """Reducer → its signature, as many as a message takes."""
        return dict(islice(self._lists.items(), MAX_SIGNED))

    def sign(self, me: int, identity: Identity, root: bytes) -> SignedAverages:
        """This member's own, as a reducer. The same each time: it forms its averages once."""
        if me not in self._lists:
            fields = self._prefix.encode(), self._group.group_id, root
            self._lists[me] = SignedAverages(root, identity.sign(AVERAGES, *fields))
        return self._lists[me]

    def take(self, reducer: int, signed: SignedAverages, root: bytes) -> bool:
        """A reducer's signature for the averages that it gave here, with this root. Returns whether it is valid:
        otherwise these averages do not count."""
        genuine = self._is_by(reducer, signed)
        if genuine:  # also if it is of other averages than the reducer gave: others may have unlike ones
            self.compare({reducer: signed})
        return genuine and signed.root == root

    def compare(self, theirs: Mapping[int, SignedAverages]) -> None:
        """The signatures that another member has. If one differs, this member bans the reducer. If one is false, it
        does not read on: so a liar costs no more than one check."""
        for reducer, signed in theirs.items():
            mine = self._lists.get(reducer)
            if mine is not None and mine.root == signed.root:
                continue
            if reducer >= len(self._group) or not self._is_by(reducer, signed):
                return
            if mine is None:
                self._lists[reducer] = signed
            else:
                culprit, group_id = self._group.members[reducer].peer_id, self._group.group_id
                self._trust.prove(UnlikeAverages(culprit, self._prefix, group_id, mine, signed))

    def banned(self) -> frozenset[int]:
        """The banned members, by index."""
        members = enumerate(self._group.members)
        return frozenset(index for index, member in members if self._trust.is_banned(member.peer_id))

    def _is_by(self, reducer: int, signed: SignedAverages) -> bool:
        return signed.is_by(self._group.members[reducer].peer_id, self._prefix, self._group.group_id)
