"""PeerDirectory: what this peer says of itself under the key `{run_id}_peers`, and what the others say of themselves.

A report is a claim and seconds old: `follow.py` judges it, and `survey.py` asks the peer itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from swarmcli.dht.schema import SchemaValidator
from swarmcli.errors import SwarmError
from swarmcli.events import EpochReported, Event, Gone, OwnAddressesChanged, PeerDisconnected, PeerSeen, PeerSilent
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import set_within
from swarmcli.network.prefix import prefix_of_address
from swarmcli.network.task_owner import TaskOwner
from swarmcli.optim.peers.board import Board
from swarmcli.optim.peers.report import PeerKeys, PeerReport, is_away
from swarmcli.optim.state.lineage import PositionHistory

if TYPE_CHECKING:
    from swarmcli.dht import DHTNode

logger = logging.getLogger(__name__)


# Seconds
EXPIRATION = 60.0  # after which a report is gone, if its peer says no more
REFRESH_PERIOD = 3.0  # between two looks at the others' reports
RENEWAL = 10.0  # after which an unchanged report is written again
FRESH = 15.0  # age up to which a report says that its peer is there: it is renewed and read in that time


class PeerDirectory:
    """Publishes this peer's report when it changes and every few seconds; reads the others' in the background.

    `describe` makes the report. PeerSeen is emitted for every other peer that appears, changes or leaves.
    """

    def __init__(self, node: DHTNode, run_id: str, describe: Callable[[], PeerReport]) -> None:
        self.run_id, self.describe = run_id, describe
        self.endpoint = node.endpoint
        self.others: dict[PeerID, PeerReport] = {}  # as of the last look
        self.readers: list[Callable[[], None]] = []  # called after each look
        self.history = PositionHistory()  # of this peer's own position
        self._board = Board(node, f"{run_id}_peers", PeerReport, EXPIRATION)
        self._present = False  # the others have been told of this peer
        self._changed = asyncio.Event()
        self._tasks = TaskOwner()
        self._ended: dict[PeerID, float] = {}  # swarm time when the connection with a peer that reports ended
        self._silent = set[PeerID]()  # peers that do not answer, as people have been told
        node.add_validators([SchemaValidator(PeerKeys, prefix=run_id)])

    async def start(self) -> None:
        """Declares this peer first and then looks who else is there: if two start at once, one sees the other."""
        self._tasks.hear(self.endpoint.events, self._on_event)
        self.note_position()
        self._present = True
        await self._publish()
        await self.refresh()
        self._tasks.keep(self.endpoint.events, self._keep_publishing, self._keep_reading)

    def spare(self, line: float) -> None:
        """Reads and writes less, for a line of `line` bytes per second; infinite: the line is quick."""
        self._board.line = line

    async def shutdown(self) -> None:
        """Ends the background work and says goodbye, with how the last epoch went. Idempotent."""
        await self._tasks.close()
        if self._present:
            self._present = False
            await self._publish("left")

    # what this peer says

    def announce(self, *, anew: bool = False) -> None:
        """The report has changed: it goes out soon. `anew`: this peer has taken over another lineage."""
        self.note_position(anew=anew)
        self._changed.set()

    def note_position(self, *, anew: bool = False) -> None:
        """This peer remembers where it stands now."""
        self.history.note(self.describe().claim.position, self.endpoint.clock.now(), anew=anew)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, OwnAddressesChanged):
            self._changed.set()  # its report tells the new addresses to peers that wait for a way to it
        elif isinstance(event, PeerDisconnected) and (peer := PeerID.parse(event.peer)) in self.others:
            self._ended[peer] = self.endpoint.clock.now()
            self._silent |= {peer} if event.left else set()  # people hear of that by the report

    async def _publish(self, phase: Literal["left"] | None = None) -> None:
        self._changed.clear()
        report = self.describe()
        try:
            await self._board.publish(report if phase is None else report.model_copy(update={"phase": phase}))
        except SwarmError as error:
            logger.warning("this peer's report was not stored: %s", error)

    async def _keep_publishing(self) -> None:
        await set_within(self._changed, max(RENEWAL, self._board.renewal))
        await asyncio.sleep(self._board.turn_in())
        await self._publish()

    # what the others say

    async def refresh(self) -> Mapping[PeerID, PeerReport]:
        """Reads the others' reports and returns them. If the DHT cannot be read, what was known stays (logged)."""
        try:
            records = await self._board.refresh()
        except SwarmError as error:
            logger.warning("the peers' reports were not read: %s", error)
            return self.others
        records.pop(self.endpoint.peer_id, None)
        # A peer that is no member any more has left: nobody can be connected with it, so its silence is no news.
        membership = self.endpoint.membership
        gone = {p for p, r in records.items() if r.phase == "left" or (membership is not None and membership.is_out(p))}
        before, self.others = self.others, {p: r for p, r in records.items() if p not in gone}
        for peer, report in self.others.items():
            self.endpoint.learn(peer, tuple(report.addresses))
            if before.get(peer) != report:
                self._tell(peer, report, before.get(peer))
        for peer in before.keys() - self.others.keys():  # a peer whose report has expired is lost
            self._tell(peer, records.get(peer, before[peer]), before[peer], "left" if peer in gone else "lost")
        self._tell_of_silent()
        for read in self.readers:
            read()
        return self.others

    async def _keep_reading(self) -> None:
        await asyncio.sleep(max(REFRESH_PERIOD, self._board.look))
        await self.refresh()

    def _tell(self, peer: PeerID, report: PeerReport, before: PeerReport | None, gone: Gone = "") -> None:
        """Emits events of what is new in a report."""
        known = before.recent if before is not None else []
        for ended in report.recent if report.role == "trainer" else ():
            if ended not in known:
                self.endpoint.events.emit(
                    EpochReported(peer.text, ended.epoch, ended.loss, ended.samples, report.samples_per_second)
                )
        seen = PeerSeen(
            peer=peer.text,
            name=report.name,
            role=report.role,
            epoch=report.epoch,
            samples=report.samples,
            samples_per_second=report.samples_per_second,
            client_mode=report.client_mode,
            gone=gone,
        )
        self.endpoint.events.emit(seen)

    def _tell_of_silent(self) -> None:
        self._silent &= self.others.keys()
        self._ended = {peer: moment for peer, moment in self._ended.items() if peer in self.others}
        for peer, report in self.others.items():
            if (there := self.is_there(peer)) == (peer in self._silent):
                self._silent ^= {peer}
                self.endpoint.events.emit(PeerSilent(peer.text, report.name, report.role, answers=there))

    # who is there

    def is_there(self, peer: PeerID) -> bool:
        """Whether a peer is connected, or has a fresh report that is newer than the end of its last connection. From
        any thread."""
        if self.endpoint.is_connected(peer):
            return True
        fresh = FRESH + 2 * self._board.pause  # many peers report more rarely
        return self.age(peer) < fresh and self.others[peer].time > self._ended.get(peer, -math.inf)

    def age(self, peer: PeerID) -> float:
        """Seconds since a peer was last heard: 0 for one that is connected, infinite for one without a report. From any
        thread."""
        return 0.0 if self.endpoint.is_connected(peer) else self.report_age(peer)

    def report_age(self, peer: PeerID) -> float:
        """Seconds since a peer reported; infinite for one without a report. From any thread."""
        report = self.others.get(peer)
        return math.inf if report is None else max(0.0, self.endpoint.clock.now() - report.time)

    @cached_property
    def terms(self) -> str:
        """A digest of the fingerprint, as in reports; peers with the same one train the same run."""
        return self.describe().terms

    @property
    def alike(self) -> dict[PeerID, PeerReport]:
        """The last reports of those who train the same run."""
        return {peer: report for peer, report in self.others.items() if report.terms == self.terms}

    def at_work(self) -> list[PeerID]:
        """Peers that, by their last reports, take part in rounds of this run, or are about to."""
        return [p for p, r in self.alike.items() if r.phase != "lingering" and not is_away(r.pause)]

    def trainers(self) -> dict[PeerID, PeerReport]:
        """The reports of trainers that take part in rounds, are there, and do not pause."""
        at_work = ((peer, self.others[peer]) for peer in filter(self.is_there, self.at_work()))
        return {peer: report for peer, report in at_work if report.role == "trainer" and not report.pause}

    def anyone_computes(self, members: Iterable[PeerID]) -> bool:
        """Whether another trainer is there and computes, by the reports, or because one of the `members` of this peer's
        group has no report yet: a group forms at once, and reports are read every few seconds."""
        return any(report.phase != "stranded" for report in self.trainers().values()) or any(
            peer not in self.others and peer != self.endpoint.peer_id for peer in members
        )

    def is_away(self, peer: PeerID) -> bool:
        """Whether a peer takes part in no round at present, by its last report."""
        report = self.others.get(peer)
        return report is not None and is_away(report.pause)

    def network_of(self, peer: PeerID) -> Hashable:
        """The network in which a peer counts: as its connection shows, or without one as its report says, unproved."""
        found = self.endpoint.prefix(peer)
        if found is None and (report := self.others.get(peer)) is not None and report.addresses:
            return prefix_of_address(report.addresses[0])
        return found

    def is_relayed(self, peer: PeerID) -> bool:
        """Whether what a peer sends here goes over a relay, as far as this peer knows."""
        seen, report = self.endpoint.seen(peer), self.others.get(peer)
        return seen.relayed if seen is not None else report is not None and report.client_mode

    def by_convenience(self, peers: Iterable[PeerID]) -> list[PeerID]:
        """Sorts peers for asking them for a state: those that pause come last, those that need a relay before these; of
        the others first those that are connected, then those that do not train, then the nearest."""

        def cost(peer: PeerID) -> tuple[bool, bool, bool, bool, float]:
            report, round_trip = self.others.get(peer), self.endpoint.round_trip(peer)
            busy = report is None or report.phase == "training"
            apart = not self.endpoint.is_connected(peer)
            far = round_trip if round_trip is not None else 1.0
            return self.is_away(peer), self.is_relayed(peer), apart, busy, far

        return sorted(peers, key=cost)
