"""Bans peers that have lied in a run, by evidence that anyone can check: nobody averages with them again.

    evidence found here         ──▶ Bans ──▶ told to every peer that is connected, or connects later
    evidence of others          ──▶ verified by each that hears it
    a peer that begins to average   asks the peers with which it is connected

A ban is of an identity, for the run. A stranger can come again under a fresh identity at no cost: bans keep liars from
lying for long under one name, and take the trust that the name had earned.

Each kind of evidence has a `culprit`, `verify` (whether it proves the lie, with bounded work) and `words`. Anyone can
check it without having been there, and nobody can make evidence against an honest peer.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Annotated, Any, Protocol, TypeAlias, cast
from weakref import WeakValueDictionary

import msgspec

from swarmcli.averaging.config import MAX_PREFIX
from swarmcli.averaging.consensus.certificate import DoubleVote
from swarmcli.averaging.consensus.messages import GroupID, Signature, SignedAverages
from swarmcli.averaging.group import MAX_SEARCH_BYTES, is_listed
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

MAX_BANS = 1024  # that others told and this peer remembers, and as many that it found itself
MAX_TOLD_BY_ONE = 64  # of these, by one peer
MAX_EVIDENCE = 16 << 10  # bytes of one piece
MAX_TOLD = 16  # pieces in one message
MESSAGE_BYTES = 64 << 10  # of all pieces in one message

_Encoded = Annotated[bytes, msgspec.Meta(max_length=MAX_EVIDENCE)]

logger = logging.getLogger(__name__)


class UnlikeAverages(msgspec.Struct, frozen=True, tag=True):
    """A reducer signed two unlike sets of averages in one try at a round. Honest ones form each average once."""

    culprit: PeerID
    prefix: Annotated[str, msgspec.Meta(max_length=MAX_PREFIX)]
    group_id: GroupID
    first: SignedAverages
    second: SignedAverages

    def verify(self) -> bool:
        """Whether it proves the lie; two signatures are checked."""
        both = self.first, self.second
        unlike = self.first.root != self.second.root
        return unlike and all(each.is_by(self.culprit, self.prefix, self.group_id) for each in both)

    def words(self) -> str:
        return f"it gave members of round {self.group_id.hex()[:8]} unlike averages, and signed both"


class TwoGroups(msgspec.Struct, frozen=True, tag=True):
    """A leader signed two groups in one `search` of its own. Honest ones begin one in each."""

    culprit: PeerID
    search: Annotated[bytes, msgspec.Meta(max_length=MAX_SEARCH_BYTES)]
    groups: tuple[GroupID, GroupID]
    listed: tuple[Signature, Signature]

    def verify(self) -> bool:
        """Whether it proves the lie; two signatures are checked."""
        both = zip(self.groups, self.listed, strict=True)
        return self.groups[0] != self.groups[1] and all(
            is_listed(self.culprit, self.search, group_id, signature) for group_id, signature in both
        )

    def words(self) -> str:
        return f"it began two groups at once, {self.groups[0].hex()[:8]} and {self.groups[1].hex()[:8]}"


Evidence: TypeAlias = DoubleVote | TwoGroups | UnlikeAverages  # a tagged union: further kinds join it with |


class ToldEvidence(msgspec.Struct, frozen=True):
    """Evidence of lies, encoded piece by piece: a piece that a reader does not understand does not spoil the others.
    The peer that hears it answers with what it knows itself."""

    evidence: Annotated[tuple[_Encoded, ...], msgspec.Meta(max_length=MAX_TOLD)]


class Proof(Protocol):
    """Grounds for a ban: `Evidence`, which travels in a message, or a case too large for that, which stays here."""

    @property
    def culprit(self) -> PeerID: ...
    def verify(self) -> bool: ...
    def words(self) -> str: ...


class Bans:
    """The banned peers of one run, as this peer knows them. All evidence in here was verified.

    Evidence that this peer found stays as long as it runs. Strangers could make up any amount of evidence with
    identities that cost nothing: when others have told too much, that of the peer that told most goes first.
    """

    def __init__(self, emit: Callable[[Event], None] = lambda event: None) -> None:
        """`emit` gets a PeerBanned for each new ban."""
        self.found: Recent[PeerID, Proof] = Recent(MAX_BANS)  # by this peer, to be told to others
        self._told: OrderedDict[PeerID, tuple[PeerID, Evidence]] = OrderedDict()  # culprit → teller and evidence
        self._emit = emit
        self._listeners: dict[Callable[[PeerID], None], None] = {}

    def __len__(self) -> int:
        return len(self.found.keys() | self._told.keys())

    def is_banned(self, peer: PeerID) -> bool:
        return peer in self.found or peer in self._told

    def add(self, evidence: Proof) -> bool:
        """Evidence that this peer found itself. Returns whether it proves the lie; its culprit is banned."""
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
        """The evidence against a banned peer; None for any other peer."""
        return self.found.get(peer) or (self._told[peer][1] if peer in self._told else None)

    def known(self) -> list[Proof]:
        """The evidence that this peer found, then that of others, the latest first."""
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

    def __init__(self, node: DHTNode, run: str, *, patience: float = 10.0) -> None:
        """`patience`: seconds for a peer to hear of evidence."""
        self.bans = Bans(node.endpoint.events.emit)
        self._endpoint, self._patience = node.endpoint, patience
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
            self._endpoint.serve(self.method, ToldEvidence, self._hear)
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
        """Tells these peers the evidence that this one has, first that against `of`: a liar that shows evidence to some
        members alone keeps them from groups with the others. Banned peers do not hear."""
        message = self._message(of)
        for peer in dict.fromkeys(peers):  # sets differ in order from process to process
            if self._users and peer != self._endpoint.peer_id and not self.bans.is_banned(peer):
                self._tasks.spawn(self._tell_one(peer, message))

    def _on_ban(self, culprit: PeerID) -> None:
        if culprit in self.bans.found:
            self.tell(self._endpoint.connected(), of=[culprit])

    def _on_event(self, event: Event) -> None:
        if isinstance(event, PeerConnected) and len(self.bans):
            self.tell([PeerID.parse(event.peer)])

    def _message(self, of: Iterable[PeerID] = ()) -> ToldEvidence:
        """Evidence against `of` these, and then the latest, as far as the message has room."""
        chosen, left = list[bytes](), MESSAGE_BYTES
        first = [proof for culprit in of if (proof := self.bans.proof(culprit)) is not None]
        for evidence in {proof.culprit: proof for proof in (*first, *self.bans.known())}.values():
            if not isinstance(evidence, msgspec.Struct):
                continue  # the inputs of a whole part: its group has seen them
            piece = wire.encode(evidence)
            if len(piece) <= min(left, MAX_EVIDENCE) and len(chosen) < MAX_TOLD:
                chosen.append(piece)
                left -= len(piece)
        return ToldEvidence(tuple(chosen))

    async def _tell_one(self, peer: PeerID, message: ToldEvidence) -> None:
        try:
            answer = await self._endpoint.call(peer, self.method, message, ToldEvidence, timeout=self._patience)
            await self._take(peer, answer)
        except NetworkError as error:  # the peer has no part in the run, or tells something false
            logger.debug("%s and this peer do not share bans: %s", peer.short, error)

    async def _hear(self, peer: PeerID, message: ToldEvidence) -> ToldEvidence:
        self.bans.check(peer)
        await self._take(peer, message)
        return self._message()

    async def _take(self, teller: PeerID, message: ToldEvidence) -> None:
        """Bans by pieces that prove a lie. Raises CallRefused for a piece that proves nothing; this peer does not hear
        its teller for a while, longer each time: so few messages can make this peer verify something in vain."""
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
