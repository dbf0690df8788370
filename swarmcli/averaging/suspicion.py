"""Whom this peer doubts: peers that cost a round or its time, where nothing proves that they lied.

A doubt is this peer's own affair. It is told to nobody, it ends by itself, and whoever is doubted takes part again as
soon as a group would be too small without it, or lacks the samples that it has (`admit`). What can be proved is
evidence, and ends in a ban (`bans.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmcli.network.identity import PeerID
from swarmcli.recent import Recent

FIRST, LONGEST = 1, 16  # groups without a seat: after the first doubt, and at most; doubled with each further one
# Seconds for which an epoch waits for the samples of a doubted peer, instead of each group without it; and of one that
# has spoiled the groups that it led, and would soon lead again.
SECONDS_PER_GROUP, SECONDS_PER_LED = 1.0, 15.0
MAX_SUSPECTS = 4096


@dataclass(slots=True)
class _Doubt:
    reason: str
    groups: int  # that it stays away from, each time
    left: int  # of these
    seconds: float  # that the others wait instead of each


class Suspicions:
    """One for each averager. What is forgiven is forgiven by groups that went well, not by time. A seat is given back
    without that where no group can go well: those who are left may have nothing to average."""

    def __init__(self) -> None:
        self._doubts: Recent[PeerID, _Doubt] = Recent(MAX_SUSPECTS)

    def note(self, peer: PeerID, reason: str, *, lost: bool = False, led: bool = False) -> None:
        """This peer gives cause for doubt: no seat in the next group, and in twice as many each further time.

        `lost`: the connection with it broke meanwhile, as when its address changes. That costs it no seat, unless it
        was in doubt already: whoever breaks its connections again and again gains nothing by it. `led`: it is for how
        it led.
        """
        known = self._doubts.get(peer)
        groups = FIRST if known is None else min(2 * known.groups, LONGEST)
        self._doubts[peer] = _Doubt(
            reason,
            groups,
            0 if lost and known is None else groups,
            SECONDS_PER_LED if led else SECONDS_PER_GROUP,
        )

    def is_suspect(self, peer: PeerID) -> bool:
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
