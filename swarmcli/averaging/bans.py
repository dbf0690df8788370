"""Who has lied in a run, by evidence that anyone can check: nobody averages with them again.

    evidence found here ──▶ Bans ──▶ told to connected peers, and under a key of the run in the hash table
    evidence of others  ──▶ verified by each reader, then the same

A ban is of an identity, for the run. It costs a stranger nothing to come again under a fresh one: bans keep liars from
lying for long under one name, and what they had earned with it is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Protocol, cast
from weakref import WeakValueDictionary

import msgspec

from swarmcli.averaging.evidence import Evidence
from swarmcli.backoff import Backoff
from swarmcli.dht.node import DHTNode
from swarmcli.dht.records import OwnedSubkey
from swarmcli.errors import CallRefused, DHTError, NetworkError
from swarmcli.events import Event, PeerBanned, PeerRefused
from swarmcli.network import wire
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.task_owner import TaskOwner
from swarmcli.recent import Recent
from swarmcli.tasks import OFFLOAD_FROM, Bell, on_executor

MAX_BANS = 1024  # that others told of and are remembered, and as many that were found here
MAX_TOLD_BY_ONE = 64  # of these, by one peer
MAX_EVIDENCE = 16 << 10  # bytes of one piece
MAX_TOLD = 16  # pieces in one message, and under the subkey of one peer
RECORD_BYTES = 64 << 10  # of all pieces under one subkey
# Seconds that a record of evidence lives; who found it writes it anew while it takes part. A flooded key takes in
# nothing that lives longer (`DHTLimits.crowded_life`), and liars have a reason to flood this one.
LIFETIME = 1800.0
READ_EVERY = 60.0  # seconds between two looks at what others have found
_PATIENCE = 10.0  # seconds for a peer to hear of evidence

_Encoded = Annotated[bytes, msgspec.Meta(max_length=MAX_EVIDENCE)]

logger = logging.getLogger(__name__)


class Told(msgspec.Struct, frozen=True):
    """Evidence of lies, encoded piece by piece: what one reader does not understand does not spoil the others."""

    evidence: Annotated[tuple[_Encoded, ...], msgspec.Meta(max_length=MAX_TOLD)]


class Heard(msgspec.Struct, frozen=True):
    """The empty answer."""


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
        self.news = Bell()  # rings when evidence was found here

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
            self.news.ring()
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

    def shown(self, culprits: Iterable[PeerID]) -> list[Evidence]:
        """What others showed of these."""
        return [self._told[culprit][1] for culprit in culprits if culprit in self._told]

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
        self._node, self._run = node, run
        self.method, self._key = f"bans.tell.{run}", f"{run}.bans"
        self._users = 0
        self._false = Backoff[PeerID](first=600.0, longest=86400.0)  # who told something that proves nothing
        self._read: dict[PeerID, int] = {}  # hashes of the records that were read last
        self._tasks = TaskOwner()

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
            self._node.endpoint.serve(self.method, Told, self._hear)
            self._tasks.keep(self._node.endpoint.events, self._keep_telling, self._keep_reading)

    async def stop(self) -> None:
        """One user less; with the last one it ends. What is known stays, for users to come."""
        self._users -= 1
        if self._users == 0:
            self._node.endpoint.withdraw(self.method)
            await self._tasks.close()

    def tell(self, peers: Iterable[PeerID], of: Iterable[PeerID] = ()) -> None:
        """These hear what was found here, soon, and what others showed `of` those: whoever shows it to some alone keeps
        them from groups with the others. Who is banned does not hear."""
        message = self._message(of)
        for peer in set(peers) - {self._node.peer_id}:
            if self._users and not self.bans.is_banned(peer):
                self._tasks.spawn(self._tell_one(peer, message))

    # Others hear it

    def _message(self, of: Iterable[PeerID] = ()) -> Told:
        """What others showed `of` these, and the latest that was found here, as far as it has room in a record."""
        chosen, left = list[bytes](), RECORD_BYTES
        for evidence in (*self.bans.shown(of), *reversed(self.bans.found.values())):
            if not isinstance(evidence, msgspec.Struct):
                continue  # the inputs of a whole part: its group has seen them
            piece = wire.encode(evidence)
            if len(piece) <= min(left, MAX_EVIDENCE) and len(chosen) < MAX_TOLD:
                chosen.append(piece)
                left -= len(piece)
        return Told(tuple(chosen))

    async def _keep_telling(self) -> None:
        """Whoever is connected hears at once, and the hash table again and again."""
        news = asyncio.ensure_future(self.bans.news.wait())
        try:
            if self.bans.found:
                self.tell(self._node.endpoint.connected())
                await self._publish()
            await asyncio.wait([news], timeout=LIFETIME / 2 if self.bans.found else None)
        finally:
            news.cancel()

    async def _tell_one(self, peer: PeerID, message: Told) -> None:
        try:
            await self._node.endpoint.call(peer, self.method, message, Heard, timeout=_PATIENCE)
        except NetworkError as error:  # it has no part in the run, or it will read it in the hash table
            logger.debug("%s did not hear of a ban: %s", peer.short, error)

    async def _publish(self) -> None:
        expiration = self._node.endpoint.clock.now() + LIFETIME
        try:
            await self._node.store(self._key, wire.encode(self._message()), expiration, self._node.own_subkey())
        except (NetworkError, DHTError) as error:
            logger.debug("bans of %s are not in the hash table: %s", self._run, error)

    # What others found

    async def _hear(self, peer: PeerID, message: Told) -> Heard:
        if self._false.rests(peer, loop_time()) or self.bans.is_banned(peer):
            raise CallRefused("not believed", "this peer has told something false before")
        await self._take(peer, message)
        return Heard()

    async def _keep_reading(self) -> None:
        follower = self._node.follow(self._key, only_bytes=True)
        while True:
            try:
                found = await follower.refresh()
                records = {
                    subkey.owner: entry.value
                    for subkey, entry in found.items()
                    if isinstance(subkey, OwnedSubkey) and isinstance(entry.value, bytes)
                }
                self._read = {owner: seen for owner, seen in self._read.items() if owner in records}
                for owner, value in records.items():
                    if self._read.get(owner) != hash(value):
                        self._read[owner] = hash(value)  # before: a fault in one keeps nobody from the others
                        await self._read_record(owner, value)
            except (NetworkError, DHTError) as error:
                logger.debug("bans of %s are out of reach: %s", self._run, error)
            await asyncio.sleep(READ_EVERY)

    async def _read_record(self, owner: PeerID, value: bytes) -> None:
        if self._false.rests(owner, loop_time()) or self.bans.is_banned(owner):
            return
        try:
            await self._take(owner, wire.decode(Told, value))
        except (msgspec.DecodeError, CallRefused) as error:
            logger.debug("what %s says of bans is not believed: %s", owner.short, error)

    async def _take(self, teller: PeerID, message: Told) -> None:
        """Believes what is proved. Raises CallRefused for a piece that proves nothing; its teller is not heard for a
        while, longer each time: so few messages can make this peer verify something in vain."""
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
                self._node.endpoint.events.emit(refused)
                raise CallRefused("false evidence", "what it shows proves nothing")
            self.bans.take(evidence, teller)


# By node and run, as long as an averager holds it. It holds its node, so no other node has that id meanwhile.
_SHARED: WeakValueDictionary[tuple[int, str], BanNews] = WeakValueDictionary()
