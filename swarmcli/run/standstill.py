"""Whether a run goes on, told look by look from what one peer sees of it; where it does not, whom it waits for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmcli.run.values import Health, PeerStatus
from swarmcli.words import listed, roughly


@dataclass(frozen=True, slots=True)
class StandstillOptions:
    """When an epoch is taken for one that does not end."""

    usual: float = 2.5  # times what the last epochs took: people are to know within three
    rated: float = 2.0  # times what the rates of those who compute promise: with fewer of them epochs are longer
    least: float = 8.0  # seconds; a peer that is gone is left out of a round within a few
    first: float = 60.0  # seconds, while this peer has seen no epoch end: first batches take their time
    longest_gap: float = 15.0  # seconds between two looks that count: this computer may have slept meanwhile


class Standstill:
    """Time adds up only while somebody computes."""

    def __init__(self, options: StandstillOptions = StandstillOptions()) -> None:
        self._options = options
        self._epoch = -1
        self._lasted = 0.0
        self._looked: float | None = None

    def look(self, now: float, epoch: int, seconds_by_rates: float | None, usual: float | None) -> float:
        """For how many seconds the epoch has lasted if it should have ended; 0: it need not have.

        `seconds_by_rates`: that an epoch takes those who compute now, infinite while none of them has told a rate;
        None: nobody computes. `usual`: seconds that the last epochs took; None: none has ended here.
        """
        gap, self._looked = 0.0 if self._looked is None else now - self._looked, now
        if epoch != self._epoch:
            self._epoch, self._lasted = epoch, 0.0
        elif seconds_by_rates is not None and 0.0 <= gap <= self._options.longest_gap:
            self._lasted += gap
        options = self._options
        least = options.first if usual is None else max(options.least, options.usual * usual)
        if seconds_by_rates is not None and (usual is None or seconds_by_rates < math.inf):
            least = max(least, options.rated * seconds_by_rates)
        return self._lasted if seconds_by_rates is not None and self._lasted >= least else 0.0


def stands(epoch: int, lasted: float, usual: float | None, peers: Sequence[PeerStatus], *, averages: bool) -> str:
    """For people: that the epoch does not end, whom it waits for as far as that can be told, and what helps."""
    where = f", where one takes about {roughly(usual)}" if usual else ""
    told = f"The run stands: epoch {epoch:,} has lasted {roughly(lasted)}{where}."
    held = [peer for peer in peers if peer.health in HOLD_UP or (computes(peer) and peer.samples_per_second <= 0)]
    if not held and averages:
        return f"{told} A round lasts as long as its slowest link takes; where a limit is set, a higher one helps."
    if not held and (failed := next((peer for peer in peers if peer.trouble), None)):
        says = f"All answer and compute, but {_name(failed)} says: {failed.trouble}."
        return f"{told} {says} It is tried again; where a limit is set, a higher one helps."
    if not held:
        return f"{told} All answer and compute. If it stays so, start this peer again: it takes up where it was."
    return f"{told} It waits for {_named(held)}. If it stays so, start that peer again: it takes up where the run is."


def deserted(epoch: int, peers: Sequence[PeerStatus]) -> str:
    """For people: that nobody computes, and why not. "": the run has not begun, or waits for this peer's user alone."""
    trainers = [peer for peer in peers if peer.role == "trainer"]
    if not trainers:
        return (
            f"Nobody computes: epoch {epoch:,} has no trainer. The run goes on as soon as one joins." if epoch else ""
        )
    if all(peer.me for peer in trainers):
        return ""
    return f"Nobody computes: {_named(trainers)}. The run goes on as soon as one of them computes."


def computes(peer: PeerStatus) -> bool:
    """Whether an epoch may wait for what this peer computes."""
    return peer.role == "trainer" and peer.health in ("in step", "behind")


def _named(peers: Sequence[PeerStatus]) -> str:
    """For example "Ada (does not answer) and Bob (is behind)"."""
    return listed([f"{_name(peer)} ({WHY.get(peer.health, 'has computed nothing yet')})" for peer in peers])


def _name(peer: PeerStatus) -> str:
    return peer.name or peer.peer_id[:10]


WHY: Mapping[Health, str] = {
    "not answering": "does not answer",
    "catching up": "is catching up",
    "behind": "is behind",
    "waiting": "cannot reach the model",
    "another model": "trains another model",
    "follows": "follows, since its link is too slow",
    "paused": "pauses",
    "leaving": "leaves",
}
HOLD_UP = ("not answering", "catching up", "behind")  # an epoch, while others compute
