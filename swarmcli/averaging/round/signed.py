"""What the reducers of one try have signed: a reducer that gives members unlike averages is found by it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from swarmcli.averaging.bans import Bans, UnlikeAverages
from swarmcli.averaging.consensus.messages import AVERAGES, MAX_SIGNED, SignedAverages
from swarmcli.averaging.group import Group
from swarmcli.network.identity import Identity


class SignedLists:
    """Those that this member has, one for each reducer, all verified. Each reducer signs once in a try."""

    def __init__(self, group: Group, prefix: str, bans: Bans) -> None:
        """`bans`: who gets the evidence."""
        self._group, self._prefix, self._bans = group, prefix, bans
        self._lists: dict[int, SignedAverages] = {}

    @property
    def told(self) -> dict[int, SignedAverages]:
        """By reducer, as many as a message takes."""
        return dict(islice(self._lists.items(), MAX_SIGNED))

    def sign(self, me: int, identity: Identity, root: bytes) -> SignedAverages:
        """This member's own, as a reducer. The same each time: it forms its averages once."""
        if me not in self._lists:
            fields = self._prefix.encode(), self._group.group_id, root
            self._lists[me] = SignedAverages(root, identity.sign(AVERAGES, *fields))
        return self._lists[me]

    def take(self, reducer: int, signed: SignedAverages, root: bytes) -> bool:
        """What a reducer says of the averages that it gave here, of which this is the root. Returns whether it
        is so: otherwise nothing stands behind these averages."""
        genuine = self._is_by(reducer, signed)
        if genuine:  # also where it is of other averages than it gave: what it told others may differ from it
            self.compare({reducer: signed})
        return genuine and signed.root == root

    def compare(self, theirs: Mapping[int, SignedAverages]) -> None:
        """What another member has been given. Where it differs, the reducer is banned. Whoever shows what no reducer
        has signed is not listened to further: so it costs no more than one signature."""
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
                self._bans.add(UnlikeAverages(culprit, self._prefix, group_id, mine, signed))

    def banned(self) -> frozenset[int]:
        """The members that nobody averages with any more, by index."""
        members = enumerate(self._group.members)
        return frozenset(index for index, member in members if self._bans.is_banned(member.peer_id))

    def _is_by(self, reducer: int, signed: SignedAverages) -> bool:
        return signed.is_by(self._group.members[reducer].peer_id, self._prefix, self._group.group_id)
