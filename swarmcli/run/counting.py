"""Reads what each peer has given to a run, and keeps count of it.

Monitors keep count, and trainers that write checkpoints: each notes in its journal what its own rounds credit, SQL adds
it up, and whoever asks is told the sums. Other peers keep no count: they ask when somebody wants to see it, show one
writer's table and say whose it is, and ask for their own row when they leave.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from msgspec.structs import replace as replace_fields

from swarmcli.dht import DHTNode
from swarmcli.errors import CallRefused, JournalError
from swarmcli.events import Contribution, ContributionsCounted, EpochCredited, Event
from swarmcli.journal import Journal
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.loop_thread import offload
from swarmcli.network.task_owner import TaskOwner
from swarmcli.run import contributions as given
from swarmcli.run.contributions import Attestation, ContributionRow, ContributionTable, Mark
from swarmcli.run.views import place_among

if TYPE_CHECKING:
    from swarmcli.optim import PeerReport

logger = logging.getLogger(__name__)

PRESENCE = 30.0  # seconds between two notes of which peers are there
FRESH = 5.0  # seconds for which sums that were read are told, …
BEHIND = 1.0  # … and if an epoch was counted since: a peer that leaves asks for what it has just given
REFRESH = 10.0  # seconds after which a reader asks again, at the earliest
ASK = 2.0  # seconds that a peer waits for its own row when it leaves
LISTED = 128  # rows that a page shows of another peer's table


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A peer's view of its run, on the event loop."""

    node: DHTNode
    identity: Identity
    run_id: str
    run: str  # the hash of the recipe
    own: Callable[[], PeerReport]
    others: Callable[[], Mapping[PeerID, PeerReport]]
    answers: Callable[[PeerID], bool]
    clock: Callable[[], float]  # seconds since 1970


class ContributionReader:
    """Reads the contributions that other peers count, for a peer that keeps no count. Made and closed on the event
    loop."""

    told_by = "as one peer counts"  # whose word the contributions are, in words for people

    def __init__(self, around: RunView) -> None:
        self._around = around
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskOwner()
        self._last: EpochCredited | None = None
        self._asked = -math.inf
        self._listed: Sequence[Contribution] = ()
        self._rests_on = ""
        self._closed = False

    async def start(self) -> None:
        """Asks nothing before somebody wants to know."""
        self._tasks.hear(self._around.node.endpoint.events, self._note)

    async def close(self) -> None:
        self._closed = True
        await self._tasks.close()

    def contributions(self) -> Sequence[Contribution]:
        """Returns one writer's table, most samples first. Asks again now and then, and does not wait for the answers.
        Any thread may call it."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._refresh)
        return self._listed

    def rests_on(self) -> str:
        """Says whose table that is, in a sentence; "": there is none yet. Any thread may call it."""
        return self._rests_on

    def _note(self, event: Event) -> None:
        if isinstance(event, EpochCredited):
            self._last = event

    def _refresh(self) -> None:
        now = self._loop.time()
        if not self._closed and now >= self._asked + REFRESH:
            self._asked = now
            self._tasks.spawn(self._read())

    async def _read(self) -> None:
        """Keeps the fullest table, with this peer's own row if the table lacks it."""
        around = self._around
        tables = await given.fetch_tables(around.node.endpoint, self._writers(), around.run_id, LISTED)
        if (found := given.fullest(tables)) is None:
            logger.debug("nobody told what each has given: %s", list(tables.values()))
            return
        (_, table), own = found, around.node.peer_id
        listed = table.listed
        if own not in table.peers and (standing := await self.standing()) is not None:
            listed.append(standing.entry.shown(own.text))
        self._listed = listed
        self._rests_on = " ".join(given.whose_count(tables, lambda peer: peer.short))

    def _writers(self) -> list[PeerID]:
        """Returns the other peers that keep count and answer, in random order."""
        reports = [(peer, report) for peer, report in self._around.others().items() if self._around.answers(peer)]
        self._around.node.endpoint.random.shuffle(reports)
        return given.writers_among(dict(reports))

    async def standing(self) -> Attestation | None:
        """Returns this peer's own row, signed by the one that has counted most of it; None if none of them answers at
        once. If that one has yet to count the last epoch that this peer knows of, it is asked again, for about ASK
        seconds."""
        node, run_id, last, until = self._around.node, self._around.run_id, self._last, self._loop.time() + ASK
        while True:
            said = await given.fetch_attestation(node.endpoint, self._writers(), run_id, node.peer_id, ASK)
            is_behind = said is not None and last is not None and said.until.epoch < last.epoch
            if not is_behind or self._loop.time() >= until:
                return said
            await asyncio.sleep(ASK / 4)


