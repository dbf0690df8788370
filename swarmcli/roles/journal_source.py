"""What the dashboard shows, put together from the journal and from what the role says of the moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from coordinator_web.source import (
    Contribution,
    EpochRow,
    EventRow,
    LivePeer,
    LiveStatus,
    PeerRow,
    RoundRow,
    RunStatus,
)
from swarmcli.errors import JournalError
from swarmcli.journal import Journal, JournalReader, PeerRecord, Totals
from swarmcli.roles import dashboard_rows as rows_of

GONE_SECONDS = 600.0  # for this long a peer that left is still listed
MOST_EPOCHS = 4000  # kept in memory; beyond that the older half is thinned out
UNSETTLED_EPOCHS = 4  # the last ones are read again, for reports arrive after the epoch
REREAD_SECONDS = 0.4  # between two looks into the journal

T = TypeVar("T")


class JournalSource:
    """A `DashboardSource` over a journal that this process writes.

    `live()` says how things stand; it is called from worker threads and must not block. When the journal cannot be
    read, the histories stay as they were and the status says why.
    """

    def __init__(self, journal: Journal, live: Callable[[], LiveStatus]) -> None:
        self._journal = journal
        self._live = live
        self._run_id = journal.run.run_id
        self._started = journal.clock()
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._epochs: dict[int, EpochRow] = {}
        self._totals = Totals()
        self._shares: dict[str, float] = {}
        self._known: dict[str, PeerRecord] = {}
        self._unreadable = ""

    def status(self) -> RunStatus:
        live = self._live()
        self._refresh(live)
        here = [peer for peer in live.peers if peer.answers]
        return RunStatus(
            run_id=live.run_id,
            state=live.state,
            peer_id=live.peer_id,
            role=live.role,
            name=live.name,
            epoch=live.epoch,
            max_epochs=live.max_epochs,
            samples=live.samples,
            target=live.target,
            eta_seconds=rows_of.finite(live.eta_seconds),
            run_eta_seconds=rows_of.finite(live.run_eta_seconds),
            alarm=live.alarm,
            samples_per_second=sum(rows_of.finite(peer.samples_per_second) or 0.0 for peer in here if not peer.apart),
            loss=next((row.loss for row in reversed(self._epochs.values()) if row.loss is not None), None),
            trainers=sum(peer.role == "trainer" for peer in here),
            auxiliaries=sum(peer.role == "auxiliary" for peer in here),
            monitors=sum(peer.role == "monitor" for peer in here),
            started=self._started,
            now=self._journal.clock(),
            join_line=live.join_line,
            mode=live.mode,
            result=live.result,
            own=self._contribution(live),
            notice=self._notice(),
        )

    def peers(self) -> Sequence[PeerRow]:
        live = self._live()
        self._refresh(live)
        now = self._journal.clock()
        pace = next((row.seconds for row in reversed(self._epochs.values()) if row.seconds), None)
        rows = [rows_of.peer_row(peer, live, now, self._shares.get(peer.peer_id), pace) for peer in live.peers]
        present = {peer.peer_id for peer in live.peers}
        for peer in self._known.values():
            if peer.gone and peer.peer not in present and now - peer.last_seen < GONE_SECONDS:
                rows.append(rows_of.departed(peer))
        return sorted(rows, key=rows_of.listing_order)

    def epochs(self, *, after: int = -1, limit: int = 600) -> Sequence[EpochRow]:
        self._refresh(self._live())
        return rows_of.thinned([row for epoch, row in self._epochs.items() if epoch > after], limit)

    def rounds(self, *, after: int = 0, limit: int = 100) -> Sequence[RoundRow]:
        records = self._read(lambda reader: reader.rounds(self._run_id, after=after, limit=limit)) or []
        names = {peer.peer_id: peer.name for peer in self._live().peers} if records else {}
        names |= {peer.peer: peer.name for peer in self._known.values() if not names.get(peer.peer)}
        return [rows_of.round_row(record, names) for record in records]

    def events(self, *, after: int = 0, limit: int = 200) -> Sequence[EventRow]:
        records = self._read(lambda reader: reader.events(self._run_id, after=after, limit=limit, details=False))
        return [rows_of.event_row(record) for record in records or ()]

    def _refresh(self, live: LiveStatus) -> None:
        """Reads what is new in the journal, unless somebody just did. Replaces the histories, never changes them, so
        that whoever holds them may go through them meanwhile."""
        with self._lock:
            if abs(self._journal.clock() - self._read_at) >= REREAD_SECONDS:
                self._read_at = self._journal.clock()
                self._read(lambda reader: self._take(reader, live))

    def _take(self, reader: JournalReader, live: LiveStatus) -> None:
        after = max(-1, max(self._epochs, default=-1) - UNSETTLED_EPOCHS)
        fresh = rows_of.epoch_rows(reader.epochs(self._run_id, after=after), reader.losses(self._run_id, after=after))
        self._epochs = _bounded({**self._epochs, **fresh})
        recent = reader.reports(self._run_id, after=max(self._epochs, default=0) - rows_of.SHARE_EPOCHS)
        self._shares = rows_of.shares(recent, {peer.peer_id: peer.samples_per_second for peer in live.peers})
        self._totals = reader.totals(self._run_id)
        self._known = {peer.peer: peer for peer in reader.peers(self._run_id)}

    def _read(self, query: Callable[[JournalReader], T]) -> T | None:
        try:
            with self._journal.read() as reader:
                result = query(reader)
        except JournalError as error:
            self._unreadable = str(error)
            return None
        self._unreadable = ""
        return result

    def _notice(self) -> str:
        failing = self._journal.statistics().failing
        if failing:
            return f"The journal cannot be written ({failing}): epochs, rounds and events may be missing here."
        return f"The journal cannot be read: {self._unreadable}" if self._unreadable else ""

    def _contribution(self, live: LiveStatus) -> Contribution | None:
        """What this peer does for the run; a monitor only follows."""
        me: LivePeer | None = next((peer for peer in live.peers if peer.peer_id == live.peer_id), None)
        if live.role not in ("trainer", "auxiliary") or me is None:
            return None
        totals = self._totals
        return Contribution(
            samples=me.samples,
            total_samples=totals.own_samples,
            epochs=totals.epochs,
            share=self._shares.get(me.peer_id),
            samples_per_second=me.samples_per_second,
            loss=rows_of.finite(me.loss),
            rounds_committed=totals.rounds_committed,
            rounds_failed=totals.rounds_failed + totals.rounds_undecided,
            bytes_sent=totals.bytes_sent,
            bytes_received=totals.bytes_received,
        )


def _bounded(epochs: dict[int, EpochRow]) -> dict[int, EpochRow]:
    """By epoch; of too many, every other one of the older half goes, until they are few enough."""
    numbers = sorted(epochs)
    while len(numbers) > MOST_EPOCHS:
        half = len(numbers) // 2
        numbers = numbers[:half:2] + numbers[half:]
    return {number: epochs[number] for number in numbers}
