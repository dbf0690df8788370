"""What a dashboard shows: the run at this moment, from a peer's watch, and the past, from the peer's journal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from swarmcli.checkpoints.looking import listing
from swarmcli.errors import JournalError
from swarmcli.events import (
    ActivityStatus,
    Contribution,
    EpochAdvanced,
    EpochReported,
    Evaluated,
    PeerSeen,
    RoundFinished,
)
from swarmcli.journal import Axis, Failure, Journal, JournalReader, Line, Totals
from swarmcli.run import views
from swarmcli.run.tables import EXPORTS, rows_of
from swarmcli.run.values import (
    Alert,
    CheckpointShown,
    History,
    Me,
    Overview,
    PeerDetails,
    PeerPage,
    PeerStatus,
    Rounds,
    RunStatus,
    shown_as,
)

LOOK_SECONDS = 0.25  # between two looks at the run and into its journal, however many pages are open
MOST_EVALUATIONS = 1000  # newest evaluations of a run that are shown
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Providers:
    """Functions that tell what neither the run's watch nor the journal knows. Worker threads call them; they must not
    block for long."""

    activity: Callable[[], ActivityStatus] = ActivityStatus
    limits: Callable[[], Mapping[str, object]] = dict
    contributions: Callable[[], Sequence[Contribution]] = tuple
    rests_on: Callable[[], str] = str  # whose count the contributions are, in a sentence
    told_by: Callable[[], str] = str  # the same in words that follow a number
    alerts: Callable[[], Sequence[Alert]] = tuple
    checkpoints: Path | None = None  # the directory that holds them


class DashboardSource:
    """The present and the past of a run, for the page.

    Worker threads call the methods, several at once, about twice a second while a page is open. If the journal cannot
    be read, answers lack what is in it, and `look` says why. The `look` that is given must not block.
    """

    def __init__(
        self,
        journal: Journal,
        look: Callable[[], RunStatus],
        providers: Providers = Providers(),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal = journal
        self._run_id = journal.run.run_id
        self._look = look
        self._providers = providers
        self._clock = clock
        self._lock = threading.Lock()
        self._shown: RunStatus | None = None
        self._looked_at = float("-inf")
        self._totals = Totals()
        self._departed: list[PeerSeen] = []
        self._evaluation: Evaluated | None = None
        self._unreadable = ""

    def look(self) -> RunStatus:
        """Returns the run at this moment, with peers that left it lately and the sums of what this peer did. It is put
        together a few times a second at most, however many pages are open."""
        with self._lock:
            now = self._clock()
            if self._shown is None or not 0 <= now - self._looked_at < LOOK_SECONDS:
                self._shown, self._looked_at = self._compose(), now
            return self._shown

    def _compose(self) -> RunStatus:
        status = self._look()
        self._read(lambda reader: self._reread(reader, status.now - 600))  # a peer that left is listed for so long
        present = {peer.peer_id for peer in status.peers}
        departed = [_departed(seen) for seen in self._departed if seen.peer not in present]
        evaluation = status.evaluation or self._evaluation
        return replace(
            status,
            evaluation=evaluation,
            evaluated=views.evaluated(evaluation, status.best) if evaluation else "",
            peers=tuple(sorted([*status.peers, *departed], key=views.listing_order)),
            notice=self._notice(),
        )

    def overview(self) -> Overview:
        """Returns what a page shows at first, without the lists."""
        return self.overview_of(self.look())

    def overview_of(self, status: RunStatus) -> Overview:
        """Returns the same for a status that was looked up before."""
        me = next((peer for peer in status.peers if peer.me), None)
        activity, contributions = self._providers.activity(), self._providers.contributions()
        own = next((each for each in contributions if each.peer == status.peer_id), None)
        rank, ranked = views.place_among(contributions, status.peer_id)
        pace = me.samples_per_second if me else 0.0
        shown = Me(
            sentence=views.sentence(status, activity, pace),
            activity=activity,
            samples_per_second=pace,
            share=me.share if me else None,
            samples=round(own.samples) if own else self._totals.own_samples,
            hours=own.hours if own else 0.0,
            rank=rank,
            ranked=ranked,
            told_by=self._providers.told_by() if own else "",
            rests_on=self._providers.rests_on(),
            totals=self._totals,
            limits=self._providers.limits(),
        )
        alerts = {alert.kind: alert for alert in self._providers.alerts()}
        told = "stalled" in alerts
        if told and status.waits:  # the alert has the words with which it began, but whom the run waits for changes
            alerts["stalled"] = replace(alerts["stalled"], text=status.waits)
        return Overview(
            run=replace(status, peers=(), waits="" if told else status.waits),
            me=shown,
            counts=views.count(status.peers),
            alerts=tuple(alerts.values()),
        )

    def peers(self, *, offset: int = 0, limit: int = 100, sort: str = "", query: str = "") -> PeerPage:
        """See `views.page_of`."""
        return views.page_of(self.look().peers, offset, limit, sort, query)

    def peer(self, peer_id: str) -> PeerDetails | None:
        """Returns all that is known of one peer; None: nothing."""
        shown = next((peer for peer in self.look().peers if peer.peer_id == peer_id), None)
        known, reports, rounds = self._read(lambda reader: self._past_of(reader, peer_id)) or (None, [], [])
        if shown is None and known is None:
            return None
        return PeerDetails(
            peer=shown or _departed(known),  # type: ignore[arg-type]
            first_seen=known.first_seen if known else None,
            history=tuple(reports),
            rounds=tuple(rounds),
            contribution=next((each for each in self._providers.contributions() if each.peer == peer_id), None),
        )

    def _past_of(
        self, reader: JournalReader, peer: str
    ) -> tuple[PeerSeen | None, list[EpochReported], list[RoundFinished]]:
        run = self._run_id
        known = reader.peers(run, peer)
        return (known[0] if known else None), reader.reports_of(run, peer), reader.rounds_of(run, peer)

    def history(self, *, begin: float | None = None, points: int = 300, by: Axis = "time") -> History:
        """Returns how the run went from a moment, or an epoch, on, in at most `points` points."""

        def read(reader: JournalReader) -> History:
            within = reader.moments(self._run_id, begin=begin, by=by, points=points)
            place = attrgetter(by)
            evaluations = [
                each
                for each in reader.evaluations(self._run_id, limit=MOST_EVALUATIONS)
                if begin is None or place(each) >= begin
            ]
            return History(points=tuple(within), evaluations=tuple(evaluations))

        return self._read(read) or History()

    def epochs(self, *, after: int = -1, limit: int = 600) -> Sequence[EpochAdvanced]:
        """Returns finished epochs above `after`, by number, with the swarm's losses; thinned out evenly to `limit`
        rows, the last one kept. The last few may still change, as reports arrive."""
        return self._read(lambda reader: reader.chart(self._run_id, after=after, limit=limit)) or ()

    def rounds(self, *, after: int = 0, limit: int = 100) -> Sequence[RoundFinished]:
        """Returns rounds with an id above `after`, oldest first; the newest `limit` of them."""
        return self._read(lambda reader: reader.rounds(self._run_id, after=after, limit=limit)) or ()

    def round_page(self, *, after: int = 0, limit: int = 100) -> Rounds:
        """Returns the same rounds, and the names of their peers."""
        names = {peer.peer_id: peer.name for peer in self.look().peers}
        return views.page_of_rounds(self.rounds(after=after, limit=limit), names)

    def events(self, *, after: int = 0, limit: int = 200) -> Sequence[Line]:
        """Returns lines for people with an id above `after`, oldest first; the newest `limit` of them. Evaluations are
        in the history: as lines they would bury the others."""

        def read(reader: JournalReader) -> list[Line]:
            return reader.events(self._run_id, after=after, limit=limit, details=False, without="evaluation")

        return self._read(read) or ()

    def failures(self) -> Sequence[Failure]:
        """Returns why rounds failed or went on without somebody, the most frequent reason first."""
        return self._read(lambda reader: reader.failures(self._run_id)) or ()

    def checkpoints(self) -> Sequence[CheckpointShown]:
        """Returns the checkpoints of the shown peer, the newest first."""
        directory = self._providers.checkpoints
        if directory is None:
            return ()
        return [
            shown_as(CheckpointShown, each, name=each.path.name, time=each.written)
            for each in listing(directory)
            if each.path.parent == directory
        ]

    def checkpoint(self, name: str) -> Path | None:
        """Returns the directory of one of them; None: there is none of that name. Only names that are listed lead
        anywhere."""
        directory = self._providers.checkpoints
        if directory is None or name not in {each.name for each in self.checkpoints()}:
            return None
        return directory / name

    def contributions(self) -> Sequence[Contribution]:
        """Returns the contributions, the most samples first."""
        return sorted(self._providers.contributions(), key=lambda each: (-each.samples, each.peer))

    def export(self, name: str) -> tuple[type[Any], Iterable[Any]]:
        """Returns the type and the rows of one of EXPORTS. Rows are read while they are taken, which raises
        JournalError if the journal cannot be read."""
        match name:
            case "peers":
                return PeerStatus, self.look().peers
            case "contributions":
                return Contribution, self.contributions()
            case _:
                return EXPORTS[name], self._every(name)

    def _every(self, name: str) -> Iterator[Any]:
        with self._journal.read() as reader:
            yield from rows_of(reader, self._run_id, name)

    def _reread(self, reader: JournalReader, since: float) -> None:
        self._totals = reader.totals(self._run_id)
        self._departed = reader.departed(self._run_id, since)
        if self._evaluation is None:
            self._evaluation = next(iter(reader.evaluations(self._run_id, limit=1)), None)

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


def _departed(seen: PeerSeen) -> PeerStatus:
    """A peer that is known only from the journal, because it left or was lost."""
    gone = {"last_seen": seen.time, "health": seen.gone or "lost", "samples": 0, "samples_per_second": 0.0}
    return shown_as(PeerStatus, seen, peer_id=seen.peer, **gone)