class ContributionKeeper(ContributionReader):
    """Keeps count, and tells whoever asks what its journal has added up."""

    told_by = "as this peer counts"

    def __init__(self, around: RunView, journal: Journal) -> None:
        super().__init__(around)
        self._journal = journal
        self._lock = threading.Lock()  # guards what was read: threads of pages ask as well
        self._counted = ContributionsCounted(around.run_id, 0, 0)  # how far this peer has counted
        self._read_at = -math.inf
        self._sums: tuple[ContributionTable, Sequence[Contribution]] = (self._table_of(self._counted, ()), ())

    async def start(self) -> None:
        table, _ = await offload(self._look)
        self._counted = ContributionsCounted(self._around.run_id, table.until.epoch, table.until.samples, table.since)
        await super().start()
        endpoint = self._around.node.endpoint
        endpoint.serve(given.TABLE, given.TableWanted, self._answer_table)
        endpoint.serve(given.ROW, given.RowWanted, self._answer_row)
        self._tasks.keep(endpoint.events, self._keep_noting_presence)

    async def close(self) -> None:
        self._around.node.endpoint.withdraw(given.TABLE, given.ROW)
        await super().close()

    def contributions(self) -> Sequence[Contribution]:
        return [given.whole(each) for each in self._look()[1]]

    def rests_on(self) -> str:
        return f"This peer keeps count itself: {self._look()[0].in_words}."

    def _look(self) -> tuple[ContributionTable, Sequence[Contribution]]:
        """Returns the journal's sums; it may wait for the disk. Any thread may call it."""
        with self._lock:
            now = self._around.clock()
            lasting = BEHIND if self._sums[0].until.epoch < self._counted.epoch else FRESH
            if not self._read_at <= now < self._read_at + lasting:
                self._read_at = now
                self._journal.flush(1.0)
                try:
                    with self._journal.read() as reader:
                        counted, rows = reader.counted(self._around.run_id), reader.contributions(self._around.run_id)
                    self._sums = self._table_of(counted or self._counted, rows), rows
                except JournalError as error:
                    logger.warning("contributions are told as they were: %s", error)
            return self._sums

    def _table_of(self, counted: ContributionsCounted, rows: Sequence[Contribution]) -> ContributionTable:
        first, everything = rows[: given.MOST_ROWS], math.fsum(row.samples for row in rows)
        peers, sent = tuple(PeerID.parse(row.peer) for row in first), tuple(map(ContributionRow.of, first))
        until = Mark(counted.epoch, counted.run_samples)
        return ContributionTable(self._around.run_id, until, counted.since, everything, peers, sent)

    # what is seen here

    def _note(self, event: Event) -> None:
        super()._note(event)
        # An epoch counts once. If the run was begun anew, or from an old checkpoint, epochs count again from there.
        before = self._counted.epoch
        if isinstance(event, EpochCredited) and not before - 64 <= event.epoch <= before:
            self._count(event)

    def _add(self, peer: str, **seen: Any) -> None:
        now, own = self._around.clock(), self._around.node.peer_id
        of_peer = PeerID.parse(peer)
        report = self._around.own() if of_peer == own else self._around.others().get(of_peer)
        if report is not None:  # a peer without a name reports its short id, which it has not chosen
            seen |= {"name": "" if report.name == of_peer.short else report.name, "team": report.team}
        self._journal.record(Contribution(peer, run_id=self._around.run_id, first=now, last=now, **seen))

    def _count(self, event: EpochCredited) -> None:
        hours = max(0.0, event.seconds) / 3600
        for peer in event.samples.keys() | event.reduced.keys():
            samples, reduced = event.samples.get(peer, 0.0), event.reduced.get(peer, 0)
            self._add(peer, samples=samples, hours=hours, rounds=1, reduced_bytes=reduced)
        # A peer that joins later counts from there on: peers that were there before have the epochs before.
        since = self._counted.since if self._counted.epoch else event.epoch
        self._counted = replace(self._counted, epoch=event.epoch, run_samples=event.run_samples, since=since)
        self._journal.record(self._counted)

    async def _keep_noting_presence(self) -> None:
        before = self._loop.time()
        await asyncio.sleep(PRESENCE)
        seconds = min(self._loop.time() - before, 2 * PRESENCE)  # a machine that slept saw nobody meanwhile
        present = [peer for peer in self._around.others() if self._around.answers(peer)]
        for peer in (*present, self._around.node.peer_id):
            self._add(peer.text, uptime=seconds)

    # what it hands out

    async def _answer_table(self, _: PeerID, wanted: given.TableWanted) -> ContributionTable:
        table, _rows = await self._asked_for(wanted.run_id)
        return replace_fields(table, peers=table.peers[: wanted.most], rows=table.rows[: wanted.most])

    async def _answer_row(self, _: PeerID, wanted: given.RowWanted) -> Attestation:
        """Returns an empty row for a peer that has given nothing."""
        table, rows = await self._asked_for(wanted.run_id)
        around, asked = self._around, wanted.peer
        rank, giving = place_among(rows, asked.text)
        entry = next((ContributionRow.of(row) for row in rows if row.peer == asked.text), ContributionRow())
        about, place = (around.run_id, around.run, around.identity.peer_id, asked), (rank or 0, giving, table.until)
        since = table.since if table.since > 1 else UNSET
        return Attestation(*about, entry, *place, 0, around.clock(), since=since).signed(around.identity)

    async def _asked_for(self, run_id: str) -> tuple[ContributionTable, Sequence[Contribution]]:
        if run_id != self._around.run_id:
            raise CallRefused("run", f"this peer takes part in {self._around.run_id!r}")
        return await offload(self._look)
