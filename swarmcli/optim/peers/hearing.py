"""When each peer of a run was last heard of: on a connection, from somebody who has one, or by its own report.

connected with it          every second or so of silence is asked about, so a peer that lives is heard of at least
                           every two seconds, and one that was killed or stopped is known within five
not connected with it      peers in client mode cannot dial each other: whoever listens, and so is connected with
                           both (a monitor, an auxiliary), is asked whom it hears
nobody can tell            its report, which it renews every ten seconds
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from swarmcli.backoff import Backoff
from swarmcli.errors import CallError, NetworkError
from swarmcli.events import PeerSilent
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PEER_ID_BYTES, PeerID
from swarmcli.network.task_owner import TaskOwner
from swarmcli.network.wire.messages import Moment
from swarmcli.optim.peers.report import PeerReport

MOST_ASKED = 64  # peers in one question
UNHEARD = -1.0


@dataclass(frozen=True, slots=True)
class HearingOptions:
    """When a peer counts as silent, and how that is found out. Times are seconds.

    A process that was stopped has to be known within five: looks count up to half a second late, and screens draw up
    to half a second later. A healthy peer may be silent for 1.5 s until it is asked; `stopped` leaves its loop 2.5 s to
    come to the answer, on a machine that is busy with other things.
    """

    look_period: float = 0.5  # between two looks at the connections
    ask_period: float = 1.5  # between two questions to witnesses, and between two attempts to connect
    answer_timeout: float = 3.0
    stopped: float = 4.0  # without a byte on a connection that stands
    silent: float = 4.5  # without a word of a peer that is connected with us or with a witness
    report_silent: float = 15.0  # the same where only its reports tell: they come every ten, and are read every three
    watched: int = 32  # peers with whom a connection is kept and watched
    witnesses: int = 3
    dials_at_once: int = 4
    dial_again: float = 5.0


class HeardRequest(msgspec.Struct, frozen=True):
    """Which of these peers do you hear?"""

    peers: list[bytes]


class HeardReply(msgspec.Struct, frozen=True):
    """For each, in the same order, the seconds since; UNHEARD: there is no connection."""

    ages: Annotated[list[Moment], msgspec.Meta(max_length=MOST_ASKED)]


@dataclass(slots=True)
class _Contact:
    """The last signs of life of one peer."""

    heard: float = -math.inf  # loop time of its last word
    received: int = -1  # bytes on the connection with it, by the last look; -1: there was none
    looks: int = 0  # since they grew
    told: bool = False  # a connection told of it, here or at a witness, since its last report
    silent: bool = False  # listeners were told that it does not answer
    left: float = math.inf  # swarm time of its goodbye; its last report may say otherwise
    watch: asyncio.Future[str] | None = None

    def cease(self) -> None:
        """Its connection is watched no more."""
        if self.watch is not None:
            self.watch.cancel()


_NOBODY = _Contact()


class Hearing:
    """Moments, by loop time, that never fall; those of peers without a report are forgotten. Reads from any thread."""

    options = HearingOptions()

    def __init__(self, endpoint: Endpoint, run_id: str, reports: Callable[[], Mapping[PeerID, PeerReport]]) -> None:
        """`reports`: the last one of every other peer of the run."""
        self._endpoint = endpoint
        self._method = f"{run_id}.heard"
        self._reports = reports
        self._contacts: dict[PeerID, _Contact] = {}
        self._looked = 0.0  # loop time of the last look
        self._dialed = Backoff[PeerID](self.options.dial_again, self.options.dial_again)
        self._tasks = TaskOwner()
        self._time: Callable[[], float] = float

    async def start(self) -> None:
        self._time = asyncio.get_running_loop().time
        self._looked = self._time()
        self._endpoint.serve(self._method, HeardRequest, self._answer)
        self._tasks.keep(self._endpoint.events, self._keep_looking, self._keep_asking)

    async def close(self) -> None:
        """Idempotent; leaves no task."""
        self._endpoint.withdraw(self._method)
        await self._tasks.close()
        for contact in self._contacts.values():
            contact.cease()

    def now(self) -> float:
        """The loop's time, for threads that have none."""
        return self._time()

    def age(self, peer: PeerID) -> float:
        """Seconds since this peer was last heard of; infinite if it never was."""
        contact = self._contacts.get(peer, _NOBODY)
        # A loop that was held up has not listened meanwhile: its own pause is nobody's silence.
        return max(0.0, min(self._time(), self._looked + 2 * self.options.look_period) - contact.heard)

    def answers(self, peer: PeerID) -> bool:
        """Whether it can be taken for alive: false within five seconds where a connection tells, at once if it says
        goodbye."""
        if self._endpoint.is_connected(peer):
            return self.age(peer) < self.options.stopped
        contact = self._contacts.get(peer, _NOBODY)
        if contact.left < math.inf:
            return False
        return self.age(peer) < (self.options.silent if contact.told else self.options.report_silent)

    def is_certain(self, peer: PeerID) -> bool:
        """Whether more than a report, which a dead peer leaves behind, tells of it."""
        return self._contacts.get(peer, _NOBODY).told

    def note_goodbye(self, peer: PeerID) -> None:
        """Its connection ended since it leaves: it is gone, until it connects again or makes another report."""
        if peer in self._contacts:
            self._contacts[peer].left = self._endpoint.clock.now()

    def note_report(self, peer: PeerID, report: PeerReport) -> None:
        """A report that was not known yet. Who renews it lives, whatever became of a connection."""
        contact = self._contacts.setdefault(peer, _Contact())
        if report.time > contact.left:
            contact.left = math.inf
        self._time = asyncio.get_running_loop().time
        age = max(0.0, self._endpoint.clock.now() - report.time)
        if self._endpoint.is_connected(peer):
            contact.told = True
        elif age < self.age(peer) - self.options.look_period:
            contact.told = False  # it was made after the last word on the connection: not read late
        self._note(contact, age)

    async def find_living(self, peers: Iterable[PeerID]) -> set[PeerID]:
        """Which of these peers, who gave this one no answer, live nevertheless: by what witnesses say now.

        Without a witness the reports decide, but not of a peer with whom the connection has ended.
        """
        asked = [peer for peer in peers if not self._endpoint.is_connected(peer)]
        heard = await self._ask_witnesses(asked)
        if heard is None:
            return {peer for peer in asked if not self.is_certain(peer) and self.answers(peer)}
        return {peer for peer in asked if peer in heard and heard[peer] < self.options.silent}

    def _note(self, contact: _Contact, age: float) -> None:
        contact.heard = max(contact.heard, self._time() - age)

    async def _keep_looking(self) -> None:
        self._look()
        await asyncio.sleep(self.options.look_period)

    def _look(self) -> None:
        self._looked, reports = self._time(), self._reports()
        room = self.options.watched - sum(contact.watch is not None for contact in self._contacts.values())
        for peer, report in reports.items():
            contact = self._contacts.setdefault(peer, _Contact())
            if self._hears(peer, contact):
                contact.left, contact.told = math.inf, True
                self._note(contact, contact.looks * self.options.look_period)
                if contact.watch is None and room > 0:
                    contact.watch, room = self._endpoint.lost(peer), room - 1
                if contact.watch is not None and contact.watch.done():
                    contact.watch = None  # the connection is another one by now, which the next look will watch
            self._tell(peer, contact, report)
        for peer in self._contacts.keys() - reports.keys():
            self._contacts.pop(peer).cease()

    def _hears(self, peer: PeerID, contact: _Contact) -> bool:
        """Whether there is a connection with this peer. Looks without a byte from it are counted, not time: a machine
        that slept or was too busy to look has not been waiting."""
        received = self._endpoint.received(peer)
        contact.looks = contact.looks + 1 if received is not None and received <= contact.received else 0
        contact.received = -1 if received is None else received
        return received is not None

    def _tell(self, peer: PeerID, contact: _Contact, report: PeerReport) -> None:
        answers = self.answers(peer)
        if answers == contact.silent and contact.left == math.inf:  # people hear of goodbyes anyway
            contact.silent = not answers
            self._endpoint.events.emit(PeerSilent(peer.text, report.name, report.role, answers=answers))

    async def _keep_asking(self) -> None:
        missing = [peer for peer in self._reports() if not self._endpoint.is_connected(peer)]
        self._dial(missing)
        await self._ask_witnesses(missing)
        await asyncio.sleep(self.options.ask_period)

    def _dial(self, missing: Sequence[PeerID]) -> None:
        """A peer that nobody can dial is reached by those with whom it keeps a connection."""
        now, reports = self._time(), self._reports()
        due = [
            peer for peer in self._in_order(missing) if not (reports[peer].client_mode or self._dialed.rests(peer, now))
        ]
        room = self.options.watched - (len(reports) - len(missing))
        for peer in due[: max(0, min(self.options.dials_at_once, room))]:
            self._dialed.add(peer, now)
            self._tasks.spawn(self._connect(peer))

    async def _connect(self, peer: PeerID) -> None:
        await self._ask(peer, [])

    def _in_order(self, peers: Collection[PeerID]) -> list[PeerID]:
        """First those whom most others are likely to be connected with."""
        reports = self._reports()
        known = [(peer, reports[peer]) for peer in peers if peer in reports]
        known.sort(key=lambda each: (each[1].client_mode, each[1].role == "trainer", each[0]))
        return [peer for peer, _ in known]

    async def _ask_witnesses(self, peers: Sequence[PeerID]) -> dict[PeerID, float] | None:
        """The shortest age of each peer that somebody hears; None if nobody could be asked."""
        connected = [peer for peer in self._reports() if self._endpoint.is_connected(peer)]
        witnesses = [peer for peer in self._in_order(connected) if peer not in peers][: self.options.witnesses]
        asked = list(peers)[:MOST_ASKED]
        if not asked or not witnesses:
            return None
        answers = await asyncio.gather(*(self._ask(witness, asked) for witness in witnesses))
        if all(answer is None for answer in answers):
            return None
        heard: dict[PeerID, float] = {}
        for ages in answers:
            for peer, age in zip(asked, ages or (), strict=False):
                if age >= 0:  # neither UNHEARD nor NaN
                    heard[peer] = min(age, heard.get(peer, age))
        for peer, age in heard.items():
            contact = self._contacts.setdefault(peer, _Contact())
            contact.told = True
            self._note(contact, age)
        return heard

    async def _ask(self, witness: PeerID, peers: Sequence[PeerID]) -> list[float] | None:
        request, timeout = HeardRequest([bytes(peer) for peer in peers]), self.options.answer_timeout
        try:
            reply = await self._endpoint.call(witness, self._method, request, HeardReply, timeout=timeout)
        except (CallError, NetworkError):
            return None
        return reply.ages if len(reply.ages) == len(peers) else None

    async def _answer(self, peer: PeerID, request: HeardRequest) -> HeardReply:
        asked = [PeerID(each) for each in request.peers[:MOST_ASKED] if len(each) == PEER_ID_BYTES]
        # A connected peer that no look has counted yet has just come: its report is read only every few seconds.
        ages = [self.age(each) if self._contacts.get(each, _NOBODY).received >= 0 else 0.0 for each in asked]
        connected = [self._endpoint.is_connected(each) for each in asked]
        return HeardReply([age if here else UNHEARD for age, here in zip(ages, connected, strict=True)])
