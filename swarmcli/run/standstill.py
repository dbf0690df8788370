"""Tells, look by look, whether a run goes on, from what one peer sees of it; if it does not, for whom it waits.

Screens and alert share one clock: the seconds of the present epoch, and how many of them passed while nobody computed.
Only the end of an epoch resets it: that is proven, and what peers say of themselves is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarmcli.run.values import HOW, PeerStatus
from swarmcli.words import listed, roughly

USUAL = 2.5  # times the length of the last epochs: people are to know within three
RATED = 2.0  # times the length that the peers' rates promise: with fewer peers epochs are longer, …
SLOWEST = 3600.0, 20.0  # … but so many seconds, or usual epochs, at most: anybody may claim to compute slowly
LEAST = 8.0  # seconds; a round leaves out a peer that is gone within a few
FIRST = 60.0  # seconds, until this peer has seen an epoch end: first batches take their time
LONGEST_GAP = 15.0  # seconds between two looks at most, if they are to count: this computer may have slept


class Standstill:
    def __init__(self) -> None:
        self._epoch = -1
        self._looked: float | None = None
        self.lasted = 0.0  # seconds of this epoch in which somebody computed, …
        self.idle = 0.0  # … and in which nobody did

    def look(self, now: float, epoch: int, seconds_by_rates: float | None, usual: float | None) -> float:
        """Returns for how many seconds the epoch should have been over, or nobody has computed in it; 0: it goes on.

        `seconds_by_rates`: how long an epoch takes the peers that compute now, infinite if none of them has told a
        rate; None: nobody computes. `usual`: seconds that the last epochs took; None: none has ended here.
        """
        gap, self._looked = 0.0 if self._looked is None else now - self._looked, now
        gap = gap if 0.0 <= gap <= LONGEST_GAP else 0.0
        if epoch != self._epoch:
            self._epoch, self.lasted, self.idle, gap = epoch, 0.0, 0.0, 0.0
        if seconds_by_rates is None:
            self.idle += gap
            return self.idle
        self.lasted += gap
        return max(0.0, self.lasted - due(seconds_by_rates, usual))


def due(seconds_by_rates: float, usual: float | None) -> float:
    """Returns how many seconds an epoch may take before it counts as one that does not end."""
    if usual is None:
        return max(FIRST, RATED * seconds_by_rates)
    slowest = max(SLOWEST[0], SLOWEST[1] * usual)
    rated = min(RATED * seconds_by_rates, slowest) if seconds_by_rates < math.inf else 0.0
    return max(LEAST, USUAL * usual, rated)


def stands(epoch: int, lasted: float, usual: float | None, peers: Sequence[PeerStatus], *, averages: bool) -> str:
    """Says to people that the epoch does not end, for whom it waits, if that can be told, and what helps."""
    where = f", and one usually takes about {roughly(usual)}" if usual else ""
    told = f"The run stands still: epoch {epoch:,} has lasted {roughly(lasted)}{where}."
    held = [peer for peer in peers if peer.health in HOLD_UP or (peer.computes and peer.samples_per_second <= 0)]
    if held:
        return (
            f"{told} It waits for {_named(held)}. If it stays so, start that peer again: it goes on from where the "
            "run is."
        )
    if averages:
        return f"{told} A round lasts as long as its slowest line takes; if that line has a limit, raise it."
    if failed := next((peer for peer in peers if peer.trouble), None):
        says = f"All answer and compute, but {failed.called} says: {failed.trouble}."
        return f"{told} {says} The peers try again; if a line has a limit, raise it."
    return f"{told} All answer and compute. If it stays so, start this peer again: it goes on from where it was."


def deserted(epoch: int, peers: Sequence[PeerStatus]) -> str:
    """Says to people that nobody computes, and why. "": the run has not begun, or waits only for this peer's user."""
    trainers = [peer for peer in peers if peer.role == "trainer"]
    if not trainers and epoch:
        return f"Nobody computes: epoch {epoch:,} has no trainer. The run goes on as soon as one joins."
    if all(peer.me for peer in trainers):
        return ""
    return f"Nobody computes: {_named(trainers)}. The run goes on as soon as one of them computes."


def _named(peers: Sequence[PeerStatus]) -> str:
    """For example "Ada (does not answer) and Bob (is behind)"."""
    return listed([f"{peer.called} ({HOW.get(peer.health, 'has computed nothing yet')})" for peer in peers])


HOLD_UP = ("not answering", "catching up", "behind")  # peers of such health hold up an epoch while others compute
