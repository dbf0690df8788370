"""The requests to join that one peer has under way, and whom it may ask next. No input or output here."""

from __future__ import annotations

from collections.abc import Iterable

from swarmcli.network.identity import PeerID

AGAIN = 0.15  # seconds before somebody who still believes in a lost leader is asked again …
LOYALTY = 2.0  # … and for how long he is: after that, it is the way to that leader which is broken


class Asking:
    """Whose answer is awaited, who was named, who is full, and who has to notice first that its leader is lost."""

    def __init__(self) -> None:
        self.since: dict[PeerID, float] = {}  # whose answer is awaited → since when
        self.ever: set[PeerID] = set()  # who was asked in this search: only they may begin a group with this peer
        self.named: PeerID | None = None  # a leader that somebody named, and that is asked before all others
        self._full: dict[PeerID, float] = {}  # leader → until when it is believed to be full
        self._loyal: dict[PeerID, tuple[float, float]] = {}  # peer → since when it is waited for, next time to ask

    def ask(self, peer: PeerID, now: float) -> None:
        self.since[peer] = now
        self.ever.add(peer)

    def answered(self, peer: PeerID) -> bool:
        """No answer of this peer is awaited any more. Returns whether one was."""
        if self.named == peer:
            self.named = None
        return self.since.pop(peer, None) is not None

    def is_full(self, peer: PeerID, until: float) -> None:
        self._full[peer] = until

    def again(self, peer: PeerID, now: float) -> bool:
        """This peer follows one that was found lost here: it will notice soon, and is asked again then.

        Returns False once that has taken too long.
        """
        began, _ = self._loyal.get(peer, (now, now))
        self._loyal[peer] = (began, now + AGAIN)
        return now < began + LOYALTY

    def forget_loyalty(self) -> None:
        """This peer follows somebody; whom it waited for before no longer matters."""
        self._loyal.clear()

    def first(self, order: Iterable[PeerID], now: float) -> tuple[PeerID | None, float]:
        """The first of these to ask, and when: at once, or later, and nobody else before that."""
        for peer in order:
            if self._full.get(peer, 0.0) <= now:
                return peer, self._loyal.get(peer, (now, now))[1]
        return None, now
