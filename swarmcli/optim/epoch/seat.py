"""Why a trainer's samples cannot count, in words for people: after its group has met, and before it joins."""

from __future__ import annotations

from dataclasses import dataclass

from swarmcli.averaging.seats import MAX_SECONDS, NOISE, Bid, LineSeen, NoSeat, decide
from swarmcli.network.identity import PeerID
from swarmcli.words import format_size, roughly

WITHOUT = "your samples do not count, and swarm says so"


@dataclass(frozen=True, slots=True)
class SeatLost:
    """Why this trainer computes nothing, in figures.

    nbytes   bytes that it would send in a round, and receive
    limit    bytes per second that its user lets it have; None: its line has been seen to be too slow
    divided  the user's limit divided by this peer's part of it: several peers of one user share it
    follows  it gets each average in time; otherwise it is away, as in a pause
    """

    reason: NoSeat
    nbytes: int
    limit: float | None
    follows: bool
    divided: float = 1.0

    @property
    def sentence(self) -> str:
        """Says, for people, why its samples cannot count."""
        needs = roughly(self.reason.seconds)
        cause = "your line has been seen to need"
        if self.limit:
            shared = ", which your peers here share," if self.divided > 1 else ""
            cause = f"your limit of {format_size(self.limit * self.divided)}/s{shared} needs"
        return (
            f"a round sends {format_size(self.nbytes)}; {cause} {needs}, epochs take {roughly(self.reason.epoch)}: "
            "your samples cannot count here"
        )

    @property
    def remedy(self) -> str:
        """Says what this computer does now, and what its user and the run's owner can do."""
        does = "follows the run and computes nothing"
        if not self.follows:
            does = "waits, since it could not even follow the run"
        helps = "a higher limit brings it back" if self.limit else "this computer tries again now and then"
        return (
            f"this computer {does}; {helps}; the run's owner can make rounds smaller: `swarm validate RECIPE --uplink "
            "RATE` says how"
        )


def before_joining(nbytes: int, limit: float | None, target: float, epoch: float = 0.0) -> str:
    """Says what people should know of a run's rounds before a trainer joins. A round sends `nbytes`, the user allows
    `limit` bytes per second (None: all), `target` samples make an epoch of `epoch` seconds (0: unknown).

    It says that samples cannot count only if that is certain: it reckons with a single other trainer, which has the
    least to lose by waiting. The rule is that of `averaging/seats.py`: an epoch is to end sooner with this trainer than
    without it.
    """
    sends = f"at an epoch's end your computer sends up to {format_size(nbytes)}"
    if limit is None:
        return f"{sends}; if your line is too slow for that, {WITHOUT}"
    seconds = min(nbytes / limit, MAX_SECONDS)
    me, other = PeerID(bytes(32)), PeerID(bytes([1] * 32))
    pace = LineSeen(pace=target / epoch if epoch else 0.0)
    bids = {me: Bid(seconds=seconds), other: Bid(seconds=NOISE)} if epoch else {}
    if reason := decide(bids, target, {me: pace, other: pace}).unseated.get(me):
        sentence = SeatLost(reason, nbytes, limit, follows=True).sentence
        return (
            f"{sentence}, unless all others are on this computer; it would follow the run and compute nothing; "
            "a higher limit helps"
        )
    return (
        f"{sends} and receives at most as much; your limit of {format_size(limit)}/s needs {roughly(seconds)} for "
        f"that; if the others are faster without you, {WITHOUT}"
    )
