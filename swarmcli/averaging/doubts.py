"""Whom this peer doubts: peers that cost a round or its time, where nothing proves that they lied.

    kept others waiting, led badly     no seat in the next group, in 2, 4, … 16 with each further time
    failed as a reducer                nothing to reduce for a minute, for two, four, … 64 with each further time

A doubt is this peer's own affair. It is told to nobody, it ends by itself, and whoever is doubted takes part again as
soon as a group would be too small without it, or lacks the samples that it has (`admit`). What can be proved is
evidence, and ends in a ban (`bans.py`). There is no third thing: who does not come is missed, which says nothing
against it (`matchmaking/candidates.py`), and who reports more than it stands by is not asked for a while
(`optim/peers/claims.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarmcli.backoff import Backoff
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.recent import Recent

FIRST, LONGEST = 1, 16  # groups without a seat: after the first doubt, and at most; doubled with each further one
# Seconds for which an epoch waits for the samples of a doubted peer, instead of each group without it; and of one that
# has spoiled the groups that it led, and would soon lead again.
SECONDS_PER_GROUP, SECONDS_PER_LED = 1.0, 15.0
SPARED, LONGEST_SPARED = 60.0, 3840.0  # seconds without a part to reduce, at first and at most
MAX_DOUBTED = 4096


@dataclass(slots=True)
class _Doubt:
    reason: str
    groups: int  # that it stays away from, each time
    left: int  # of these
    seconds: float  # that the others wait instead of each


class Doubts:
    """One for each averager. What is forgiven is forgiven by groups that went well, not by time. A seat is given back
    without that where no group can go well: those who are left may have nothing to average."""

    def __init__(self) -> None:
        self._doubts: Recent[PeerID, _Doubt] = Recent(MAX_DOUBTED)
        self._spared = Backoff[PeerID](SPARED, LONGEST_SPARED)

    def note(self, peer: PeerID, reason: str, *, lost: bool = False, led: bool = False) -> None:
        """This peer gives cause for doubt: no seat in the next group, and in twice as many each further time.

        `lost`: the connection with it broke meanwhile, as when its address changes. That costs it no seat, unless it
        was in doubt already: whoever breaks its connections again and again gains nothing by it. `led`: it is for how
        it led: the group that forms without it now is not yet the next one.
        """
        known = self._doubts.get(peer)
        groups = FIRST if known is None else min(2 * known.groups, LONGEST)
        left = 0 if lost and known is None else groups + led
        self._doubts[peer] = _Doubt(reason, groups, left, SECONDS_PER_LED if led else SECONDS_PER_GROUP)

    def spare(self, peers: Iterable[PeerID]) -> None:
        """These failed as reducers: groups that this peer draws up give them nothing to reduce for a while."""
        for peer in peers:
            self._spared.add(peer, loop_time())

    def is_spared(self, peer: PeerID) -> bool:
        """Whether it is to have nothing to reduce."""
        return self._spared.rests(peer, loop_time())

    def has_no_seat(self, peer: PeerID) -> bool:
        """Whether it is to have no seat in the next group."""
        doubt = self._doubts.get(peer)
        return doubt is not None and doubt.left > 0

    def reason(self, peer: PeerID) -> str:
        """What it did last; "" for a peer that nobody doubts."""
        doubt = self._doubts.get(peer)
        return doubt.reason if doubt is not None else ""

    def admit(self, waited: float) -> bool:
        """The group has waited so many seconds for work that, by the reports, those have who are not in it. Whoever has
        been worth no longer a wait has its seat again, and stays in doubt. Returns whether there is anybody."""
        admitted = [doubt for doubt in self._doubts.values() if 0 < doubt.left * doubt.seconds <= waited]
        for doubt in admitted:
            doubt.left = 0
        return bool(admitted)

    def note_group(self, members: frozenset[PeerID]) -> None:
        """A round of these has committed: those who stayed away have done so once, those who took part are trusted
        a little more, and in the end wholly."""
        for peer, doubt in list(self._doubts.items()):
            if doubt.left:
                doubt.left -= peer not in members
            elif peer in members:
                doubt.groups //= 2
            if doubt.groups < FIRST:
                del self._doubts[peer]
