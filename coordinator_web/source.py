"""What a dashboard shows: the run at this moment, as a peer's watch tells it, and the past, from the peer's journal.

Texts in these values (names, reasons) may come from other peers: they are data, never markup. Moments are wall-clock
seconds since 1970, durations seconds, sizes bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from swarmcli.errors import JournalError
from swarmcli.events import EpochAdvanced, PeerSeen, RoundFinished
from swarmcli.journal import Journal, JournalReader, Line, Totals

GONE_SECONDS = 600.0  # for this long a peer that left is still listed
REREAD_SECONDS = 0.4  # between two looks into the journal for sums and for who left
ROLES = ("trainer", "auxiliary", "monitor")

State = Literal[
    "waiting",  # nobody computes yet
    "training",
    "averaging",  # a round is under way
    "synchronizing",  # this peer downloads the state
    "stranded",  # it waits, since nobody whom it can reach holds the state of the run
    "finished",  # the run reached its last epoch
]
Health = Literal[
    "in step",
    "behind",
    "not answering",  # no longer, but it said no goodbye either
    "waiting",  # for the state of the run, which it cannot reach
    "another model",  # is what it trains
    "left",  # with a goodbye
    "lost",  # without one
]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """What is known of one peer at this moment, by the peer that shows it."""

    peer_id: str
    role: str
    epoch: int
    name: str = ""
    device: str = ""
    client_mode: bool = False
    me: bool = False
    samples: int = 0  # in the epoch that it is in
    samples_per_second: float = 0.0
    share: float | None = None  # of the samples of the last epochs, 0 to 1; None: unknown
    loss: float | None = None
    last_seen: float = 0.0
    health: Health = "in step"
    trouble: str = ""  # why its last round did not succeed, by its own account; "" when it did
    drift: float | None = None  # of its parameters from the others', relative to their length; None: unknown

    @property
    def counts(self) -> bool:
        """Whether what it computes goes into the epoch: who is gone, or trains another model, adds nothing."""
        return self.health in ("in step", "behind")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The run at this moment as one peer sees it; `samples` of `target` are computed in `epoch`, by all together."""

    run_id: str
    state: State
    peer_id: str  # of the peer that shows it
    role: str
    epoch: int
    samples: int
    target: int
    now: float = 0.0  # the moment of this status, by the clock of the peer that shows it
    started: float | None = None  # when this peer began
    name: str = ""
    max_epochs: int | None = None
    samples_per_second: float = 0.0  # of all who compute
    eta_seconds: float | None = None  # to the end of the epoch; None: unknown
    run_eta_seconds: float | None = None  # to the end of the last epoch
    losses: tuple[float, ...] = ()  # of the last epochs, the swarm's, the oldest first
    last_epoch: EpochAdvanced | None = None  # that was stepped here
    alarm: str = ""  # what a person has to mend, with the remedy
    mode: str = ""  # how the run averages, in words
    join_line: str = ""  # the command with which others join
    link: str = ""  # the link in it; "": others need the recipe file
    install: str = "pipx install swarmcli"  # what somebody types before who has nothing installed
    link_reach: str = ""  # for whom the link is no use, or why there is none
    reach: str = ""  # who can dial the peer that shows it, and what that means for taking part, in a sentence
    result: str = ""  # of a run that has finished: what became of its model at this peer, in words
    peers: tuple[PeerStatus, ...] = ()
    own: Totals | None = None  # what the peer did for the run in all; None where it computes and reduces nothing
    notice: str = ""  # why the histories may be incomplete


class DashboardSource:
    """The present and the past of a run, for the page.

    Methods are called from worker threads, several at once, about twice a second while a page is open. When the journal
    cannot be read they answer without what is in it, and `look` says why. `look` as it is given must not block.
    """

    def __init__(self, journal: Journal, look: Callable[[], RunStatus]) -> None:
        self._journal = journal
        self._look = look
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._totals = Totals()
        self._departed: list[PeerSeen] = []
        self._unreadable = ""

    def look(self) -> RunStatus:
        """The run at this moment, with those who left it lately and the sums of what this peer did."""
        status = self._look()
        with self._lock:
            if abs(status.now - self._read_at) >= REREAD_SECONDS:
                self._read_at = status.now
                self._read(self._reread)
        present = {peer.peer_id for peer in status.peers}
        departed = [
            _departed(seen)
            for seen in self._departed
            if seen.peer not in present and status.now - seen.time < GONE_SECONDS
        ]
        return replace(
            status,
            peers=tuple(sorted([*status.peers, *departed], key=_listing_order)),
            own=self._totals if status.role in ("trainer", "auxiliary") else None,
            notice=self._notice(),
        )

    def epochs(self, *, after: int = -1, limit: int = 600) -> Sequence[EpochAdvanced]:
        """Finished epochs above `after`, by number, with the swarm's losses; thinned out evenly to `limit` rows, the
        last one kept. The last few may still change, as reports arrive."""
        return self._read(lambda reader: reader.chart(self._journal.run.run_id, after=after, limit=limit)) or ()

    def rounds(self, *, after: int = 0, limit: int = 100) -> Sequence[RoundFinished]:
        """Rounds with an id above `after`, oldest first; the newest `limit` of them."""
        return self._read(lambda reader: reader.rounds(self._journal.run.run_id, after=after, limit=limit)) or ()

    def events(self, *, after: int = 0, limit: int = 200) -> Sequence[Line]:
        """Lines for people with an id above `after`, oldest first; the newest `limit` of them."""
        run_id = self._journal.run.run_id
        return self._read(lambda reader: reader.events(run_id, after=after, limit=limit, details=False)) or ()

    def _reread(self, reader: JournalReader) -> None:
        self._totals = reader.totals(self._journal.run.run_id)
        self._departed = [peer for peer in reader.peers(self._journal.run.run_id) if peer.gone]

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
    """A peer that is only known from the journal, because it left or was lost."""
    return PeerStatus(
        peer_id=seen.peer,
        role=seen.role,
        epoch=seen.epoch,
        name=seen.name,
        client_mode=seen.client_mode,
        last_seen=seen.time,
        health=seen.gone or "lost",
    )


def _listing_order(peer: PeerStatus) -> tuple[bool, int, str, str]:
    """This one first, then by role and name: an order that stays as it is while peers train."""
    rank = ROLES.index(peer.role) if peer.role in ROLES else len(ROLES)
    return (not peer.me, rank, peer.name or "\uffff", peer.peer_id)
