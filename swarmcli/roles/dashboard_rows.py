"""How the journal's records and the peers of the moment become rows of the dashboard. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from coordinator_web.source import (
    MOST_MEMBERS,
    SHORT_ID,
    EpochRow,
    EventRow,
    GroupMember,
    Health,
    LeftOut,
    LivePeer,
    LiveStatus,
    PeerRow,
    RoundRow,
)
from swarmcli.journal import EpochRecord, EventRecord, PeerRecord, ReportRecord, RoundRecord, SwarmLoss

SHARE_EPOCHS = 10  # that a peer's share is taken over
ROLES = ("trainer", "auxiliary", "monitor")


def peer_row(
    peer: LivePeer, live: LiveStatus, now: float, share: float | None, epoch_seconds: float | None = None
) -> PeerRow:
    """`epoch_seconds` is what an epoch takes at present, if that is known."""
    failed = peer.round_outcome in ("failed", "undecided")
    return PeerRow(
        peer_id=peer.peer_id,
        short_id=peer.peer_id[:SHORT_ID],
        name=peer.name,
        role=peer.role,
        device=peer.device,
        client_mode=peer.client_mode,
        me=peer.peer_id == live.peer_id,
        epoch=peer.epoch,
        samples=peer.samples,
        samples_per_second=finite(peer.samples_per_second) or 0.0 if peer.answers else 0.0,
        share=share,
        loss=finite(peer.loss),
        last_seen=now - peer.seen_seconds_ago,
        health=health(peer, live, epoch_seconds),
        trouble=f"its last round was {peer.round_outcome}: {peer.round_reason}" if failed else "",
        drift=finite(peer.drift),
    )


def health(peer: LivePeer, live: LiveStatus, epoch_seconds: float | None = None) -> Health:
    """A report on its way looks like one epoch behind, and an old one like the epochs that have passed since: both
    count as in step."""
    passed = peer.seen_seconds_ago / epoch_seconds if epoch_seconds else 0.0
    if not peer.answers:
        return "not answering"
    if peer.apart:
        return peer.apart
    if peer.epoch < live.epoch - 1 - math.ceil(passed):
        return "behind"
    unlike = peer.epoch == live.epoch and peer.lineage and live.lineage and peer.lineage != live.lineage
    return "behind" if unlike else "in step"


def departed(peer: PeerRecord) -> PeerRow:
    """A peer that is only known from the journal, because it left or was lost."""
    return PeerRow(
        peer_id=peer.peer,
        short_id=peer.peer[:SHORT_ID],
        name=peer.name,
        role=peer.role,
        device="",
        client_mode=peer.client_mode,
        me=False,
        epoch=peer.epoch,
        samples=0,
        samples_per_second=0.0,
        share=None,
        loss=None,
        last_seen=peer.last_seen,
        health=peer.gone or "lost",
        trouble="",
    )


def listing_order(row: PeerRow) -> tuple[bool, int, str, str]:
    """An order that stays as it is while peers train."""
    rank = ROLES.index(row.role) if row.role in ROLES else len(ROLES)
    return (not row.me, rank, row.name or "\uffff", row.peer_id)


def shares(reports: Iterable[ReportRecord], rates: Mapping[str, float]) -> dict[str, float]:
    """Each peer's part, 0 to 1, of the samples that all of them computed over the epochs of these reports.

    Counts of samples run since a peer's start, so what it computed is how much its count grew; a peer that reported
    once is not in the result. While nobody reported twice, `rates` (of those present) decide.
    """
    counts: dict[str, list[int]] = {}
    for report in reports:
        counts.setdefault(report.peer, []).append(report.samples)
    grown = {peer: max(0, max(each) - min(each)) for peer, each in counts.items() if len(each) > 1}
    return _parts(grown) or _parts(rates)


def _parts(amounts: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(amounts.values())
    if not 0.0 < total < math.inf:
        return {}
    return {peer: amount / total for peer, amount in amounts.items()}


def round_row(record: RoundRecord, names: Mapping[str, str]) -> RoundRow:
    def called(peer: str) -> str:
        return names.get(peer) or peer[:SHORT_ID]

    return RoundRow(
        id=record.id,
        time=record.time,
        purpose=record.purpose,
        epoch=record.epoch,
        outcome=record.outcome,
        reason=record.reason,
        leader=called(record.leader),
        members=len(record.members),
        contributors=len(record.contributors),
        left_out=tuple(LeftOut(peer_id=peer, name=called(peer), reason=why) for peer, why in record.left_out.items()),
        seconds=record.took,
        group=tuple(
            GroupMember(name=called(peer), contributed=peer in record.contributors)
            for peer in record.members[:MOST_MEMBERS]
        ),
        stages=record.stages,
        what="states" if record.purpose.endswith("_state") else "",
        bytes_sent=record.bytes_sent,
        bytes_received=record.bytes_received,
    )


def epoch_rows(epochs: Iterable[EpochRecord], losses: Iterable[SwarmLoss]) -> dict[int, EpochRow]:
    """Rows by epoch, in order: those of the epochs that this peer went through, and of those that others report."""
    reported = {loss.epoch: loss for loss in losses}
    rows = {record.epoch: _epoch_row(record, reported.get(record.epoch)) for record in epochs}
    for epoch, loss in reported.items():
        if epoch not in rows:
            rows[epoch] = _reported_epoch(loss)
    return dict(sorted(rows.items()))


def _epoch_row(record: EpochRecord, reported: SwarmLoss | None) -> EpochRow:
    own = finite(record.loss)
    return EpochRow(
        epoch=record.epoch,
        time=record.time,
        loss=finite(reported.loss) if reported is not None else own,
        own_loss=own,
        samples=record.samples,
        peers=record.peers,
        seconds=record.seconds if record.samples else None,
        averaging_seconds=record.averaging_seconds if record.samples else None,
        samples_per_second=record.samples / record.seconds if record.samples > 0 and record.seconds > 0 else None,
    )


def _reported_epoch(loss: SwarmLoss) -> EpochRow:
    return EpochRow(
        epoch=loss.epoch,
        time=loss.time,
        loss=finite(loss.loss),
        own_loss=None,
        samples=0,
        peers=loss.reporters,
        seconds=None,
        averaging_seconds=None,
        samples_per_second=None,
    )


def event_row(record: EventRecord) -> EventRow:
    return EventRow(id=record.id, time=record.time, level=record.level, kind=record.kind, text=record.text)


def thinned(rows: Sequence[EpochRow], limit: int) -> list[EpochRow]:
    """At most `limit` rows, evenly chosen, the last one among them."""
    if len(rows) <= limit:
        return list(rows)
    step = len(rows) / limit
    return [rows[len(rows) - 1 - int(i * step)] for i in reversed(range(limit))]


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
