"""Whose round has begun without this peer, where there is only one for all. No input or output here."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable

from swarmcli.network.identity import PeerID


class Elsewhere:
    """Two groups of one tag that both begin would be two averages, and part their members for good. So a peer whose
    group would be no larger than what has begun already gives up, and asks those in it how it ended.

    A smaller round does not stop this peer's group: its members will have to come here, whatever they make of it;
    and few that merely say that they have begun cannot hold up many.
    """

    def __init__(self) -> None:
        self.peers: set[PeerID] = set()

    def note(self, peer: PeerID, mates: Iterable[PeerID] = (), known: Container[PeerID] = ()) -> None:
        """This peer says that it has begun with those, or looks for a group of another tag since this one looks for its
        own. Mates count if they are known, or anybody could be named."""
        self.peers |= {peer, *(mate for mate in mates if mate in known)}

    def back(self, peer: PeerID) -> None:
        """This peer looks for a group again, so its round has failed."""
        self.peers.discard(peer)

    def outweighs(self, followers: Collection[PeerID]) -> bool:
        """Whether at least as many as this peer and its followers have begun without them."""
        return len(self.peers.difference(followers)) >= 1 + len(followers)
