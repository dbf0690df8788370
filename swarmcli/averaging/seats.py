"""Decides which members send gradients in a round: those whose samples are worth the time that sending takes.

Members bring what they know into the group (`Bid`), and `decide` is one pure function of that: the leader applies it
when it draws up the group, every follower applies it again. docs/averaging.md, *Seats*, has the rule in words. No input
or output here.

    seconds   that a member takes to send what it brings to a round
    pace      samples per second of a member, or of several, while an epoch is computed
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from swarmcli.network.identity import PeerID
from swarmcli.recent import Recent

MAX_NAMED = 32  # slow members in one witness; of more, the slowest
MAX_SECONDS = 1e6  # that a member may say, of itself or of others: eleven days
MAX_PACE = 1e15  # samples per second
MAX_PEERS = 4096  # that one witness remembers


@dataclass(frozen=True, slots=True)
class SeatOptions:
    """The terms of seats. All peers of a run have the same, since followers recompute their leader's decision."""

    noise: float = 0.5  # seconds of sending that a busy machine or a long way explains: they cost nobody the seat
    slower: float = 2.0  # times what the quickest member takes: from there on a member is slow, its seat in question
    back: float = 1.5  # times its sending time, for a member that has no seat: so nobody comes and goes round by round
    trial: float = 0.1  # of an epoch, for the parts of a slow member whose samples never counted
    unknown_epoch: float = 5.0  # seconds that an epoch is taken for while no member has seen one
    overdue: float = 3.0  # epochs, and …
    overdue_grace: float = 5.0  # … seconds, after which members without a seat count too: the seated ones do not come
    first_retry: float = 30.0  # seconds after which a slow member is tried again, and …
    longest_retry: float = 600.0  # … at most: the time doubles each time that the member is found slow


SEATS = SeatOptions()


@dataclass(frozen=True, slots=True)
class Sighting:
    """One slow member, as another member sees it."""

    peer: PeerID
    seconds: float = 0.0  # it took so long to send; 0: only its own word says that it is slow
    pace: float = 0.0  # of its samples that counted lately; 0: none did
    counted: bool = False  # it had a part in the last average

    def __post_init__(self) -> None:
        _check("seconds", self.seconds, MAX_SECONDS)
        _check("pace", self.pace, MAX_PACE)


@dataclass(frozen=True, slots=True)
class Witness:
    """A reducer's word about the members that sent to it lately. It names the slow alone: in a group without slow
    members it has two numbers."""

    pace: float = 0.0  # of all members that it does not name, together; 0: it has seen no epoch yet
    quickest: float = 0.0  # seconds that the quickest member takes to send; 0: one without another reducer
    slow: tuple[Sighting, ...] = ()

    def __post_init__(self) -> None:
        _check("pace", self.pace, MAX_PACE)
        _check("quickest", self.quickest, MAX_SECONDS)
        if len(self.slow) > MAX_NAMED or len({sighting.peer for sighting in self.slow}) < len(self.slow):
            raise ValueError(f"a witness names at most {MAX_NAMED} members, each once")


@dataclass(frozen=True, slots=True)
class Bid:
    """A member's word for the decision about seats. Raises ValueError for numbers that no honest peer has."""

    sends: bool = True  # it has gradients to send; False: it follows, or reduces for others
    seconds: float = 0.0  # that sending takes by the limits which its user has set; 0: there is none
    witness: Witness | None = None  # None: no member has sent to it lately

    def __post_init__(self) -> None:
        _check("seconds", self.seconds, MAX_SECONDS)


@dataclass(frozen=True, slots=True)
class NoSeat:
    """Why a member's samples cannot count at present."""

    seconds: float  # that it would take to send
    epoch: float  # seconds that an epoch takes without it, rounds included


