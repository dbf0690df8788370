"""Who could still come to a group: who holds this peer's bucket, and for whom it has waited in vain.

One averager keeps this from search to search. No input or output here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from swarmcli.averaging.matchmaking.candidates import MAX_CANDIDATES, Candidate
from swarmcli.network.identity import PeerID

MAX_MISSES = 2  # after so many waits in vain a peer is waited for only once it has been in a group with this one


class Attendance:
    """`holders` are the peers of this bucket as they last declared themselves, at most MAX_CANDIDATES.

    A peer that did not come within a full wait is not waited for again until it declares another search. Whoever
    declares searches and still stays away could repeat that for ever, hence MAX_MISSES.
    """

    def __init__(self) -> None:
        self.holders: dict[PeerID, Candidate] = {}
        self._missed: dict[PeerID, tuple[bytes, int]] = {}  # peer → its search at that time, how often in a row

    def read(self, declared: Sequence[Candidate]) -> None:
        """The declarations of the bucket, complete: who is not among them has left."""
        self.holders = {candidate.peer_id: candidate for candidate in declared[:MAX_CANDIDATES]}

    def note_missed(self, peers: Iterable[PeerID]) -> None:
        """These were waited for in vain, or could not be reached."""
        for peer in peers:
            if self.waits_for(peer):
                _, times = self._missed.pop(peer, (b"", 0))
                self._missed[peer] = (self._search_of(peer), times + 1)
        while len(self._missed) > MAX_CANDIDATES:
            del self._missed[next(iter(self._missed))]

    def note_present(self, peers: Iterable[PeerID]) -> None:
        """These are in a group with this peer."""
        for peer in peers:
            self._missed.pop(peer, None)

    def waits_for(self, peer: PeerID) -> bool:
        """Whether a group may be kept open for this peer."""
        search, times = self._missed.get(peer, (b"", 0))
        return times == 0 or (times < MAX_MISSES and self._search_of(peer) > search)

    def idle(self, finished: Mapping[PeerID, bytes]) -> set[PeerID]:
        """Holders that look for no group now and may be waited for. `finished`: see Roll."""
        return {
            peer
            for peer, holder in self.holders.items()
            if (not holder.looking or holder.search <= finished.get(peer, b"")) and self.waits_for(peer)
        }

    def _search_of(self, peer: PeerID) -> bytes:
        holder = self.holders.get(peer)
        return holder.search if holder is not None else b""
