"""Peers whose word is worth little: they reported what they then did not stand by."""

from __future__ import annotations

from dataclasses import dataclass

from swarmcli.network.identity import PeerID
from swarmcli.recent import Recent

FIRST, LONGEST = 15.0, 3600.0  # seconds
GROWTH = 4.0  # from one doubt to the next
MAX_PEERS = 4096


@dataclass(slots=True)
class _Doubt:
    until: float
    seconds: float


class Doubts:
    """For how long the reports of which peers count for nothing: longer each time. Moments are loop time.

    A claim costs its peer nothing, but to look into it costs everyone else a while. An honest peer that could not
    answer once is heard again after seconds.
    """

    def __init__(self) -> None:
        self._doubts: Recent[PeerID, _Doubt] = Recent(MAX_PEERS)

    def rests_on(self, peer: PeerID, now: float) -> bool:
        """Whether this peer's reports count for nothing at the moment."""
        doubt = self._doubts.get(peer)
        return doubt is not None and now < doubt.until

    def add(self, peer: PeerID, now: float) -> None:
        """It did not stand by its report. Without effect while a doubt rests on it."""
        if self.rests_on(peer, now):
            return
        before = self._doubts.get(peer)
        seconds = FIRST if before is None else min(GROWTH * before.seconds, LONGEST)
        self._doubts[peer] = _Doubt(now + seconds, seconds)