@dataclass(frozen=True, slots=True)
class Seats:
    """The seats of one group.

    unseated   member that sends nothing → why
    planned    seconds that sending takes the slowest seated member; 0: unknown
    epoch      seconds that an epoch takes with the seated members, rounds included
    """

    unseated: Mapping[PeerID, NoSeat] = field(default_factory=dict)
    planned: float = 0.0
    epoch: float = 0.0

    def overdue(self, options: SeatOptions = SEATS) -> float:
        """Seconds of an epoch after which members without a seat count too: the seated ones do not come."""
        return options.overdue * self.epoch + options.overdue_grace

    @property
    def for_all(self) -> Seats:
        """The seats then: one for each member."""
        return Seats({}, max([self.planned, *(each.seconds for each in self.unseated.values())]), self.epoch)


def decide(bids: Mapping[PeerID, Bid], target: float, options: SeatOptions = SEATS) -> Seats:
    """Members in order of their sending time; seats go to the first so many with which the group makes the most samples
    per second, rounds included. `target`: samples that make an epoch.

    The lower median of the witnesses counts, so a minority of liars neither takes a seat nor gives one; a member's own
    word can only make it slower.
    """
    witnesses = {peer: bid.witness for peer, bid in bids.items() if bid.witness is not None}
    quickest = statistics.median_low(each.quickest for each in witnesses.values()) if witnesses else 0.0
    bound = max(options.noise, options.slower * quickest)
    senders = [peer for peer, bid in bids.items() if bid.sends]
    seen = [_seen(peer, bids[peer], witnesses) for peer in senders]
    slow = [each for each in seen if each.seconds > bound]
    quick = len(senders) - len(slow)
    pace = _pace(witnesses.values(), target, options) if quick else 0.0
    mean = pace / quick if quick else 1.0  # of a member whose samples no witness has seen

    def felt(each: Sighting) -> float:
        return each.seconds * (1.0 if each.counted else options.back)

    slow.sort(key=lambda each: (felt(each), each.peer))
    seated, best = 0, _epoch(target, pace, quickest)
    epoch = best
    for count, each in enumerate(slow, start=1):
        pace += each.pace or mean
        if (felt_epoch := _epoch(target, pace, felt(each))) < best:
            seated, best, epoch = count, felt_epoch, _epoch(target, pace, each.seconds)
    unseated = {each.peer: NoSeat(each.seconds, epoch) for each in slow[seated:]}
    # A member whose samples never counted is on trial: it costs the quick members a part of one epoch at most.
    most = options.trial * epoch if quick else math.inf
    times = [each.seconds if each.pace > 0 else min(each.seconds, most) for each in slow[:seated]]
    planned = max(times, default=bound if witnesses else 0.0)
    return Seats(unseated, planned, epoch if math.isfinite(epoch) else options.unknown_epoch)


def _seen(peer: PeerID, bid: Bid, witnesses: Mapping[PeerID, Witness]) -> Sighting:
    """The sighting of a member that counts, from its own word and that of all other witnesses."""
    others = [
        next((sighting for sighting in witness.slow if sighting.peer == peer), None)
        for other, witness in witnesses.items()
        if other != peer
    ]
    naming = [sighting for sighting in others if sighting is not None]
    seconds = statistics.median_low([each.seconds if each else 0.0 for each in others]) if others else 0.0
    paces = [each.pace for each in naming if each.pace > 0]
    counted = 2 * sum(each.counted for each in naming) >= max(1, len(naming))
    return Sighting(
        peer,
        max(seconds, bid.seconds),
        statistics.median_low(paces) if paces else 0.0,
        counted or not naming,  # a member that no witness names as slow had its seat until now
    )


def _pace(witnesses: Iterable[Witness], target: float, options: SeatOptions) -> float:
    known = [each.pace for each in witnesses if each.pace > 0]
    return statistics.median_low(known) if known else target / options.unknown_epoch


def _epoch(target: float, pace: float, seconds: float) -> float:
    return target / pace + seconds if pace > 0 else math.inf


