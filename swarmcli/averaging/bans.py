"""Who has lied in a run, by evidence that anyone can check: nobody averages with them again.

    evidence found here         ──▶ Bans ──▶ told to every peer that is connected, or connects later
    evidence of others          ──▶ verified by each that hears it
    a peer that begins to average   asks the peers with which it is connected

A ban is of an identity, for the run. It costs a stranger nothing to come again under a fresh one: bans keep liars from
lying for long under one name, and what they had earned with it is gone.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Annotated, Any, Protocol, cast
from weakref import WeakValueDictionary

import msgspec

from swarmcli.averaging.evidence import Evidence
from swarmcli.backoff import Backoff
from swarmcli.dht.node import DHTNode
from swarmcli.errors import CallRefused, NetworkError
from swarmcli.events import Event, PeerBanned, PeerConnected, PeerRefused
from swarmcli.network import wire
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.task_owner import TaskOwner
from swarmcli.recent import Recent
from swarmcli.tasks import OFFLOAD_FROM, on_executor

MAX_BANS = 1024  # that others told of and are remembered, and as many that were found here
MAX_TOLD_BY_ONE = 64  # of these, by one peer
MAX_EVIDENCE = 16 << 10  # bytes of one piece
MAX_TOLD = 16  # pieces in one message
MESSAGE_BYTES = 64 << 10  # of all pieces in one message
_PATIENCE = 10.0  # seconds for a peer to hear of evidence

_Encoded = Annotated[bytes, msgspec.Meta(max_length=MAX_EVIDENCE)]

logger = logging.getLogger(__name__)


class Told(msgspec.Struct, frozen=True):
    """Evidence of lies, encoded piece by piece: a piece that a reader does not understand does not spoil the others.
    The peer that hears it answers with what it knows itself."""

    evidence: Annotated[tuple[_Encoded, ...], msgspec.Meta(max_length=MAX_TOLD)]


class Proof(Protocol):
    """What bans: `Evidence`, which travels in a message, or what is too large for that and convinces whoever has it."""

    @property
    def culprit(self) -> PeerID: ...
    def verify(self) -> bool: ...
    def words(self) -> str: ...


class Bans:
    """The banned peers of one run, as this peer knows them. Nothing is in here that was not verified.

    What was found here stays as long as this peer. Of what others told, strangers could make up any amount with
    identities that cost nothing: when there is too much of it, that of the peer who told most goes first.
    """

    def __init__(self, emit: Callable[[Event], None] = lambda event: None) -> None:
        """`emit` gets a PeerBanned for each new ban."""
        self.found: Recent[PeerID, Proof] = Recent(MAX_BANS)  # by this peer, to be told to others
        self._told: OrderedDict[PeerID, tuple[PeerID, Evidence]] = OrderedDict()  # culprit → who told it, and showed
        self._emit = emit
        self._listeners: dict[Callable[[PeerID], None], None] = {}

    def __len__(self) -> int:
        return len(self.found.keys() | self._told.keys())

    def is_banned(self, peer: PeerID) -> bool:
        return peer in self.found or peer in self._told

    def add(self, evidence: Proof) -> bool:
        """Evidence that this peer came upon itself. Returns whether it proves what it says; its culprit is banned."""
        if not evidence.verify():
            return False
        culprit, known = evidence.culprit, self.is_banned(evidence.culprit)
        if culprit not in self.found:
            self.found[culprit] = evidence
            self._told.pop(culprit, None)
            self._tell(evidence, known)
        return True

    def take(self, evidence: Evidence, teller: PeerID) -> None:
        """Evidence of another peer, which has been verified."""
        culprit = evidence.culprit
        if self.is_banned(culprit):
            return
        counts = Counter(each for each, _ in self._told.values())
        if counts[teller] >= MAX_TOLD_BY_ONE:
            self._drop_oldest_of(teller)
        elif len(self._told) >= MAX_BANS:
            self._drop_oldest_of(max(counts, key=lambda each: counts[each]))
        self._told[culprit] = teller, evidence
        self._tell(evidence, False)

    def proof(self, peer: PeerID) -> Proof | None:
        """For what it was banned; None if it was not."""
        return self.found.get(peer) or (self._told[peer][1] if peer in self._told else None)

    def known(self) -> list[Proof]:
        """What this peer found, then what others told, the latest first."""
        return [*reversed(self.found.values()), *(evidence for _, evidence in reversed(self._told.values()))]

    def subscribe(self, listener: Callable[[PeerID], None]) -> Callable[[], object]:
        """`listener` hears of each peer when it is banned; the returned function ends that. Idempotent."""
        self._listeners[listener] = None
        return lambda: self._listeners.pop(listener, None)

    def check(self, peer: PeerID) -> None:
        """Raises CallRefused for a banned peer."""
        if self.is_banned(peer):
            raise CallRefused("banned", "this peer was banned from the run, since it lied")

    def _tell(self, evidence: Proof, known: bool) -> None:
        if not known:
            self._emit(PeerBanned(evidence.culprit.text, evidence.words()))
            for listener in list(self._listeners):
                listener(evidence.culprit)

    def _drop_oldest_of(self, teller: PeerID) -> None:
        del self._told[next(culprit for culprit, (each, _) in self._told.items() if each == teller)]


class BanNews:
    """Brings the bans of one run from peer to peer. One for all averagers of the run: see `of`."""

    def __init__(self, node: DHTNode, run: str) -> None:
        self.bans = Bans(node.endpoint.events.emit)
        self._endpoint = node.endpoint
        self.method = f"bans.tell.{run}"
        self._users = 0
        self._false = Backoff[PeerID](first=600.0, longest=86400.0)  # peers that told something that proves nothing
        self._tasks = TaskOwner()
        self._listens = ExitStack()

    @classmethod
    def of(cls, node: DHTNode, run: str) -> BanNews:
        """The one that all averagers of this run at this node share."""
        news = _SHARED.get((id(node), run))
        if news is None:
            news = _SHARED[id(node), run] = cls(node, run)
        return news

    def start(self) -> None:
        """Begins to listen and to tell, for as many users as have called it."""
        self._users += 1
        if self._users == 1:
            self._endpoint.serve(self.method, Told, self._hear)
            self._listens.callback(self._endpoint.events.subscribe(self._on_event))
            self._listens.callback(self.bans.subscribe(self._on_ban))
            self.tell(self._endpoint.connected())  # each answers with what it knows

    async def stop(self) -> None:
        """One user less; with the last one it ends. What is known stays, for users to come."""
        self._users -= 1
        if self._users == 0:
            self._endpoint.withdraw(self.method)
            self._listens.close()
            await self._tasks.close()

    def tell(self, peers: Iterable[PeerID], of: Iterable[PeerID] = ()) -> None:
        """These hear soon what this peer knows, first `of` those: a liar that shows evidence to some members alone
        keeps them from groups with the others. Banned peers do not hear."""
        message = self._message(of)
        for peer in set(peers) - {self._endpoint.peer_id}:
            if self._users and not self.bans.is_banned(peer):
                self._tasks.spawn(self._tell_one(peer, message))

    def _on_ban(self, culprit: PeerID) -> None:
        if culprit in self.bans.found:
            self.tell(self._endpoint.connected(), of=[culprit])

    def _on_event(self, event: Event) -> None:
        if isinstance(event, PeerConnected) and len(self.bans):
            self.tell([PeerID.parse(event.peer)])

    def _message(self, of: Iterable[PeerID] = ()) -> Told:
        """Evidence against `of` these, and the latest, as far as it has room."""
        chosen, left = list[bytes](), MESSAGE_BYTES
        first = [proof for culprit in of if (proof := self.bans.proof(culprit)) is not None]
        for evidence in {proof.culprit: proof for proof in (*first, *self.bans.known())}.values():
            if not isinstance(evidence, msgspec.Struct):
                continue  # the inputs of a whole part: its group has seen them
            piece = wire.encode(evidence)
            if len(piece) <= min(left, MAX_EVIDENCE) and len(chosen) < MAX_TOLD:
                chosen.append(piece)
                left -= len(piece)
        return Told(tuple(chosen))

    async def _tell_one(self, peer: PeerID, message: Told) -> None:
        try:
            answer = await self._endpoint.call(peer, self.method, message, Told, timeout=_PATIENCE)
            await self._take(peer, answer)
        except NetworkError as error:  # it has no part in the run, or tells something false
            logger.debug("%s and this peer do not share bans: %s", peer.short, error)

    async def _hear(self, peer: PeerID, message: Told) -> Told:
        self.bans.check(peer)
        await self._take(peer, message)
        return self._message()

    async def _take(self, teller: PeerID, message: Told) -> None:
        """Believes what is proved. Raises CallRefused for a piece that proves nothing; its teller is not heard for a
        while, longer each time: so few messages can make this peer verify something in vain."""
        if message.evidence and self._false.rests(teller, loop_time()):
            raise CallRefused("not believed", "this peer has told something false before")
        for piece in message.evidence:
            try:
                evidence: Evidence = wire.decode(cast(Any, Evidence), piece)
            except msgspec.DecodeError:
                continue  # of a later version of this program, perhaps
            if self.bans.is_banned(evidence.culprit):
                continue
            if not await on_executor(OFFLOAD_FROM, evidence.verify):  # a small part may take many passes
                self._false.add(teller, loop_time())
                refused = PeerRefused(teller.text, "it accused a peer without proof", what="evidence")
                self._endpoint.events.emit(refused)
                raise CallRefused("false evidence", "what it shows proves nothing")
            self.bans.take(evidence, teller)


# By node and run, as long as an averager holds it. It holds its node, so no other node has that id meanwhile.
_SHARED: WeakValueDictionary[tuple[int, str], BanNews] = WeakValueDictionary()
