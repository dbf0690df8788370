"""Which records an event becomes. No I/O: the journal hands in the moment and queues what comes out."""

from __future__ import annotations

from collections.abc import Iterator

from swarmcli import events as happened
from swarmcli.journal.describe import describe, describe_sighting
from swarmcli.journal.records import EpochRecord, EventRecord, PeerRecord, Record, ReportRecord, RoundRecord

# Peers decide how often they connect and get refused; the journal's size must not be theirs to decide.
BURST = 60.0  # lines about connections at once
LINES_PER_SECOND = 1.0
_FLOODABLE = (happened.PeerConnected, happened.PeerDisconnected, happened.PeerRefused, happened.PeerSilent)


class Recorder:
    """Turns events into records. Remembers who is present, so that joining and leaving are recorded once."""

    def __init__(self) -> None:
        self._first_seen: dict[str, float] = {}
        self._allowance = BURST
        self._allowance_at = 0.0
        self._suppressed = 0

    def records(self, event: happened.Event, now: float) -> Iterator[Record]:
        """`now` is wall-clock seconds."""
        match event:
            case happened.EpochAdvanced():
                yield _epoch(event, now)
            case happened.RoundFinished():
                yield _round(event, now)
            case happened.PeerSeen():
                yield from self._sighting(event, now)
            case happened.EpochReported(peer, epoch, loss, samples, rate):
                yield ReportRecord(now, peer, epoch, loss, samples, rate)
        line = describe(event)
        if line is not None and self._allowed(event, now):
            if self._suppressed:
                yield EventRecord(
                    now, "detail", "suppressed", "", f"{self._suppressed} lines about connections left out"
                )
                self._suppressed = 0
            yield EventRecord(now, *line)

    def _sighting(self, event: happened.PeerSeen, now: float) -> Iterator[Record]:
        known = event.peer in self._first_seen
        first_seen = self._first_seen.setdefault(event.peer, now)
        yield PeerRecord(
            peer=event.peer,
            name=event.name,
            role=event.role,
            client_mode=event.client_mode,
            epoch=event.epoch,
            samples=event.samples,
            samples_per_second=event.samples_per_second,
            first_seen=first_seen,
            last_seen=now,
            gone=event.gone,
        )
        if event.gone:
            del self._first_seen[event.peer]
        if bool(event.gone) == known:
            yield EventRecord(now, *describe_sighting(event))

    def _allowed(self, event: happened.Event, now: float) -> bool:
        """A token bucket over the lines whose number strangers decide."""
        if not isinstance(event, _FLOODABLE):
            return True
        earned = max(0.0, now - self._allowance_at) * LINES_PER_SECOND
        self._allowance = min(BURST, self._allowance + earned)
        self._allowance_at = now
        if self._allowance < 1.0:
            self._suppressed += 1
            return False
        self._allowance -= 1.0
        return True


def _epoch(event: happened.EpochAdvanced, now: float) -> EpochRecord:
    return EpochRecord(
        time=now,
        epoch=event.epoch,
        lineage=event.lineage,
        samples=event.samples,
        own_samples=event.own_samples,
        peers=event.peers,
        loss=event.loss,
        seconds=event.seconds,
        averaging_seconds=event.averaging_seconds,
    )


def _round(event: happened.RoundFinished, now: float) -> RoundRecord:
    return RoundRecord(
        time=now,
        round_id=event.round_id,
        purpose=event.purpose,
        epoch=event.epoch,
        outcome=event.outcome,
        reason=event.reason,
        leader=event.leader,
        members=tuple(event.members),
        contributors=tuple(event.contributors),
        left_out=dict(event.left_out),
        bytes_sent=event.bytes_sent,
        bytes_received=event.bytes_received,
        seconds=sum(event.seconds.values()),
        stages=dict(event.seconds),
    )