def _check(name: str, value: float, most: float) -> None:
    if not 0 <= value <= most:
        raise ValueError(f"{name} of a seat must be between 0 and {most:g}, got {value}")


@dataclass(slots=True)
class _Record:
    """One peer, as this one saw it."""

    recent: tuple[float, ...] = ()  # seconds that it took to send in its last two rounds
    pace: float = 0.0
    counted: bool = False
    said_slow: bool = False  # by its own word, in the last group
    named_until: float = 0.0  # loop time
    retry: float = 0.0  # seconds for which it is named the next time


class Sightings:
    """One averager's record of how others send, round by round; its `Witness` follows from it."""

    def __init__(self, own: PeerID, options: SeatOptions = SEATS) -> None:
        self._own, self._options = own, options
        self._records: Recent[PeerID, _Record] = Recent(MAX_PEERS)
        self._pace = self._quickest = 0.0
        self._reduces = False
        self._ended: float | None = None  # loop time of the last round that committed

    def note_sending(self, now: float, taken: Mapping[PeerID, float], bids: Mapping[PeerID, Bid]) -> None:
        """Seconds that each sender of a round has `taken` here, this peer itself among them. For one that was left out,
        they are estimated from the parts that arrived. `bids`: of the group."""
        self._reduces = self._reduces or not taken.keys() <= {self._own}  # one lone trainer sent to it, or several
        self._quickest = min(taken.values(), default=self._quickest)
        bound = max(self._options.noise, self._options.slower * self._quickest)
        for peer, seconds in taken.items():
            record = self._record(peer)
            # If its own limit explains the time, that says nothing about its link.
            if bids[peer].seconds > bound and seconds <= 2 * bids[peer].seconds:
                continue
            record.recent = (*record.recent[-1:], min(seconds, MAX_SECONDS))
            if min(record.recent) <= bound:
                record.retry = record.named_until = 0.0
            elif now >= record.named_until:
                record.retry = min(2 * record.retry, self._options.longest_retry) or self._options.first_retry
                record.named_until = now + record.retry
        for peer, bid in bids.items():
            if bid.sends and (bid.seconds > bound or peer in self._records):
                self._record(peer).said_slow = bid.seconds > bound

    def note_committed(self, began: float, now: float, weights: Mapping[PeerID, float]) -> None:
        """A round that began at `began` has committed `now`, with so many samples of each member."""
        ended, self._ended = self._ended, now
        for peer, record in self._records.items():
            record.counted = weights.get(peer, 0.0) > 0
        if ended is None or began <= ended or not weights:
            return
        paces = {peer: weight / (began - ended) for peer, weight in weights.items()}
        for peer, pace in paces.items():
            record = self._record(peer)
            record.pace, record.counted = _smooth(record.pace, pace), True
        quick = math.fsum(pace for peer, pace in paces.items() if not self._is_named(peer, now))
        self._pace = _smooth(self._pace, quick) if quick > 0 else self._pace

    def witness(self, now: float) -> Witness | None:
        """This peer's word about the others; None: no member has sent to it yet."""
        if not self._reduces:
            return None
        named = [
            Sighting(peer, min(each.recent) if now < each.named_until else 0.0, min(each.pace, MAX_PACE), each.counted)
            for peer, each in self._records.items()
            if self._is_named(peer, now)
        ]
        slowest = sorted(named, key=lambda each: -each.seconds)[:MAX_NAMED]
        return Witness(min(self._pace, MAX_PACE), min(self._quickest, MAX_SECONDS), tuple(slowest))

    def _is_named(self, peer: PeerID, now: float) -> bool:
        record = self._records[peer]
        return record.said_slow or now < record.named_until

    def _record(self, peer: PeerID) -> _Record:
        record = self._records[peer] = self._records.get(peer) or _Record()
        return record


def _smooth(before: float, now: float) -> float:
    return (before + now) / 2 if before > 0 else now
