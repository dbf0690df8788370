"""The reducers' signatures of one exchange: two of one reducer prove that it gave members unlike averages."""

from __future__ import annotations

from swarmcli.averaging.audit.signed import AVERAGES, SignedAverages
from swarmcli.averaging.group import Group
from swarmcli.averaging.trust import PeerTrust, UnlikeAverages
from swarmcli.network.identity import Identity


class SignedLists:
    """The signatures that this member has, one for each reducer, all verified. Each reducer signs once."""

    def __init__(self, group: Group, prefix: str, trust: PeerTrust) -> None:
        """`trust` gets the proofs."""
        self.group, self._prefix, self._trust = group, prefix, trust
        self.told: dict[int, SignedAverages] = {}  # by reducer

    def sign(self, me: int, identity: Identity, root: bytes) -> SignedAverages:
        """Returns this member's own signature, as a reducer: each time the same, since it forms its averages once."""
        if me not in self.told:
            fields = self._prefix.encode(), self.group.group_id, root
            self.told[me] = SignedAverages(root, identity.sign(AVERAGES, *fields))
        return self.told[me]

    def take(self, reducer: int, signed: SignedAverages, root: bytes) -> bool:
        """Takes in a reducer's signature. Returns whether it is valid for averages with this `root`; if not, these do
        not count. A reducer that has signed others as well is banned; the quorum decides which of them count."""
        mine = self.told.get(reducer)
        if mine is not None and mine.root == signed.root:
            return signed.root == root
        culprit, group_id = self.group.members[reducer].peer_id, self.group.group_id
        if not signed.is_by(culprit, self._prefix, group_id):
            return False
        if mine is not None:
            self._trust.prove(UnlikeAverages(culprit, self._prefix, group_id, mine, signed))
        if signed.root == root or mine is None:  # copies need the signature of the averages that are here
            self.told[reducer] = signed
        return signed.root == root
